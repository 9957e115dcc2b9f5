"""Private names of torch's distributed parts."""

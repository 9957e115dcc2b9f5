"""Parts of a graph computed for a few rows, or a few images, at a time."""

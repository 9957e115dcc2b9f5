"""All graphs of a step under one budget."""

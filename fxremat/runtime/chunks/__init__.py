"""The operators that compute a part of a graph for a few rows, or a few images, at a time."""

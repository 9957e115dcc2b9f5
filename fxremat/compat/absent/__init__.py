"""Code for a CUDA device that is not here: what torch asks of it, and graphs that lie on it."""

"""Inductor's own code run on tensors without memory: the truth about the bytes of one graph."""

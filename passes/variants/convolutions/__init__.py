"""Convolutions in less memory: their gradients apart, in parts, or by another algorithm."""

"""Passes over gradients: sums, accumulation, and steps of the optimizer."""

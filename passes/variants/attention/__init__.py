"""Attention written by hand, computed by the fused kernels of the device."""

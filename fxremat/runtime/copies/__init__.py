"""Copies between a device and host memory that run beside the computation."""

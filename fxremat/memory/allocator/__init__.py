"""Bytes that torch's CUDA caching allocator reserves for a sequence of allocations."""

"""Sizes that torch's CUDA caching allocator works with: how requests and segments are rounded.

Source: torch, c10/core/AllocatorConfig.h (the constants) and c10/cuda/CUDACachingAllocator.cpp
(`round_size`, `get_allocation_size`, `should_split`).
"""

from __future__ import annotations

from fxremat.memory.allocator.settings import AllocatorSettings
from fxremat.sizes import MIB

MIN_BLOCK_BYTES = 512
"""Every block is a multiple of this; no block is smaller."""
LARGEST_SMALL_BYTES = MIB
"""A request is small, after rounding, up to this size."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""What one cudaMalloc of the small pool takes, and a page of its expandable segments."""
LARGE_REQUEST_BYTES = 10 * MIB
"""From here on, a request of the large pool has a segment of its own size."""
SEGMENT_STEP_BYTES = 2 * MIB
"""Segments of such requests are multiples of this."""


def round_up(nbytes: int, step_bytes: int) -> int:
    """The least multiple of ``step_bytes`` that is at least ``nbytes``."""
    return -(-nbytes // step_bytes) * step_bytes


def _next_division(nbytes: int, divisions: int) -> int:
    """``nbytes`` rounded up in the grid that cuts each power of two into ``divisions`` parts."""
    power = 1 << (nbytes.bit_length() - 1)
    return round_up(nbytes, power // divisions)


def round_request(nbytes: int, settings: AllocatorSettings) -> int:
    """Bytes of the block that a request of ``nbytes`` (at least one) asks for."""
    if nbytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    divisions = settings.divisions_for(nbytes)
    if divisions > 1 and nbytes > MIN_BLOCK_BYTES * divisions:
        return _next_division(nbytes, divisions)
    return round_up(nbytes, MIN_BLOCK_BYTES)


def segment_bytes_for(block_bytes: int, settings: AllocatorSettings) -> int:
    """Bytes that cudaMalloc is asked for when no cached block serves ``block_bytes``."""
    if block_bytes <= LARGEST_SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < LARGE_REQUEST_BYTES:
        return settings.large_segment_bytes
    return round_up(block_bytes, SEGMENT_STEP_BYTES)


def is_worth_splitting(
    free_bytes: int, block_bytes: int, small: bool, settings: AllocatorSettings
) -> bool:
    """Whether the rest of a free block of ``free_bytes`` becomes a free block of its own."""
    rest_bytes = free_bytes - block_bytes
    if small or settings.expandable_segments:
        return rest_bytes >= MIN_BLOCK_BYTES
    if settings.is_oversize(block_bytes):
        return False
    return rest_bytes > LARGEST_SMALL_BYTES

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


def round_up(nbytes: int, multiple: int) -> int:
    """The least of the multiples that is at least ``nbytes``."""
    return -(-nbytes // multiple) * multiple


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


def segment_bytes_for(block: int, settings: AllocatorSettings) -> int:
    """Bytes that cudaMalloc is asked for when no cached block serves ``block`` bytes."""
    if block <= LARGEST_SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block < LARGE_REQUEST_BYTES:
        return settings.large_segment
    return round_up(block, SEGMENT_STEP_BYTES)


def is_worth_splitting(free: int, block: int, small: bool, settings: AllocatorSettings) -> bool:
    """Whether the rest of a free block of ``free`` bytes becomes a free block of its own."""
    rest = free - block
    if small or settings.expandable_segments:
        return rest >= MIN_BLOCK_BYTES
    if settings.is_oversize(block):
        return False
    return rest > LARGEST_SMALL_BYTES

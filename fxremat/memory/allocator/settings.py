"""The settings of PYTORCH_ALLOC_CONF (PYTORCH_CUDA_ALLOC_CONF) that change bytes on the device.

Read from the text that torch reads: ``key:value`` pairs between commas, lists in brackets. Names
and defaults: torch, c10/core/AllocatorConfig.{h,cpp} and c10/cuda/CUDAAllocatorConfig.{h,cpp}.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxremat.errors import InvalidOption
from fxremat.sizes import MIB, format_bytes

INTERVALS = 16
"""Sizes from 1 MiB to 64 GiB have this many powers of two, each with its own rounding."""


@dataclass(frozen=True)
class AllocatorSettings:
    """How torch's caching allocator is set; the defaults are torch's.

    ``max_split_bytes`` None: blocks of every size are split. ``divisions`` has one number for each
    power of two from 1 MiB on; 0 and 1 round to 512 bytes alone. ``memory_fraction`` below 1 limits
    the process to that part of the device; garbage is collected only then. Raises `InvalidOption`
    (a `ValueError`) for values that torch does not take.
    """

    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * MIB
    large_segment_bytes: int = 20 * MIB
    divisions: tuple[int, ...] = (0,) * INTERVALS
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    memory_fraction: float = 1.0

    def __post_init__(self) -> None:
        large = format_bytes(self.large_segment_bytes)
        least = f"at least one large segment ({large}); raise it, or lower large_segment_size_mb"
        if self.large_segment_bytes <= 10 * MIB:
            raise _invalid("large_segment_size_mb", self.large_segment_bytes // MIB, "more than 10")
        if self.max_split_bytes is not None and self.max_split_bytes < self.large_segment_bytes:
            raise _invalid("max_split_size_mb", self.max_split_bytes // MIB, least)
        if self.max_non_split_rounding_bytes < self.large_segment_bytes:
            rounding_mb = self.max_non_split_rounding_bytes // MIB
            raise _invalid("max_non_split_rounding_mb", rounding_mb, least)
        if not 0.0 <= self.garbage_collection_threshold < 1.0:
            threshold = self.garbage_collection_threshold
            raise _invalid("garbage_collection_threshold", threshold, "a number between 0 and 1")
        if not 0.0 < self.memory_fraction <= 1.0:
            fraction = self.memory_fraction
            raise _invalid("per_process_memory_fraction", fraction, "more than 0 and at most 1")
        if len(self.divisions) != INTERVALS or not all(map(_is_division, self.divisions)):
            divisions = self.divisions
            raise _invalid("roundup_power2_divisions", divisions, f"{INTERVALS} powers of 2 or 0")

    def divisions_for(self, nbytes: int) -> int:
        """Into how many parts the power of two below ``nbytes`` is cut; 0 and 1: no such grid."""
        interval = nbytes.bit_length() - MIB.bit_length()
        return self.divisions[min(max(interval, 0), INTERVALS - 1)]

    def is_oversize(self, nbytes: int) -> bool:
        """Whether a block of ``nbytes`` is never split."""
        return self.max_split_bytes is not None and nbytes >= self.max_split_bytes


def _invalid(key: str, value: object, expected: str) -> InvalidOption:
    return InvalidOption(key, value, expected, variable="PYTORCH_ALLOC_CONF")


def _is_division(count: int) -> bool:
    return count >= 0 and count & (count - 1) == 0

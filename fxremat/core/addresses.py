"""The nouns of planned addresses: buffers with known lifetimes, and where each lies in one arena.

A buffer is alive during the steps ``begin <= step < end``. While it is alive it takes the bytes
``offset <= byte < offset + padded_bytes`` of the arena: whole units of its
alignment, as from an allocator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Buffer:
    """Bytes that are needed from step ``begin`` up to, but not in, step ``end``.

    Its offset has to be a multiple of ``alignment_bytes``. Raises `ValueError` where it lives for
    no step, or where the size is negative or the alignment is not positive.
    """

    name: str
    begin: int
    end: int
    size_bytes: int
    alignment_bytes: int = 1

    def __post_init__(self) -> None:
        if self.begin >= self.end:
            raise ValueError(f"{self.name} lives for no step: [{self.begin}, {self.end})")
        if self.size_bytes < 0 or self.alignment_bytes < 1:
            raise ValueError(
                f"{self.name}: size {self.size_bytes}, alignment {self.alignment_bytes}; "
                "a size is at least 0, an alignment at least 1"
            )

    @property
    def padded_bytes(self) -> int:
        """The size, rounded up to a multiple of the alignment."""
        return -(-self.size_bytes // self.alignment_bytes) * self.alignment_bytes


@dataclass(frozen=True)
class Placement:
    """The offset of every buffer, in bytes from the start of an arena of ``arena_bytes``."""

    offset_bytes: Mapping[str, int]
    arena_bytes: int


def live_peak(buffers: Iterable[Buffer]) -> int:
    """The greatest sum of padded sizes alive at one step.

    No arena is smaller: buffers that are alive at one step share no byte.
    """
    change: defaultdict[int, int] = defaultdict(int)
    for buffer in buffers:
        change[buffer.begin] += buffer.padded_bytes
        change[buffer.end] -= buffer.padded_bytes
    return max(accumulate(change[step] for step in sorted(change)), default=0)

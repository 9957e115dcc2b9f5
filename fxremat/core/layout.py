"""Where the buffers of generated code lie: offsets in one arena, decided with the plan. Plain data.

The code that Inductor generates asks for its buffers in an order that is fixed. A layout of one
half of a run, its forward or its backward, is one offset for each of these calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class CodeBuffer:
    """One call of the generated code for memory, as it asks.

    ``block`` is the name of its allocation among the events of the run (`core.events.RunEvents`),
    None where it is on another device than the one that is counted. ``itemsize`` is in bytes.
    """

    block: str | None
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        """From the first to the last element."""
        return extent(self.size, self.stride) * self.itemsize


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements there are from the first to the last one of a tensor."""
    if not prod(size):
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


@dataclass(frozen=True)
class HalfLayout:
    """The offset in the arena of each call of one half, in order; None: allocated outside of it.

    ``outlive`` are the places of those calls whose buffers lie in the arena and are alive when the
    half has ended: what a forward saves, and gradients.
    """

    buffers: tuple[CodeBuffer, ...] = ()
    offsets: tuple[int | None, ...] = ()
    outlive: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RunLayout:
    """The layouts of both halves of one run of a graph."""

    forward: HalfLayout = HalfLayout()
    backward: HalfLayout = HalfLayout()


@dataclass(frozen=True)
class StepLayout:
    """The layouts of all runs of a step in one arena of ``arena_bytes``, in the order of runs.

    What lies outside of it on a GPU has a private pool. ``pool_bytes`` are asked for there, and
    freed, before anything else: the pool divides that segment as it goes.
    """

    runs: tuple[RunLayout, ...] = ()
    arena_bytes: int = 0
    pool_bytes: int = 0


NOWHERE = StepLayout()
"""No run has places."""


@dataclass(frozen=True)
class OwnPools:
    """What a graph reserves on CUDA where nobody else allocates: bytes of its arena, and its pool.

    The pool begins with a ``first_segment`` of so many bytes. In a loop of steps it is ``asked``
    for blocks of so many; a negative number n frees the block that came as number -n - 1.
    """

    arena_bytes: int = 0
    pool_bytes: int = 0
    first_segment: int = 0
    asked: tuple[int, ...] = ()


@dataclass(frozen=True)
class Buffer:
    """Bytes that are needed from step ``begin`` up to, but not in, step ``end``.

    Meanwhile it takes the bytes ``offset <= byte < offset + padded_bytes`` of an arena, whole units
    of its alignment, of which the offset is a multiple, too: as from an allocator. Raises
    `ValueError` where it lives for no step, or where the size is negative or the alignment is not
    positive.
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

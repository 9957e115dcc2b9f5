"""The device as the allocator sees it: so many bytes, taken and given back in segments or pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fxremat.memory.allocator.rules import round_up
from fxremat.sizes import MIB

Action = Literal[
    "segment_alloc", "segment_free", "segment_map", "segment_unmap", "alloc", "free_completed"
]
_FIRST_ADDRESS = 1 << 40


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that the allocator did, in the words of torch's memory snapshots.

    ``nbytes`` are those of the segment, the pages or the block; ``requested_bytes`` are what the
    caller asked for.
    """

    action: Action
    address: int
    nbytes: int
    stream: int
    small: bool
    requested_bytes: int = 0


@dataclass(slots=True)
class Level:
    """Bytes that go up and down, and the most they have been."""

    now: int = 0
    peak: int = 0

    def change(self, nbytes: int) -> None:
        """Adds ``nbytes``, which may be negative."""
        self.now += nbytes
        if self.now > self.peak:
            self.peak = self.now


@dataclass(eq=False)
class Device:
    """Memory of ``capacity_bytes`` (None: without end); ``log`` keeps what was done, if given.

    Addresses grow and are never used twice, which cudaMalloc does not promise. They matter where
    two free blocks have the same size: the lower one is taken.
    """

    capacity_bytes: int | None
    log: list[Entry] | None = None
    reserved: Level = field(default_factory=Level)
    calls: int = 0
    _next_address: int = _FIRST_ADDRESS

    def take(self, nbytes: int) -> bool:
        """Takes memory; False where there is not as much."""
        if self.capacity_bytes is not None and self.reserved.now + nbytes > self.capacity_bytes:
            return False
        self.calls += 1
        self.reserved.change(nbytes)
        return True

    def give_back(self, nbytes: int) -> None:
        """Memory that is the device's again."""
        self.reserved.change(-nbytes)

    def addresses(self, nbytes: int, step_bytes: int = 2 * MIB) -> int:
        """The first of ``nbytes`` addresses that nothing else has; a multiple of the step."""
        address = round_up(self._next_address, step_bytes)
        self._next_address = address + nbytes + step_bytes
        return address

    def record(
        self,
        action: Action,
        address: int,
        nbytes: int,
        stream: int,
        small: bool,
        requested_bytes: int = 0,
    ) -> None:
        """Adds an entry to the log, if one is kept."""
        if self.log is not None:
            self.log.append(Entry(action, address, nbytes, stream, small, requested_bytes))

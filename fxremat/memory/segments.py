"""One segment of CUDA memory, taken before a graph first runs, for all that it will allocate.

torch's allocator takes segments from the device as a step asks for memory, and later requests fit
these only in part. From one segment that is large enough for the whole step, it cuts what is asked
for, joins what is freed, and cuts again. How large that segment is best is found by a model of the
allocator (`fxremat.memory.reserved_bytes`).

What the first step makes to stay, as the optimizer's states, is cut from the segment, too. The
allocator would put it wherever a hole is large enough, and between such pieces no later step finds
its room. So a room for it is kept at the beginning of the segment while the graph runs. Where the
backward ends, the room is left, and smaller holes are held until the next forward: of all that is
free, the allocator takes the smallest that is large enough.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fxremat.compat.tensors import outside_fake_mode
from fxremat.memory.allocator.rules import LARGEST_SMALL_BYTES, SEGMENT_STEP_BYTES
from fxremat.memory.measured_peak import held_bytes
from fxremat.sizes import MIB, format_bytes

log = logging.getLogger(__name__)

WALL_BYTES = SEGMENT_STEP_BYTES
"""Of a segment, between the room and the rest: without it, both would be one hole."""
LEAST_SEGMENT_BYTES = 20 * MIB
"""torch's allocator takes no smaller ones for blocks that it does not cut from the smallest."""
LEAST_ROOM_BYTES = 4 * MIB
LEAST_HOLE_BYTES = LARGEST_SMALL_BYTES + 1
"""The allocator cuts requests of less from other segments."""
MOST_WAITS = 64
"""Backward passes after which nobody is expected to come into the room."""
SMALL_BYTES = 16 * MIB
"""Of a budget that graphs share: small blocks lie in segments of their own."""


@dataclass
class Segment:
    """``nbytes`` on a device, and the wall; more for what of ``reserve_bytes`` is not there yet.

    Where several graphs share a budget, ``limit_bytes`` is what may be reserved in all. Where
    nobody knows how their blocks come to lie, ``nbytes`` are 0: the segment is what is left of it.
    """

    device: torch.device
    nbytes: int
    reserve_bytes: int
    limit_bytes: int | None = None
    reserved_bytes: int | None = None
    """All that the allocator had from the device when it was taken last."""
    address: int | None = None
    """Where it lies; None where the device had no such piece."""
    _room: torch.Tensor | None = None
    _room_size: int = 0
    _wall: torch.Tensor | None = None
    _holes: list[torch.Tensor] = field(default_factory=list)
    _waits: int = 0

    @property
    def is_due(self) -> bool:
        """Whether there is one, and it is not taken yet, or was given back to the device.

        `torch.cuda.empty_cache()` gives it back between two steps, unless something lives in it.
        """
        if self.nbytes == 0 and self.limit_bytes is None:
            return False
        if self.reserved_bytes is None:
            return True
        reserved_bytes = _reserved(self.device)
        if reserved_bytes >= self.reserved_bytes:
            return False
        self.reserved_bytes = reserved_bytes
        return not any(self._is_in(one["address"], one["total_size"]) for one in _segments())

    def _is_in(self, address: int, nbytes: int) -> bool:
        return self.address is not None and 0 <= self.address - address < nbytes

    def take(self, own_bytes: int) -> None:
        """Have the allocator take it; ``own_bytes`` of what is allocated are the graph's.

        What the allocator keeps from before goes back to the device. Where the device has no such
        piece, the allocator takes its segments as it goes.
        """
        self._room = self._wall = None
        self._holes.clear()
        allocate_cublas(self.device)
        missing = self._missing(own_bytes)
        whole = self.nbytes + WALL_BYTES + missing
        torch.cuda.empty_cache()
        if self.limit_bytes is not None:
            left = self.limit_bytes - _reserved(self.device)
            left = left // WALL_BYTES * WALL_BYTES  # the device gives multiples of that
            whole = min(whole, left) if self.nbytes else left
            if whole < LEAST_SEGMENT_BYTES:
                self.reserved_bytes = _reserved(self.device)
                return
        try:
            self.address = self._hold(whole).data_ptr()
        except torch.OutOfMemoryError:
            self.address = None
            log.warning(
                "the device has no %s in one piece: more may be left unused", format_bytes(whole)
            )
        self._waits = 0
        if self.address is not None and LEAST_ROOM_BYTES <= missing <= whole - WALL_BYTES:
            self._room, self._room_size = self._hold(missing), missing
            self._wall = self._hold(WALL_BYTES)
        self.reserved_bytes = _reserved(self.device)

    @property
    def has_room(self) -> bool:
        """Whether something is expected that stays."""
        return self._wall is not None

    def close_room(self, own_bytes: int) -> None:
        """Before a forward: the room is kept if nobody came, and holes are there for the step.

        Who came may lie anywhere in it, and what is left is in no piece for certain.
        """
        if self._room is not None:
            return  # nothing ran backward since
        missing = self._missing(own_bytes + sum(map(_bytes, (*self._holes, self._wall))))
        if missing > self._room_size - LEAST_ROOM_BYTES and self._waits < MOST_WAITS:
            with suppress(torch.OutOfMemoryError):  # somebody came, and as much went elsewhere
                self._room = self._hold(min(missing, self._room_size))
        if self._room is None:
            self._wall = None
        self._holes.clear()

    def open_room(self) -> None:
        """After a backward: who comes to stay finds the room, and no smaller hole.

        Where the room is larger than all holes, they may be filled: the step then has the room.
        """
        if self._room is None:
            return
        room_size = self._room_size
        holes = [
            block["size"]
            for one in _segments()
            if self._is_in(one["address"], one["total_size"])
            for block in one["blocks"]
            if block["state"] == "inactive" and block["size"] >= LEAST_HOLE_BYTES
        ]
        if max(holes, default=0) > room_size:
            self._holes += [self._hold(size) for size in sorted(holes) if size <= room_size]
        self._room = None
        self._waits += 1

    def _missing(self, own_bytes: int) -> int:
        """Of what is reserved beside the graph, that which is not there yet, in bytes asked for.

        Blocks that the allocator did not cut to size count as more, and belong to what is there.
        """
        requested = _now(self.device, "requested_bytes")
        return max(0, self.reserve_bytes - requested + own_bytes)

    def _hold(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


@dataclass(frozen=True)
class SegmentPlan:
    """How the allocator takes memory for a compiled graph, in bytes.

    ``nbytes`` are taken in one piece before it runs for the first time, 0 where none is better;
    None where it takes memory from elsewhere. Kernels are tuned in ``tuning`` bytes beside that,
    and ``coming`` are still to come into it. With ``several`` a version is one of those of its
    graph; ``shared`` bytes are then one segment for the whole step, 0 where none is better, None
    where that is not known.
    """

    nbytes: int | None = None
    tuning: int = 0
    coming: int = 0
    several: bool = False
    shared: int | None = None


class SegmentPromise(Protocol):
    """What a compiled graph has promised of its memory, as far as segments ask."""

    @property
    def device(self) -> torch.device: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def reserve_bytes(self) -> int: ...
    @property
    def segment(self) -> SegmentPlan: ...


@dataclass
class SharedSegments:
    """What the allocator takes for all graphs that share one budget.

    One graph has a segment of its own, in which its blocks are known to fit. With a second one
    comes a segment for all of them: of the size that all promises name, else all that the budget
    leaves. Taken in the middle of a step, it lies beside the first, so both make one when the next
    step begins.
    """

    known: weakref.WeakValueDictionary[int, SegmentPromise] = field(
        default_factory=weakref.WeakValueDictionary
    )
    one: Segment | None = None
    parts: bool = False
    allocated_before: int | None = None
    """Allocated when the segment for all was taken first; None before."""
    shared_bytes: int | None = None
    """The size that all promises name."""

    def before(
        self, promise: SegmentPromise, waiting: int, args: Iterable[object]
    ) -> Segment | None:
        """The segment that a forward of a graph runs in, taken; ``waiting`` forwards wait."""
        if promise.segment.nbytes is None:
            return None
        device, new = promise.device, id(promise) not in self.known
        self.known[id(promise)] = promise
        if not promise.segment.several and len(self.known) == 1:
            if self.one is None:
                self.one = Segment(device, promise.segment.nbytes, promise.reserve_bytes)
            return self._ready(self.one, _own_bytes(args, device))
        if self._agree() or self.allocated_before is None:
            self.one = self._for_all(promise)
            self.parts = waiting > 0 and self.allocated_before is not None
            self.allocated_before = torch.cuda.memory_allocated(device)
        assert self.one is not None
        if waiting == 0 and self.parts:
            self.one.reserved_bytes, self.parts = None, False
            self.allocated_before = torch.cuda.memory_allocated(device)
        elif new and waiting and self.shared_bytes is None:
            self.one.reserved_bytes, self.parts = None, True
        return self._ready(self.one, self.allocated_before)

    def _agree(self) -> bool:
        """Note the size that all promises name; whether it is another one than before."""
        sizes = {promise.segment.shared for promise in self.known.values()}
        before, self.shared_bytes = self.shared_bytes, sizes.pop() if len(sizes) == 1 else None
        return self.shared_bytes != before

    def _for_all(self, promise: SegmentPromise) -> Segment:
        """The segment of that size, or of all that is left; not taken yet."""
        size, left = self.shared_bytes, promise.budget_bytes - promise.segment.tuning
        if size is None:
            return Segment(promise.device, 0, promise.segment.coming, left - SMALL_BYTES)
        return Segment(promise.device, size, promise.segment.coming, left if size else None)

    def _ready(self, segment: Segment, own_bytes: int) -> Segment:
        if segment.is_due:
            segment.take(own_bytes)
        elif segment.has_room:
            segment.close_room(own_bytes)
        return segment


def _own_bytes(args: Iterable[object], device: torch.device) -> int:
    """Bytes of the arguments of a graph, and of gradients that they have."""
    return held_bytes([one for one in args if isinstance(one, torch.Tensor)], device=device)


def allocate_cublas(device: torch.device) -> None:
    """Have both workspaces allocated: whoever counts what is allocated from now on sees them.

    That of the thread that runs forwards, and that of backwards. Where nothing but deterministic
    algorithms may run, a product may be refused.
    """
    with outside_fake_mode(), torch.inference_mode(False), torch.enable_grad():
        small = torch.ones(2, 2, device=device, requires_grad=True)
        with suppress(RuntimeError):
            torch.autograd.grad((small @ small).sum(), small)


def _bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


def _segments() -> Iterator[dict[str, Any]]:
    """All of the allocator; to ask for them takes long."""
    snapshot: Any = torch.cuda.memory_snapshot
    yield from snapshot()


def _reserved(device: torch.device) -> int:
    """Now; `torch.cuda.memory_reserved` takes ten times as long."""
    return _now(device, "reserved_bytes")


def _now(device: torch.device, statistic: str) -> int:
    """Of the allocator's statistics, in bytes."""
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    return int(statistics[statistic]["all"]["current"])

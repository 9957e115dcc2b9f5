"""One block of memory for the buffers of all graphs that share a budget, at planned addresses.

Each place has a storage of its own, of exactly its bytes, so that what lies there is a tensor like
any other: it has its own version counter, and is saved, copied and shared by itself.

Nothing is ever written over what somebody holds. Who holds what is seen by the use counts of the
storages, and all bytes are looked at before they are given away: where a half of a run begins,
those places that may be held from before (what forwards have saved, gradients, and what was held
against the plan when its half had ended); at each call, those that had the bytes last in the same
half, or were saved for it; where a half ends, all others of it. What is held is left alone, and the
buffer that should have lain there is allocated as ever.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch

from fxremat.compat.tensors import (
    EMPTY,
    Empty,
    new_block,
    reinterpret,
)
from fxremat.core.layout import HalfLayout, StepLayout, extent
from fxremat.memory.slots import Covered, Slot, held
from fxremat.runtime.placed import Place, Places, closely, go_on_with
from fxremat.sizes import format_bytes

log = logging.getLogger(__name__)

ARENAS: weakref.WeakSet[Arena] = weakref.WeakSet()
"""All that live."""


class PlacedHalf:
    """One half of a run, in an arena.

    Of a backward, ``forward`` is the other half: what that saves is freed while this one runs.
    """

    def __init__(
        self, arena: Arena, layout: HalfLayout, arena_bytes: int, forward: PlacedHalf | None = None
    ) -> None:
        self.arena, self.layout, self.forward = arena, layout, forward
        self.arena_bytes, self.pool_bytes = arena_bytes, 0
        self.dtypes = [getattr(torch, one.dtype.removeprefix("torch.")) for one in layout.buffers]
        self.unbind()

    def unbind(self) -> None:
        """Have no slots (they keep a block alive)."""
        self.bound = -1
        """The state of the arena that the slots below are for."""
        self.slots: list[Slot | None] = []
        self.places: list[Place | None] = []
        self.outlive: list[Slot] = []
        """What is planned to live on when the half has ended, and (``within``) what is not."""
        self.within: list[Slot] = []
        self.watched: list[Slot] = []
        """What may be held when the half begins, and overlaps with places of it."""
        self.current: list[Place | None] = []
        """The places that it has this time."""
        self.covered: Covered | None = None
        """What lies there, once some bytes were not given away as planned."""
        self._beside: tuple[frozenset[int], list[Place | None]] | None = None
        """Which places others held last time, and the rest."""

    def enter(self) -> Places | None:
        """The code begins; None where it gets no places this time."""
        return self.arena.enter(self)

    def leave(self) -> None:
        """The code has ended, or has failed."""
        self.arena.leave(self)

    def place(
        self, number: int, size: Any, stride: Any, dtype: torch.dtype, empty: Empty
    ) -> torch.Tensor:
        """The buffer of a call that is not quite as planned, or whose bytes may be held."""
        arena, slot, place = self.arena, self.slots[number], self.current[number]
        assert slot is not None
        assert place is not None
        before = place.before if self.covered is None else self.covered.owners(slot)
        if not self._fits(place, slot, size, stride, dtype, empty):
            arena.note_difference()
        elif held(before):
            arena.note_held(1)
        else:
            if self.covered is not None:
                self.covered.cover(slot)
            return reinterpret(slot.base, size, stride, 0)
        if self.covered is None:  # from now on bytes may be held from longer ago than planned
            pairs = zip(self.slots[:number], self.current, strict=False)
            self.covered = Covered([*self.saved, *(one for one, at in pairs if at is not None)])
            go_on_with(map(closely, self.current[number + 1 :]))
        return empty(size, stride, dtype)

    def _fits(
        self, place: Place, slot: Slot, size: Any, stride: Any, dtype: torch.dtype, empty: Empty
    ) -> bool:
        """Whether what is asked for can lie there: a dynamic graph may ask for less."""
        if dtype is not place.dtype or empty is not place.empty:
            return False
        return 0 < extent(size, stride) * dtype.itemsize <= slot.end - slot.begin

    @property
    def saved(self) -> list[Slot]:
        """What the other half has saved for this one."""
        return [] if self.forward is None else self.forward.outlive

    # -- in the arena as it is now ----------------------------------------------------------------

    def bind(self) -> None:
        """Find the slots in the arena as it is now."""
        if self.bound == self.arena.state:
            return
        if self.forward is not None:
            self.forward.bind()
        self.slots = [self._slot(index) for index in range(len(self.layout.buffers))]
        slots = dict.fromkeys(slot for slot in self.slots if slot is not None)
        outlive = {self.slots[index] for index in self.layout.outlive}
        self.outlive = [slot for slot in slots if slot in outlive]
        self.within = [slot for slot in slots if slot not in outlive]
        self.places = self._places()
        self._beside = None
        self.bound = self.arena.state

    def _slot(self, index: int) -> Slot | None:
        buffer, offset = self.layout.buffers[index], self.layout.offsets[index]
        if offset is None or buffer.block is None or not buffer.nbytes:
            return None
        return self.arena.slot(offset, buffer.nbytes, self.dtypes[index])

    def _places(self, blocked: frozenset[int] = frozenset()) -> list[Place | None]:
        covered, empty = Covered(self.saved), self.arena.empty
        places: list[Place | None] = []
        for number, (one, slot) in enumerate(zip(self.layout.buffers, self.slots, strict=True)):
            if slot is None or number in blocked:
                places.append(None)
                continue
            before, dtype = covered.owners(slot), self.dtypes[number]
            covered.cover(slot)
            places.append(Place(one.size, one.stride, dtype, empty, slot, before, number))
        return places

    def watch(self, outliving: Iterable[Slot]) -> None:
        """Of all that may be held when a half begins, note what matters here."""
        covered, own = Covered(self.slots), set(self.saved)
        self.watched = [one for one in outliving if one not in own and covered.owners(one)]

    def begin(self, others: Sequence[Slot]) -> Places:
        """Its places without those that overlap with what others hold.

        Without them, each of the rest comes after other ones in its bytes than it was planned to.
        """
        self.current, self.covered = self.places, None
        if others:
            overlap = Covered(others)
            blocked = frozenset(
                number
                for number, slot in enumerate(self.slots)
                if slot is not None and overlap.owners(slot)
            )
            self.arena.note_held(len(blocked))
            if blocked and (self._beside is None or self._beside[0] != blocked):
                self._beside = blocked, self._places(blocked)
            if blocked and self._beside is not None:
                self.current = self._beside[1]
        return iter(self.current)


@dataclass(frozen=True, eq=False)
class PlacedRun:
    """Both halves of a run, in an arena."""

    forward: PlacedHalf
    backward: PlacedHalf


class Arena:
    """The block on one device, and what lies in it.

    It is taken when a half first needs it, taken anew where layouts need another size (until
    somebody lets go of what lies in the one before, there are two), and given back when no layout
    is left. A second thread that comes in meanwhile allocates as ever, as does a half that begins
    inside of another one.

    ``in_turn`` each graph sizes it.

    On CUDA all else that a half allocates comes from a pool of its own, and a stream waits for the
    one that was in the arena before. No GPU has run that yet. Where CUDA graphs are recorded,
    nothing is placed.
    """

    def __init__(self, device: torch.device) -> None:
        ARENAS.add(self)
        self.device = device
        self.empty: Any = EMPTY.get(device.type)
        self.is_off = self.empty is None
        self.in_turn = False
        self.block: torch.Tensor | None = None
        self.state = 0
        """Another number whenever slots may be other ones than before."""
        self.conflicts = self.differences = self.missed = self.entered = 0
        """Buffers that were allocated as ever, for what lay there is held, or they are not as
        planned; halves that were not placed, for another one was in the arena; those that were."""
        self._halves: weakref.WeakSet[PlacedHalf] = weakref.WeakSet()
        self._slots: dict[tuple[int, int, torch.dtype], Slot] = {}
        self._leaked: dict[Slot, None] = {}
        """Held against the plan when their half had ended."""
        self._is_changed = False
        self._lock = Lock()
        self._pool: torch.cuda.MemPool | None = None
        self._in_pool = ExitStack()
        self._stream: Any = None

    @property
    def nbytes(self) -> int:
        """What it takes now."""
        return 0 if self.block is None else self.block.nbytes

    @property
    def address(self) -> int:
        """Where it lies now."""
        return 0 if self.block is None else self.block.data_ptr()

    def holds(self, address: int) -> bool:
        """Whether these bytes lie in it."""
        return 0 <= address - self.address < self.nbytes

    def placed(self, layout: StepLayout) -> tuple[PlacedRun, ...]:
        """The runs of a layout, in this arena as long as somebody holds them."""
        runs = []
        for run in layout.runs:
            forward = PlacedHalf(self, run.forward, layout.arena_bytes)
            backward = PlacedHalf(self, run.backward, layout.arena_bytes, forward)
            runs.append(PlacedRun(forward, backward))
            for half in (forward, backward):
                half.pool_bytes = layout.pool_bytes
                self._halves.add(half)
                weakref.finalize(half, self._forget).atexit = False
        self._is_changed = True
        return tuple(runs)

    def slot(self, offset: int, nbytes: int, dtype: torch.dtype) -> Slot:
        """The one that lies there."""
        key = (offset, offset + nbytes, dtype)
        if key not in self._slots:
            assert self.block is not None
            self._slots[key] = Slot(self.block, *key)
        return self._slots[key]

    # -- halves -----------------------------------------------------------------------------------

    def enter(self, half: PlacedHalf) -> Places | None:
        """A half begins: its places, without those whose bytes are held; None where it has none."""
        on_cuda = self.device.type == "cuda"
        if self.is_off or (on_cuda and torch.cuda.is_current_stream_capturing()):
            return None  # a CUDA graph has addresses of its own
        if not self._lock.acquire(blocking=False):
            self.missed += 1
            return None
        is_in = False
        try:
            self._wait_for_others()
            places = self._places(half)
            if places is not None:
                self._in_pool.enter_context(self.own_pool())
                self.entered += 1
                is_in = True
            return places
        finally:
            if not is_in:
                self._lock.release()

    def leave(self, half: PlacedHalf) -> None:
        """It has ended, or failed: what is held of it that should not be is watched from now on."""
        try:
            self._in_pool.close()
            self._leaked.update(dict.fromkeys(held(half.within)))
        finally:
            self._lock.release()

    def move(self, gradients: Iterable[torch.Tensor], half: PlacedHalf | None) -> None:
        """Have gradients that lie in the arena where the backward that comes, ``half``, has them.

        On the CPU they get memory of their own. On CUDA they wait in host memory until what layouts
        need now is taken; each then lies in a place of a gradient of its size.
        """
        if self.device.type != "cuda":
            for one in gradients:
                if self.holds(one.untyped_storage().data_ptr()):
                    one.data = one.detach().clone()
            return
        kept = [(one, one.detach().cpu()) for one in gradients]
        for one, _ in kept:
            one.data = one.new_empty(0)
        self._take(self._halves)
        self._bind()
        free = [] if half is None else list(half.outlive)
        for one, values in kept:
            form = values.dtype, values.nbytes
            slot = next((s for s in free if (s.base.dtype, s.base.nbytes) == form), None)
            if slot is None:
                one.data = values.to(self.device)
            else:
                free.remove(slot)
                one.data = reinterpret(slot.base, values.shape, values.stride(), 0).copy_(values)

    @contextmanager
    def lent(self, *, pool: bool = False) -> Iterator[None]:
        """Inside, a graph without a backward runs, as in an evaluation.

        If nothing lies in the block, it is given back for its use, and the ``pool`` if asked for.
        """
        if self.is_off or not self._lock.acquire(blocking=False):
            yield
            return
        try:
            if self.block is not None and not held(self._slots.values()):
                self._give_back(lent=not pool)
                self._is_changed = True
            with self.own_pool():
                yield
        finally:
            self._lock.release()

    def rest(self, *, pool: bool = False) -> None:
        """Give the block back, if nothing lies in it, until a half needs it again."""
        with self.lent(pool=pool):
            pass

    def _places(self, half: PlacedHalf) -> Places | None:
        if self._is_changed:
            self._take([half] if self.in_turn else self._halves)
        if self.is_off:
            return None
        if half.bound != self.state:
            self._bind()
        for slot in half.outlive:
            if slot.is_moved:
                slot.renew()
        self._leaked = dict.fromkeys(held(self._leaked))
        others = held(half.watched)
        if self._leaked:
            others += self._leaked.keys() - set(half.saved)
        return half.begin(others)

    def note_held(self, count: int) -> None:
        """So many buffers are allocated as ever, for others hold what lies there."""
        if count and not self.conflicts:
            log.warning(
                "fxremat: values that a plan takes for freed are still held: the buffers planned "
                "in their place are allocated elsewhere"
            )
        self.conflicts += count

    def note_difference(self) -> None:
        """A buffer is allocated as ever, for it is not the one that was planned."""
        if not self.differences:
            log.warning("fxremat: a graph asks for other buffers than planned, allocated elsewhere")
        self.differences += 1

    # -- the block --------------------------------------------------------------------------------

    def _take(self, halves: Collection[PlacedHalf]) -> None:
        """Take the block that these halves need, and forget slots that none needs."""
        self._is_changed = False
        needed = max((half.arena_bytes for half in halves), default=0)
        has = -1 if self.block is None else self.nbytes  # without bytes it has a pool all the same
        if needed > has or (needed < has and not held(self._slots.values())):
            self._give_back()
            try:
                with self.own_pool():
                    self.block = new_block(needed, self.device)
                    if self.device.type == "cuda":  # cut from it as the graphs run
                        new_block(max(half.pool_bytes for half in halves), self.device)
            except RuntimeError:
                size = format_bytes(needed)
                log.warning("fxremat: no memory for an arena of %s: nothing is placed", size)
                self.is_off = True
                return
        self.state += 1

    def _give_back(self, *, lent: bool = False) -> None:
        """Let go of the block; what somebody holds keeps it alive.

        The pool keeps its memory where it is only ``lent``.
        """
        self.block = None
        self.state += 1
        for half in self._halves:
            half.unbind()
        if not lent:
            self._pool = None  # what of its memory nobody holds goes back to the device
        self._slots, self._leaked = {}, {}

    def _bind(self) -> None:
        """Have all halves find their slots, and what may be held when they begin."""
        halves = list(self._halves)
        before, self._slots = self._slots, dict(self._slots)
        for half in halves:
            half.bind()
        wanted = {slot for half in halves for slot in half.slots}
        old = set(held(slot for slot in before.values() if slot not in wanted))
        self._slots = {k: slot for k, slot in self._slots.items() if slot in wanted or slot in old}
        outliving = dict.fromkeys((*old, *(slot for half in halves for slot in half.outlive)))
        for half in halves:
            half.watch(outliving)

    def _forget(self) -> None:
        """A half is gone; with the last one the block is given back."""
        self._is_changed = True
        if not list(self._halves) and self._lock.acquire(blocking=False):
            self._give_back()
            self._lock.release()

    # -- CUDA -------------------------------------------------------------------------------------

    def _wait_for_others(self) -> None:
        """The current stream waits for the one that was in the arena before."""
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def own_pool(self) -> AbstractContextManager[object]:
        """Inside, what this thread allocates on a GPU comes from the pool."""
        if self.device.type != "cuda":
            return nullcontext()
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        return torch.cuda.use_mem_pool(self._pool, self.device)

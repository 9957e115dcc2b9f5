"""Layouts for an arena made from a step as it has run: what the code asked for, and how long.

No plan is asked: the first step of a trial is recorded, and every buffer that dies within it, or is
the gradient of a parameter, gets a place, the largest first, at the lowest address that is free
while it lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch

from fxremat.compat.tensors import _plain, storage_key, storage_watch
from fxremat.compile.dry_run.dry_run import DryRun
from fxremat.core.events import RunEvents
from fxremat.core.layout import CodeBuffer, HalfLayout, RunLayout, StepLayout
from fxremat.memory.arena import Arena, PlacedHalf, PlacedRun
from fxremat.memory.layout import arrange
from fxremat.memory.slots import Slot, held
from fxremat.runtime.placed import Place, Places, closely, forward_at_places, places_of_forward
from fxremat.step.in_flight import _WatchedRuns

OPTIONS: dict[str, Any] = {"memory_budget": "1GiB", "solver": "greedy", "variants": "none"}
ALIGNMENT = 64
HOST = torch.device("cpu")
_ANY = Place(None, (), torch.uint8, lambda *_: torch.empty(0), None, (), 0)


@dataclass
class Recorded:
    """A buffer that was asked for; it lives from ``born`` until ``died``, None: until the end."""

    buffer: CodeBuffer
    key: int
    is_gone: Callable[[], bool]
    born: int
    died: int | None = None
    is_result: bool = False
    offset: int | None = None

    @property
    def end(self) -> int:
        """The first byte behind it."""
        assert self.offset is not None
        return self.offset + self.buffer.nbytes

    def meets(self, other: Recorded) -> bool:
        """Whether both live at once."""
        pairs = ((self, other), (other, self))
        return not any(one.died is not None and one.died <= after.born for one, after in pairs)


class PoisonedArena(Arena):
    """With ``poison``, what nobody holds is filled with NaN."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.poison = False
        self._filled: dict[Slot, None] = {}
        """Not poisoned since they were given away."""

    def placed(self, layout: StepLayout) -> tuple[PlacedRun, ...]:
        runs = super().placed(layout)
        for half in (half for run in runs for half in (run.forward, run.backward)):
            half.place = partial(self._place, weakref.ref(half))  # type: ignore[method-assign]
        return runs

    def leave(self, half: PlacedHalf) -> None:
        self.poison_dead()
        super().leave(half)

    def poison_dead(self) -> None:
        """Fill what nobody holds any more."""
        living = dict.fromkeys(held(self._filled))
        for slot in self._filled.keys() - living.keys():
            has_nan = slot.base.is_floating_point() or slot.base.is_complex()
            self._write_over(slot.begin, slot.end, 0xFF if has_nan else 0x7F)
        self._filled = living

    def _place(self, known: Any, number: int, *asked: Any) -> torch.Tensor:
        half: PlacedHalf = known()
        self.poison_dead()
        made, slot = PlacedHalf.place(half, number, *asked), half.slots[number]
        if self.poison and slot is not None and slot.number == made.untyped_storage()._cdata:
            self._filled[slot] = None
        return made

    def _places(self, half: PlacedHalf) -> Places | None:
        places = super()._places(half)
        self.poison_dead()
        return map(closely, half.current) if self.poison and places is not None else places

    def _take(self, halves: Collection[PlacedHalf]) -> None:
        before = self.block
        super()._take(halves)
        if self.poison and self.block is not before:
            self._write_over(0, self.nbytes, 0xFF)

    def _give_back(self, *, lent: bool = False) -> None:
        self._filled = {}
        super()._give_back(lent=lent)

    def _write_over(self, begin: int, end: int, byte: int) -> None:
        assert self.block is not None
        with _plain():
            self.block[begin:end].fill_(byte)


@dataclass
class Recorder:
    """A half of a run that lies nowhere: it notes what is asked for."""

    step: Step
    asked: list[Recorded] = field(default_factory=list)
    outlive: frozenset[int] = frozenset()

    def enter(self) -> Places:
        self.step.order.append(self)
        return repeat(_ANY)

    def leave(self) -> None:
        self.step.look()
        self.outlive = frozenset(k for k, one in enumerate(self.asked) if one.died is None)

    def place(self, index: int, size: Any, stride: Any, dtype: Any, empty: Any) -> torch.Tensor:
        self.step.look()
        made: torch.Tensor = empty(size, stride, dtype)
        key, is_gone = storage_watch(made)
        buffer = CodeBuffer(str(len(self.step.asked)), size, stride, str(dtype), made.itemsize)
        self.asked.append(Recorded(buffer, key, is_gone, self.step.now))
        self.step.asked.append(self.asked[-1])
        return made

    def layout(self) -> HalfLayout:
        buffers, offsets = [one.buffer for one in self.asked], [one.offset for one in self.asked]
        kept = frozenset(k for k in self.outlive if offsets[k] is not None)
        return HalfLayout(tuple(buffers), tuple(offsets), kept)


@dataclass
class Step:
    """All that is asked for in a step, in order."""

    now: int = 0
    asked: list[Recorded] = field(default_factory=list)
    order: list[Recorder] = field(default_factory=list)

    def look(self) -> None:
        """Note what is gone by now."""
        self.now += 1
        for one in self.asked:
            if one.died is None and one.is_gone():
                one.died = self.now

    def results(self, values: Iterable[Any]) -> None:
        """These are given to the user, so that they get no place."""
        keys = {storage_key(x) for x in values if isinstance(x, torch.Tensor)}
        for one in self.asked:
            one.is_result |= one.died is None and one.key in keys

    def arrange(self, gradients: Iterable[torch.Tensor]) -> int:
        """Give places; returns the bytes of all."""
        self.look()
        kept = {storage_key(one) for one in gradients}
        inside = [one for one in self.asked if not one.is_result and one.buffer.nbytes]
        inside = [one for one in inside if one.died is not None or one.key in kept]
        placed: list[Recorded] = []
        for one in sorted(inside, key=lambda one: -one.buffer.nbytes):
            one.offset = 0
            others = [other for other in placed if other.meets(one)]
            for other in sorted(others, key=lambda other: other.offset or 0):
                assert other.offset is not None
                if one.end <= other.offset:
                    break
                one.offset = max(one.offset, -(-other.end // ALIGNMENT) * ALIGNMENT)
            placed.append(one)
        return max((one.end for one in placed), default=0)


@dataclass
class Trial:
    """Runs of compiled graphs: as ever, then recorded, then in an arena that is laid out so."""

    arena: PoisonedArena = field(default_factory=lambda: PoisonedArena(HOST))
    mode: str = "as ever"
    step: Step = field(default_factory=Step)
    recorders: dict[tuple[int, int], tuple[Recorder, Recorder]] = field(default_factory=dict)
    placed: dict[tuple[int, int], PlacedRun] = field(default_factory=dict)
    known: list[Any] = field(default_factory=list)

    def placed_run(self, watched: _WatchedRuns, place: int) -> Any:
        key = id(watched), place
        if self.mode == "as ever":
            return None
        if self.mode == "recorded" and key not in self.recorders:
            self.known.append(watched)
            self.recorders[key] = Recorder(self.step), Recorder(self.step)
            forward, backward = self.recorders[key]
            return SimpleNamespace(forward=forward, backward=backward)
        return self.placed.get(key)

    def record(self, step: Callable[[], Any], model: torch.nn.Module) -> Any:
        """Run a step whose gradients are kept, and lay the arena out for it."""
        self.mode = "recorded"
        found = step()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        nbytes = self.step.arrange(gradients)
        placed = self.arena.placed(self.step_layout(nbytes))
        self.placed = dict(zip(self.recorders, placed, strict=True))
        self.mode = "placed"
        return found

    def step_layout(self, nbytes: int) -> StepLayout:
        """The layout of the step that was recorded, in an arena of so many bytes."""
        runs = (RunLayout(f.layout(), b.layout()) for f, b in self.recorders.values())
        return StepLayout(tuple(runs), nbytes)

    def plan(self, runs: Iterable[RunEvents]) -> None:
        """Lay the arena out by dry runs of the graphs that were recorded, in the order they ran."""
        known = {(_asked(run.forward_buffers), _asked(run.backward_buffers)): run for run in runs}
        numbers, planned = dict[int, tuple[int, Literal["forward", "backward"]]](), []
        for number, (forward, backward) in enumerate(self.recorders.values()):
            key = [_asked(one.buffer for one in half.asked) for half in (forward, backward)]
            planned.append(known[key[0], key[1]])
            numbers |= {id(forward): (number, "forward"), id(backward): (number, "backward")}
        order = [numbers[id(half)] for half in self.step.order]
        placed = self.arena.placed(arrange(planned, order, "cpu").layout)
        self.placed = dict(zip(self.recorders, placed, strict=True))

    @contextmanager
    def running(self, mode: str) -> Iterator[None]:
        """Inside, graphs run so."""
        before, self.mode = self.mode, mode
        yield
        self.mode = before


def _asked(buffers: Iterable[CodeBuffer]) -> tuple[Any, ...]:
    return tuple((one.size, one.stride, one.dtype) for one in buffers)


@contextmanager
def dry_runs() -> Iterator[list[RunEvents]]:
    """What the dry runs inside have found, also those whose answer was known."""
    found, make = list[RunEvents](), DryRun.__init__

    def seen(made: DryRun, *args: Any, **kwargs: Any) -> None:
        make(made, *args, **kwargs)
        if made.allocator.as_run is not None:
            found.append(made.allocator.as_run)

    with mock.patch.object(DryRun, "__init__", seen):
        yield found


@contextmanager
def trial() -> Iterator[Trial]:
    """Inside, compiled graphs take their places from what is yielded."""
    found, run = Trial(), _WatchedRuns.run

    def seen(watched: _WatchedRuns, args: tuple[Any, ...]) -> Any:
        results = run(watched, args)
        if found.mode == "recorded":
            found.step.results(results if isinstance(results, (list, tuple)) else [results])
        return results

    with (
        mock.patch.object(_WatchedRuns, "placed_run", lambda *run: found.placed_run(*run[:2])),
        mock.patch.object(_WatchedRuns, "run", seen),
    ):
        yield found


def run_at(half: Any, code: Callable[..., Any], *args: Any) -> Any:
    """A function that stands for a forward's code, run at the places of a half."""
    with places_of_forward(half):
        return forward_at_places(code)(*args)


class Small:
    """A model, its compiled form and an input."""

    def __init__(self, make: Callable[[], torch.nn.Module], *size: int, **kwargs: Any) -> None:
        torch.manual_seed(0)
        self.model, self.x = make(), torch.randn(*size)
        self.call = torch.compile(self.model, backend="fxremat", options=OPTIONS, **kwargs)
        self.weights: list[Any] = list(self.model.parameters())

    def step(self, scale: float = 1.0) -> torch.Tensor:
        """Gradients that are dropped, a forward, and a backward."""
        self.model.zero_grad(set_to_none=True)
        found = self.call(self.x * scale)
        loss = found[0] if isinstance(found, tuple) else found
        loss.backward()
        made: torch.Tensor = loss.detach()
        return made

    def restore(self, weights: list[torch.Tensor]) -> None:
        """The parameters as they were."""
        with torch.no_grad():
            for one, value in zip(self.weights, weights, strict=True):
                one.copy_(value)

    def gradients(self) -> list[torch.Tensor]:
        """Those of the parameters as they are."""
        return [p.grad for p in self.weights if p.grad is not None]

    def lies_in(self, arena: Any) -> int:
        """How many of the gradients do."""
        return sum(arena.holds(one.data_ptr()) for one in self.gradients())

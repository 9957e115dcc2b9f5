"""Forwards that wait for their backward: counted, and compared with the budget of each graph.

A plan is made for a graph that runs forward and backward by turns. Where a second forward runs
before the backward of the first, as with blocks that are compiled one by one, the bytes that the
first has saved are there as well, and no plan has counted them. A forward is in flight from its
end until a backward has freed what it saved, or until its graph is gone. Whoever runs forwards
under checkpointing, or without gradients, holds nothing in this way, so nothing is counted.

Nothing here keeps a tensor alive or changes one. What is in flight is counted when a forward ends,
and looked at closely only if there is more of it than ever before.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxremat.compat.backward import (
    autograd_position,
    node_of_forward,
    saved_by,
    when_backward_ends,
    when_freed,
)
from fxremat.compat.dynamo import compilations
from fxremat.compat.tensors import is_fake, plain_tensors
from fxremat.core.places import Places
from fxremat.errors import PromiseBroken
from fxremat.memory.segments import SharedSegments
from fxremat.memory.watched_steps import StepWatch
from fxremat.runtime.host_memory import is_on

log = logging.getLogger(__name__)

Compiled = Callable[..., Any]
Around = tuple[Callable[[], torch.Tensor | list[torch.Tensor] | None], ...]
"""They give tensors that live as long as others want, and None where these are gone."""


@dataclass(frozen=True)
class Promise:
    """What was promised of one compiled graph; all but the first two are bytes.

    ``peak_bytes`` is the peak predicted for the graph by itself, with its inputs, and with
    fragmentation where the budget counts reserved bytes. Besides, ``held_bytes`` of the budget are
    held by what the graph does not see, of which ``reserve_bytes`` are no saved tensors. Each
    forward keeps ``saved_bytes`` for its backward. ``segment_bytes`` are what the allocator takes
    for it in one piece, before it runs for the first time, 0 where none is better; None where it
    takes memory from elsewhere. Kernels are tuned in ``tuning_bytes`` beside that, and
    ``coming_bytes`` are still to come into it. ``unseen_bytes`` were counted for what no graph
    sees. With ``several`` a version is one of those of its graph; ``shared_bytes`` are then one
    segment for the whole step, 0 where none is better, None where that is not known. What lies
    ``around`` is part of ``reserve_bytes``. From the next step on those that wait leave it
    ``left_bytes`` more, None: they need not.
    """

    graph: str
    device: torch.device
    budget_bytes: int
    peak_bytes: int
    held_bytes: int
    reserve_bytes: int
    saved_bytes: int
    segment_bytes: int | None = None
    tuning_bytes: int = 0
    coming_bytes: int = 0
    unseen_bytes: int = 0
    several: bool = False
    shared_bytes: int | None = None
    around: Around = ()
    left_bytes: int | None = None


@dataclass(frozen=True)
class _Forward:
    """A forward that has run, told by its node in the graph of autograd."""

    node: weakref.ref[Any]
    promise: Promise


@dataclass
class _SharedBudget:
    """The forwards in flight of all graphs that share one budget.

    ``looked_at`` is the most that was ever looked at closely: how many, and how many bytes their
    plans say. ``told`` is the number of forwards in the last warning. Where it was planned
    ``anew``, what is in flight now is known to be too much, and the next flight is looked at anew.
    """

    forwards: dict[int, _Forward] = field(default_factory=dict)
    looked_at: tuple[int, int] = (1, 0)
    told: int = 1
    anew: bool = False
    segments: SharedSegments = field(default_factory=SharedSegments)
    watch: StepWatch | None = None
    saved_bytes: int = 0
    """Of all forwards that wait, by their plans; the most since a step began."""

    def begin(self, promise: Promise, args: Iterable[object]) -> None:
        """A forward begins; if none waits, a step does."""
        if self.watch is None:
            reserved = promise.segment_bytes is not None
            self.watch = StepWatch(promise.device, promise.budget_bytes, reserved, compilations)
        if not self.forwards and not self.watch.is_over:
            around, self.saved_bytes = [each() for each in promise.around], 0
            self.watch.begin(_own_bytes([*args, *around], promise.device))

    def end(self, promise: Promise) -> None:
        """A backward has ended; if no forward waits, a step has, and may have taken too much."""
        if self.forwards or self.watch is None:
            return
        exceeded = self.watch.end(promise.graph, self.saved_bytes, promise.unseen_bytes)
        if exceeded is not None:
            log.warning("%s", exceeded)
            warnings.warn(exceeded, stacklevel=4)

    def add(self, node: Any, promise: Promise, own: Iterable[object]) -> PromiseBroken | None:
        """Count one more forward; ``own`` are its arguments and results.

        The warning to give where a budget will be exceeded.
        """
        key, forwards = id(node), self.forwards
        reference = weakref.ref(node, lambda _: forwards.pop(key, None))
        forwards[key] = _Forward(reference, promise)
        when_freed(node, partial(forwards.pop, key, None))
        self.saved_bytes = max(self.saved_bytes, self._planned()[1])
        if len(forwards) == 1:
            if self.anew:
                self.looked_at, self.told, self.anew = (1, 0), 1, False
            return None
        if self.anew:
            return None
        number, nbytes = self._planned()
        if number <= self.looked_at[0] and nbytes <= self.looked_at[1]:
            return None
        self.looked_at = max(number, self.looked_at[0]), max(nbytes, self.looked_at[1])
        return self._compare(node, promise, own)

    def _planned(self) -> tuple[int, int]:
        forwards = list(self.forwards.values())
        return len(forwards), sum(forward.promise.saved_bytes for forward in forwards)

    def _compare(self, node: Any, promise: Promise, own: Iterable[object]) -> PromiseBroken | None:
        """The warning if its backward will exceed the budget, for what others hold."""
        number = len(self.forwards)
        around = pytree.tree_leaves([each() for each in promise.around])
        counted = _storages(around, promise.device)
        known = {**_storages(own, promise.device), **_saved(node, promise)}
        known = {key: size for key, size in known.items() if key not in counted}
        others: dict[int, int] = {}
        for forward in list(self.forwards.values()):
            other = forward.node()
            if other is not None and other is not node:
                others |= _saved(other, forward.promise)
        held = sum(size for key, size in others.items() if key not in {**known, **counted})
        beside = _beside(promise, held, sum(known.values()))
        expected = promise.peak_bytes + max(beside, promise.held_bytes)
        if expected > promise.budget_bytes and number > self.told:
            self.told = number
            budget, left = promise.budget_bytes, promise.left_bytes
            return PromiseBroken(promise.graph, number, held, expected, budget, left_bytes=left)
        return None


def _beside(promise: Promise, held: int, own: int) -> int:
    """Bytes on the device beside those of the graph; CUDA's allocator knows all of them.

    Those allocated: what it has reserved for the graph itself is there from the first step on.
    """
    if promise.device.type == "cuda":
        return torch.cuda.memory_allocated(promise.device) - own
    return held + promise.reserve_bytes


def storage_bytes(values: Iterable[object], device: torch.device) -> int:
    """Bytes of the storages that the tensors among ``values`` have on the device."""
    return sum(_storages(values, device).values())


def _own_bytes(args: Iterable[object], device: torch.device) -> int:
    """Bytes of the arguments of a graph, and of gradients that they have."""
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    gradients = [one.grad for one in tensors if one.is_leaf]
    return storage_bytes([*tensors, *gradients], device)


def _saved(node: Any, promise: Promise) -> dict[int, int]:
    """The storages that a forward has saved, and those of gradients beside what it saved."""
    try:
        saved = saved_by(node)
    except RuntimeError:  # one was overwritten since; the plan says how many bytes there are
        return {id(node): promise.saved_bytes}
    gradients = [tensor.grad for tensor in saved if tensor.is_leaf]
    return _storages([*saved, *gradients], promise.device)


def _storages(values: Iterable[object], device: torch.device) -> dict[int, int]:
    """Bytes of the storages that the tensors among ``values`` have on the device, by address."""
    sizes: dict[int, int] = {}
    for value in values:
        for tensor in plain_tensors(value):
            if is_on(tensor, device):
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


_BUDGETS: dict[tuple[torch.device, int], _SharedBudget] = {}


def _shared_budget(promise: Promise) -> _SharedBudget:
    return _BUDGETS.setdefault((promise.device, promise.budget_bytes), _SharedBudget())


def forget() -> None:
    """Count anew: graphs compiled from now on are told of again."""
    _BUDGETS.clear()


@dataclass(frozen=True)
class Promised:
    """A compiled graph, and what was promised of it."""

    call: Compiled
    promise: Promise


@dataclass(frozen=True)
class Runs:
    """The versions of a graph, and which one each of its runs takes that wait at once.

    A run that none was planned for takes the last. ``peak_bytes`` are of all runs together, without
    what the promises hold; ``step_peak_bytes`` are those of the step, with all that is there most
    of the time. ``units`` say what the planner knows of the run at each place, where it knows that.
    """

    versions: tuple[Promised, ...]
    version_of_run: tuple[int, ...]
    peak_bytes: int
    step_peak_bytes: int
    units: tuple[Any, ...] = ()

    def of_run(self, place: int) -> Promised:
        """The version of the run at a place among those that wait."""
        return self.versions[self.version_of_run[min(place, len(self.version_of_run) - 1)]]


def watch_in_flight(
    runs: Runs,
    places: Places,
    again: Callable[[int], Runs] | None = None,
    less: Callable[[], Runs | None] = lambda: None,
) -> Compiled:
    """One callable for all runs of a graph, which warns when a budget will not be kept.

    The warning, `PromiseBroken`, comes when several forwards are in flight at once, of this graph
    or of others with the same budget on the same device: once for each number of them that is
    larger than before. Where more runs of the graph wait than were planned for, they are planned
    ``again`` for as many, with immediate effect. Where other graphs need a part of what these take,
    ``less`` gives other runs; it is asked when none of them waits. Before a version first runs, the
    allocator takes its segment.
    """
    watched_runs = _WatchedRuns(runs, places, again, less)

    def watched(*args: Any) -> Any:
        return watched_runs.run(args)

    kept = {
        k: v
        for k, v in getattr(runs.versions[0].call, "__dict__", {}).items()
        if not k.startswith(_DYNAMO_MARKS)
    }
    vars(watched).update(kept)
    return watched


@dataclass
class _WatchedRuns:
    """The runs of one graph as they are now."""

    runs: Runs
    places: Places
    again: Callable[[int], Runs] | None
    less: Callable[[], Runs | None]

    def run(self, args: tuple[Any, ...]) -> Any:
        """One forward."""
        if not any(waiting.runs is self.runs for waiting in self.places.taken.values()):
            self.runs = self.less() or self.runs
        place, before = self.places.free(), autograd_position()
        one = self.runs.of_run(place)
        if any(isinstance(each, torch.Tensor) and is_fake(each) for each in args):
            return one.call(*args)  # Dynamo asks for their sizes, to split what follows for DDP
        promise, shared = one.promise, _shared_budget(one.promise)
        segment = shared.segments.before(promise, len(shared.forwards), args)
        shared.begin(promise, args)
        results = one.call(*args)
        node = node_of_forward(results, before)
        if node is not None:
            if segment is not None and segment.has_room:
                when_backward_ends(node, segment.open_room)
            if shared.watch is not None and not shared.watch.is_over:
                when_backward_ends(node, partial(shared.end, promise))
            leave = self.places.take(place, self.runs)
            when_freed(node, leave)
            weakref.finalize(node, leave)
            own = (*args, *results) if isinstance(results, (list, tuple)) else (*args, results)
            self.look(node, promise, own)
        return results

    def look(self, node: Any, promise: Promise, own: Iterable[object]) -> None:
        """Warn, and plan again, where more runs wait than were planned for."""
        shared = _shared_budget(promise)
        broken = shared.add(node, promise, own)
        if broken is None:
            return
        waiting, planned = len(self.places.taken), len(self.runs.version_of_run)
        if waiting > planned and self.again is not None:
            count = 1 << (waiting - 1).bit_length()
            log.warning("%d runs wait for their backward at once: planned for %d", waiting, count)
            self.runs = self.again(count)
            broken.planned_for, shared.anew = count, True
        log.warning("%s", broken)
        warnings.warn(broken, stacklevel=4)


# By these Dynamo finds the function below a wrapper, and would call that.
_DYNAMO_MARKS = ("_torchdynamo", "__wrapped__")

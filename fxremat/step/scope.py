"""One budget on one device: the graphs that share it, what waits now, and the order of a step.

Where a second forward runs before the backward of the first, what the first has saved is there as
well. A run waits from the end of its forward until a backward has freed what it saved.
"""

from __future__ import annotations

import gc
import logging
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from fxremat.compat.backward import (
    hooks_on_what_is_saved,
    running_backward,
    when_backward_returns,
    when_freed,
)
from fxremat.compat.dynamo import compilations
from fxremat.compat.ranks import is_a_rank
from fxremat.compat.tensors import apart_from_tracing
from fxremat.core.constants import MUCH_UNUSED
from fxremat.core.step import ALL_RESULTS, Order, StepPoint, in_order, last_first
from fxremat.errors import BudgetExceeded, PromiseBroken
from fxremat.memory.composed_steps import outside_in_order
from fxremat.memory.optimizers import optimizer_memory
from fxremat.memory.storages import Storages, storages_of, with_gradients, without
from fxremat.memory.watched_steps import MOST_AGAIN, MOST_STEPS, StepWatch, barely, to_hold
from fxremat.runtime.accumulation import living_gradients
from fxremat.sizes import format_bytes
from fxremat.step.description import StepDescription
from fxremat.step.given import Given, Recorded, WaitingRun
from fxremat.step.graph import NoBackward, OwnMemory, Place, Role, SharingGraph
from fxremat.step.promise import Promise, Tensors, Warned, alive
from fxremat.step.versions import Part, Planner

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Neighbours:
    """What other graphs hold while one is compiled, in bytes on its device.

    ``resident`` are their parameters, with the gradients of these, and what else is known of their
    models; ``coming`` are gradients of modules that will run for the same budget; ``batch`` is what
    else they are given that no graph has made; ``waiting`` is what those of their runs have saved
    that wait now. ``graphs`` are those of these runs. Graphs of the
    same frame share places: where all that wait are known as parts, ``first`` are the parts of the
    run at each place, and what they have saved is not among ``waiting``.
    """

    resident: int = 0
    batch: int = 0
    waiting: int = 0
    graphs: tuple[SharingGraph, ...] = ()
    first: tuple[tuple[Part, ...], ...] = ()
    coming: int = 0

    @property
    def lasting(self) -> int:
        """What outlives a step."""
        return self.resident + self.coming

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.lasting + self.batch + self.waiting


@dataclass(eq=False)
class BudgetScope:
    """The graphs that share one budget, and their runs that wait, in the order they came.

    ``order`` is that of the step that runs now, and ``last`` that of the step before. If a step is
    ``due``, its graphs are planned together when it begins.
    """

    waiting: dict[int, WaitingRun] = field(default_factory=dict)
    graphs: weakref.WeakSet[SharingGraph] = field(default_factory=weakref.WeakSet)
    given: Given = field(default_factory=Given)
    order: list[Recorded] = field(default_factory=list)
    last: list[Recorded] = field(default_factory=list)
    due: bool = False
    warned: Warned = field(default_factory=Warned)
    own: OwnMemory = field(default_factory=OwnMemory)
    watch: StepWatch | None = None
    compiled_again: int = 0
    collected: int = 0
    """Compilations whose garbage holds no result of a run that waits."""
    saved_bytes: int = 0
    """By plans, of all that wait and of what the last returned, with gradients; the most so far."""

    # -- where a graph is compiled ---------------------------------------------------------

    def neighbours(
        self, place: Place, given: Iterable[Any], around: Tensors, device: torch.device, count: int
    ) -> Neighbours:
        """What other graphs hold beside one at this ``place`` that is ``given`` these arguments.

        What lies ``around`` it is counted elsewhere. It will run ``count`` times at once. Graphs of
        one compilation of a frame all run in one step.
        """
        frame = place[0]
        own = with_gradients([*given, *alive(around)], device)
        first = self._parts_at_places(frame)
        first = first if len(first) < count else ()
        runs = [one for one in self.waiting.values() if not (first and one.frame == frame)]
        waiting = dict(item for run in runs for item in run.saved().items())
        graphs = [one.graph for one in runs if one.graph is not None]
        distinct = tuple(dict.fromkeys(graphs))
        resident = self.resident_beside(own, device, models=not around)
        known = {**own, **resident}
        counted = {key for one in self.waiting.values() if one not in runs for key in one.given}
        batch = without(storages_of(self.given.batch.values(), device), known.keys() | counted)
        held = sum(without(waiting, known.keys() | batch.keys()).values())
        for graph in distinct:  # of runs that are still to come, as micro-batches are
            missing = graph.taken.count - graphs.count(graph)
            held += max(0, missing) * graph.taken.saved_bytes // max(1, graph.taken.count)
        if place[1] is not None:
            together = {one for one in self.graphs if one.where.place == place}
            held += sum(one.taken.own_peak_bytes for one in together.difference(distinct))
        beside, besides = sum(resident.values()), sum(batch.values())
        coming = self.given.coming_bytes(own, device)
        return Neighbours(beside, besides, held, distinct, first, coming)

    def resident_beside(
        self, own: Storages, device: torch.device, *, models: bool = True
    ) -> Storages:
        """Parameters of all graphs with their gradients, and all else that is known of their
        ``models``, unless a graph counts what lies around it itself."""
        found = with_gradients(self.given.weights(), device)
        for graph in self.graphs if models else ():
            found |= storages_of(alive(graph.where.context.others), device)
        return without(found, own)

    def _parts_at_places(self, frame: int) -> tuple[tuple[Part, ...], ...]:
        """Of the runs of a frame that wait now, the parts of their graph at each place.

        Nothing where they are not known of all.
        """
        at = {one.place: one.runs.parts for one in self.waiting.values() if one.frame == frame}
        found = [at.get(place, ()) for place in range(len(at))]
        return tuple(found) if all(place < len(parts) for place, parts in enumerate(found)) else ()

    def free_place(self, frame: int) -> int:
        """The lowest place that no run of the frame has."""
        taken = {one.place for one in self.waiting.values() if one.frame == frame}
        return next(place for place in range(len(taken) + 1) if place not in taken)

    def waiting_of(self, frame: int) -> int:
        """How many runs of the frame wait."""
        return sum(one.frame == frame for one in self.waiting.values())

    # -- steps as they have run --------------------------------------------------------------

    def describe_with(
        self, graph: SharingGraph, given: frozenset[int]
    ) -> tuple[StepDescription, tuple[StepPoint, ...]] | None:
        """The step of the runs that wait now and one of ``graph``, with all that they offer.

        The latter is ``given`` the storages at these addresses. With it come the points of the step
        if all that callers have now of the results of runs stays to the end.
        """
        gc.collect()  # what Dynamo has left is held by nobody
        waiting = [one for one in self.waiting.values() if one.graph is not None]
        runs = [(one.graph, one.place) for one in waiting if one.graph is not None]
        pairs = zip(waiting, [*(one.given for one in waiting[1:]), given], strict=True)
        kept = {k: one.kept_beside(taken) for k, (one, taken) in enumerate(pairs)}
        runs.append((graph, 0))
        last = len(runs) - 1  # what nobody is given yet, others may hold
        trained = [*(one.weights for one in waiting), {}]
        order, eager = last_first(len(runs)), self.given.eager
        more_bytes = eager.seen - eager.counted
        saved = {key for one in waiting for key in one.saved()}
        in_use = [k for k, one in enumerate(waiting) if one.in_use(saved)]
        described, cautious = (
            self._described(
                runs, order, more_bytes, kept, dict.fromkeys(held, ALL_RESULTS), trained
            )
            for held in ([last], [*in_use, last])
        )
        if described is None or cautious is None:
            return None
        return described, cautious.points

    def _describe_last(self) -> StepDescription | None:
        """The last step as it has run; None where it cannot be planned as one."""
        runs: dict[tuple[SharingGraph, int], int] = {}
        weights: dict[int, Mapping[int, int]] = {}
        order: list[tuple[int, Literal["forward", "backward"]]] = []
        kept, held = dict[int, int](), dict[int, int]()
        for one in self.last:
            graph = one.graph()
            if graph is None:
                return None
            if one.phase == "forward":  # a place may be taken again: its version is the same
                number = runs.setdefault((graph, one.place), len(runs))
                kept[number] = max(one.kept_bytes, kept.get(number, 0))
                held |= {number: one.held_bytes} if one.held_bytes else {}
                weights[number] = one.weights
            elif (graph, one.place) not in runs:
                return None  # it was recorded from its middle on
            order.append((runs[graph, one.place], one.phase))
        return self._described([*runs], order, 0, kept, held, [*weights.values()])

    def _described(
        self,
        runs: Sequence[tuple[SharingGraph, int]],
        order: Order,
        more_bytes: int,
        kept: Mapping[int, int],
        held: Mapping[int, int],
        weights: Sequence[Mapping[int, int]],
    ) -> StepDescription | None:
        graphs = list(dict.fromkeys(graph for graph, _ in runs))
        parts = []
        try:
            for graph in graphs:
                with apart_from_tracing():
                    parts.append(graph.part())
        except NoBackward:
            return None
        fixed_bytes = more_bytes + max(graph.fixed_bytes for graph in graphs)
        part_of = tuple(graphs.index(graph) for graph, _ in runs)
        interfaces = [part.interface for part in parts]
        held_so = {
            run: nbytes + interfaces[part_of[run]].given * bool(runs[run][0].graph.unsent)
            for run, nbytes in held.items()  # with what it takes to run again
        }
        points = in_order(
            interfaces, part_of, order, fixed_bytes, results_kept=kept, results_held=held_so,
            weights=weights,
        )  # fmt: skip
        places = tuple(place for _, place in runs)
        planners: dict[int, Planner] = {k: graph.plan_version for k, graph in enumerate(graphs)}
        found = StepDescription(points, part_of, places, parts, planners=planners)
        if len(order) == 2 * len(runs):  # no run comes again: its addresses would hold for all
            whole = [run for run, nbytes in kept.items() if nbytes == ALL_RESULTS]
            found.outside = partial(
                outside_in_order, order=order, held_bytes=fixed_bytes, kept=whole, held=held
            )
        return found

    def _plan_anew(self) -> None:
        """Have the graphs of the last step choose their versions together."""
        described = self._describe_last()
        if described is None:
            return
        self.due = False
        graphs = dict.fromkeys(one for one in (each.graph() for each in self.last) if one)
        for index, graph in enumerate(graphs):
            graph.role = Role(described, index, is_due=True)

    # -- runs ----------------------------------------------------------------------------------

    @property
    def is_under_way(self) -> bool:
        """Whether a step has begun: a run waits, or will run again or does so now."""
        runs_again = hooks_on_what_is_saved() and running_backward() is not None
        return bool(self.waiting or self.given.checkpointed.nodes) or runs_again

    def begin(self, promise: Promise, args: Iterable[object]) -> None:
        """A forward begins; if none waits, a step does."""
        if self.watch is None:
            device, budget = promise.device, promise.budget_bytes
            self.watch = StepWatch(device, budget, promise.counts_reserved, self._compilations)
        if not self.is_under_way and not self.watch.is_over:
            around = alive(promise.around)
            known = [*args, *around, *self.given.weights(), *self.given.batch.values()]
            resident, arena = with_gradients(known, promise.device), self.own.arena
            more = with_gradients(self.given.read_behind.values(), promise.device)
            unplanned = sum(without(more, resident).values())
            if arena is not None:
                resident = {k: n for k, n in resident.items() if not arena.holds(k)}
                resident[arena.address] = arena.nbytes
            weights, self.saved_bytes = [*self.given.weights(), *self.given.read_behind.values()], 0
            states = optimizer_memory(None, weights, promise.device)
            self.watch.begin(sum(resident.values()) + states.states - states.missing, unplanned)

    def _compilations(self) -> int:
        """How many there were, by Dynamo and by graphs that were planned again."""
        return compilations() + self.compiled_again

    def step_begins(self) -> None:
        """Before a forward: if none waits, the step before is over, and may be planned as one."""
        if self.is_under_way:
            return
        if self.order:
            self.last, self.order, self.warned.told = self.order, [], False
        graphs = {graph for one in self.last if (graph := one.graph()) is not None}
        for graph in graphs:
            graph.role.runs_alone = len(graphs) == 1
        for graph in list(self.graphs):
            self.due |= graph.sends_otherwise()
        self._use_what_is_left()
        self._see_gradients(graphs)
        self._see_beside()
        if self.due and self.last:
            self._plan_anew()

    def _see_gradients(self, graphs: Iterable[SharingGraph]) -> None:
        """Have several graphs planned for gradients that live on, once that is seen."""
        several = [one for one in graphs if one.role.described is not None]
        if not several or is_a_rank() or any(one.request.inputs.gradients_stay for one in several):
            return
        if living := living_gradients(self.given.weights()):
            for one in several:
                one.expect_gradients(living)
            self.due = True

    def _see_beside(self) -> None:
        """Have all graphs planned beside what checkpoints and eager code were seen to hold."""
        more = 0 if is_a_rank() else self.given.checkpointed.news() + self.given.eager.news()
        if not more:
            return
        self._set_all_aside(0, more, remembered=False)  # each run sees it in its first step

    def _set_all_aside(self, between: int, held: int, *, remembered: bool = True) -> None:
        """Have all graphs planned again with so many bytes more, or fewer, beside them."""
        for graph in list(self.graphs):
            graph.set_aside(between, held, remembered=remembered)
            self.due |= graph.role.described is not None

    def take_lowest(self) -> None:
        """Have all graphs planned for the least bytes: what was measured leaves too few."""
        if not self.warned.lowest:
            self.warned.lowest = True
            self._set_all_aside(0, 0)

    def _use_what_is_left(self) -> None:
        """Have all graphs planned again, once, where the loop takes much less than was promised.

        Once its optimizers have stepped, the allocator has reserved what it will have.
        """
        watch, graphs = self.watch, list(self.graphs)
        looks = watch is not None and watch.reserved and watch.is_over
        if watch is None or not looks or self.warned.looked >= MOST_STEPS:
            return
        self.warned.looked += 1
        if not graphs or not all(one.is_complete for one in graphs):
            return
        self.warned.looked = MOST_STEPS
        reserve = max(one.graph.options.reserve or 0 for one in graphs)
        left = watch.promised - reserve - torch.cuda.max_memory_reserved(watch.device)
        again = any(one.takes_time for one in graphs)
        if left <= MUCH_UNUSED * watch.budget_bytes or not again or is_a_rank():
            return
        log.info("the loop reserves %s less than planned: planned again", format_bytes(left))
        self._set_all_aside(0, -left)
        watch.look_again()

    def end(self, promise: Promise) -> None:
        """A backward has ended; if no forward waits, the step does when that backward returns."""
        if not self.is_under_way and self.watch is not None:
            when_backward_returns(partial(self._ended, self.watch, promise))

    def _ended(self, watch: StepWatch, promise: Promise) -> None:
        """A step has ended, and may have taken too much."""
        exceeded = watch.end(promise.graph, self.saved_bytes, promise.unseen_bytes)
        if exceeded is not None:
            exceeded.again = self._set_aside(watch, exceeded)
            log.info("%s", exceeded)
            warnings.warn(exceeded, stacklevel=4)

    def _set_aside(self, watch: StepWatch, exceeded: BudgetExceeded) -> bool:
        """Have all graphs planned again for what a step was seen to take; whether they are.

        At first what nobody had counted is taken to be there while all runs wait, as a loss is,
        then at all times. More each time: plans may free less than is counted, as with
        ``retain_graph``. Ranks see different numbers, and have to run the same.
        """
        ends = self.warned.lowest and barely(exceeded)
        if ends or self.warned.planned_again == MOST_AGAIN or not self.graphs or is_a_rank():
            return False
        between, held = exceeded.outside_bytes - exceeded.counted_bytes, 0
        if self.warned.planned_again:
            between, held = 0, to_hold(exceeded, self.warned.planned_again)
        for one in self.order:  # more runs may wait than were planned for
            if (graph := one.graph()) is not None:
                graph.taken.count = max(graph.taken.count, one.place + 1)
        self._set_all_aside(between, held)
        watch.look_again()
        self.warned.planned_again += 1
        self.warned.taken, self.warned.ended = exceeded.taken_bytes, self.warned.lowest
        return True

    def add(self, run: WaitingRun, own: Iterable[object]) -> PromiseBroken | None:
        """One more run waits; ``own`` are its arguments and results.

        The warning to give where a budget will be exceeded.
        """
        node = run.node()
        key, waiting = id(node), self.waiting
        waiting[key] = run
        if self.waiting_of(run.frame) > 1:
            self.given.together.add(run.frame)
        if self._is_recorded(run):
            before = self.order[-1] if self.order else None
            if before is not None and before.phase == "forward":
                last = next(reversed([one for one in waiting.values() if one is not run]), None)
                kept = 0 if last is None else last.kept_beside(run.given)
                self.order[-1] = replace(before, kept_bytes=kept)
            forward = Recorded(weakref.ref(run.graph), run.place, "forward", weights=run.weights)
            self.order.append(forward)
        weakref.finalize(node, self._leaves, key, run)
        when_freed(node, partial(self._leaves, key, run))
        number, nbytes = len(waiting), sum(one.promise.saved_bytes for one in [*waiting.values()])
        self.saved_bytes = max(self.saved_bytes, nbytes + run.returned_bytes)
        if number == 1:  # what was compiled before cannot hold its results
            self.collected = self._compilations()
        if self.watch is not None:
            self.watch.promised = max(self.watch.promised, run.runs.step_peak_bytes)
        runs, most = self.warned.most
        known = self.warned.anew or self.warned.told
        if number == 1 and self.warned.anew:
            self.warned = replace(self.warned, most=(1, 0), runs=1, anew=False)
        elif number > 1 and not known and (number > runs or nbytes > most):
            self.warned.most = max(number, runs), max(nbytes, most)
            return self._compare(run, own)
        return None

    def _leaves(self, key: int, run: WaitingRun) -> None:
        """A run goes backward, or its graph is gone."""
        if self.waiting.get(key) is run:
            del self.waiting[key]
            if running_backward() is None and not self.waiting and self.watch is not None:
                self.watch.abandon()  # its graph is gone: no backward comes
            if self._is_recorded(run):
                self._note_held(run)
                self.order.append(Recorded(weakref.ref(run.graph), run.place, "backward"))

    def _note_held(self, run: WaitingRun) -> None:
        """Note at its forward what somebody holds of its results when the run goes backward.

        While a step is compiled, garbage of Dynamo's may, until Python collects it.
        """
        if any(one() is not None for one in run.made) and self._compilations() > self.collected:
            self.collected = self._compilations()
            gc.collect()
        held = storages_of([one() for one in run.made], run.promise.device)
        for k, one in reversed(list(enumerate(self.order))):
            same = one.graph() is run.graph and one.place == run.place
            if same and one.phase == "forward":
                self.order[k] = replace(one, held_bytes=sum(held.values()))
                return

    @property
    def records(self) -> bool:
        """Whether the order of runs is still of interest."""
        unknown = any(graph.role.runs_alone is None for graph in self.graphs)
        return unknown or self.due or self.watch is None or not self.watch.is_over

    def _is_recorded(self, run: WaitingRun) -> bool:
        return run.graph is not None and self.records

    def _compare(self, run: WaitingRun, own: Iterable[object]) -> PromiseBroken | None:
        """The warning if its backward will exceed the budget, for what others hold."""
        promise, number = run.promise, len(self.waiting)
        around = alive(promise.around)
        counted = storages_of(around, promise.device)
        if run.graph is not None:  # counted when it was planned
            counted |= storages_of(self.given.batch.values(), promise.device)
            counted |= self.resident_beside({}, promise.device)
        known = without({**storages_of(own, promise.device), **run.saved()}, counted)
        waiting = list(self.waiting.values())
        saved = (other.saved() for other in waiting if other is not run)
        others = dict(item for each in saved for item in each.items())
        held = sum(without(others, known.keys() | counted.keys()).values())
        beside = promise.beside(held, sum(known.values()))
        expected = promise.peak_bytes + max(beside, promise.held_bytes)
        if expected > promise.budget_bytes and number > self.warned.runs:
            self.warned.runs = number
            budget, left = promise.budget_bytes, promise.left_bytes
            self.warned.told = together = self.due and left is None
            broken = PromiseBroken(promise.graph, number, held, expected, budget)
            return replace(broken, left_bytes=left, together=together)
        return None


_SCOPES: dict[tuple[torch.device, int | None], BudgetScope] = {}


def scope_of(device: torch.device, budget_bytes: int | None) -> BudgetScope:
    """The scope of a budget: the same for all graphs on the device that are given this number."""
    return _SCOPES.setdefault((device, budget_bytes), BudgetScope())


def forget() -> None:
    """Count anew: graphs compiled from now on share a budget with no other one."""
    _SCOPES.clear()

"""The forward of a compiled graph, watched: which version it takes, and what waits beside it.

What waits is counted when a forward ends, and looked at closely only if there is more of it than
ever before.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxremat.compat.backward import (
    autograd_position,
    hooks_on_what_is_saved,
    node_of_forward,
    node_of_results,
    results_of_node,
    when_backward_ends,
    when_backward_starts,
    when_gradients_come,
)
from fxremat.compat.tensors import is_fake
from fxremat.core.layout import NOWHERE, StepLayout
from fxremat.errors import InfeasibleBudget, forget_frames
from fxremat.memory.arena import Arena, PlacedRun
from fxremat.memory.storages import storages_of
from fxremat.runtime.placed import places_of_forward, set_places_of_backward
from fxremat.runtime.unsent_gradients import like
from fxremat.step.given import WaitingRun
from fxremat.step.promise import Compiled, RunVersions
from fxremat.step.scope import BudgetScope

if TYPE_CHECKING:
    from fxremat.step.runs import GraphInStep

log = logging.getLogger(__name__)


def watch_in_flight(
    runs: RunVersions,
    scope: BudgetScope,
    frame: int = 0,
    graph: GraphInStep | None = None,
    apart: GraphInStep | None = None,
) -> Compiled:
    """One callable for all runs of a graph, which warns when a budget will not be kept.

    The warning, `PromiseBroken`, comes when several forwards are in flight at once, of this graph
    or of others in the same ``scope``: once for each number of them that is larger than before.
    Where more runs of the ``graph`` wait than were planned for, it is planned again for as many,
    with immediate effect. When none of its runs waits it may take other versions, if the step has
    changed. The graph was planned for modules that wait together; if they run in turn, the one
    ``apart`` takes its place.
    """
    watched_runs = _WatchedRuns(runs, scope, frame, graph, apart)

    def watched(*args: Any) -> Any:
        return watched_runs.run(args)

    return like(runs.versions[0].call, watched)


def without_backward(call: Compiled, scope: BudgetScope) -> Compiled:
    """A graph that nothing of waits for a backward: it may have the bytes of an empty arena."""

    def run(*args: Any) -> Any:
        if scope.own.arena is None or scope.waiting:
            return call(*args)
        with scope.own.arena.lent():
            return call(*args)

    return like(call, run)


@dataclass
class _WatchedRuns:
    """The runs of one graph as they are now, and where their buffers lie."""

    runs: RunVersions
    scope: BudgetScope
    frame: int
    graph: GraphInStep | None
    apart: GraphInStep | None = None
    placed: tuple[PlacedRun, ...] = ()
    placed_for: StepLayout = NOWHERE

    def run(self, args: tuple[Any, ...]) -> Any:
        """Run the forward that comes next, in the version of its place."""
        scope = self.scope
        if any(isinstance(each, torch.Tensor) and is_fake(each) for each in args):
            # Dynamo asks for sizes, to split what follows for DDP.
            return self.runs.of_run(scope.free_place(self.frame)).call(*args)
        scope.step_begins()
        if scope.records and not (self.graph is not None and self.graph.where.context.sharded):
            known = self.runs.versions[0]
            scope.given.note(args)
            scope.given.see_eager(args, known.around, scope.waiting.values(), known.device)
        if self.apart is not None and self.scope.last and not self.is_pinned:
            self._take_apart()
        if self.graph is not None and not self.is_pinned:
            self.runs = self.graph.renewed(args) or self.runs
        place, before = scope.free_place(self.frame), autograd_position()
        promise = self.runs.of_run(place)
        scope.begin(promise, args)
        placed = self.placed_run(place, promise.device)
        if not scope.waiting:
            scope.own.begin(self.placed_for)
        if scope.own.to_move and scope.own.arena is not None:
            scope.own.arena.move(scope.own.to_move, None if placed is None else placed.backward)
            scope.own.to_move = []
        with places_of_forward(None if placed is None else placed.forward):
            results = promise.call(*args)
        whole = node_of_results(results, before)
        if placed is not None:
            set_places_of_backward(whole, placed.backward)
        if whole is not None and scope.watch is not None and not scope.watch.is_over:
            when_backward_starts(scope.given.see_behind)
            when_backward_ends(whole, partial(scope.end, promise))
            if self.graph is not None:
                see = partial(self.graph.graph.gradients.see, results_of_node(results, whole))
                when_gradients_come(whole, see)
        node = node_of_forward(results, before)
        if node is None and whole is not None:
            batch = [one for one in args if not isinstance(one, nn.Parameter)]
            scope.given.checkpointed.add(whole, storages_of(batch, promise.device))
        if node is not None:
            made = results if isinstance(results, (list, tuple)) else (results,)
            run = WaitingRun(weakref.ref(node), promise, self.runs, self.graph, self.frame, place)
            if scope.records:
                run = _with_storages(run, args, made)
            own = (*args, *made)
            self.look(run, own)
        return results

    def _take_apart(self) -> None:
        """Take what was planned for modules that run in turn, if these did in the last step."""
        apart, self.apart = self.apart, None
        if apart is None or self.frame in self.scope.given.together:
            return
        try:
            self.runs = apart.compiled() or self.runs
        except InfeasibleBudget as refused:
            forget_frames(refused)
            return
        self.scope.graphs.difference_update([self.graph])
        self.scope.graphs.add(apart)
        self.graph = apart

    @property
    def is_pinned(self) -> bool:
        """Whether its versions stay: one waits, or is to save again what it has saved."""
        waits = any(one.runs is self.runs for one in self.scope.waiting.values())
        return waits or (hooks_on_what_is_saved() and self.scope.is_under_way)

    def placed_run(self, place: int, device: torch.device) -> PlacedRun | None:
        """Where the buffers of the run at a place lie, if that was planned."""
        layout = NOWHERE if self.graph is None else self.graph.layout
        if layout is not self.placed_for:
            self.placed_for, self.placed = layout, ()
            if layout.runs:
                self.scope.own.arena = self.scope.own.arena or Arena(device)
                self.placed = self.scope.own.arena.placed(layout)
        return self.placed[place] if place < len(self.placed) else None

    def look(self, run: WaitingRun, own: Iterable[object]) -> None:
        """Warn, and plan again, where more runs wait than were planned for."""
        broken = self.scope.add(run, own)
        if broken is None:
            return
        waiting, planned = self.scope.waiting_of(self.frame), len(self.runs.version_of_run)
        if waiting > planned and self.scope.given.refused is not None:
            raise self.scope.given.refused
        if waiting > planned and self.graph is not None and not self.graph.saves_least:
            count = 1 << (waiting - 1).bit_length()
            log.warning("fxremat: %d forwards wait for a backward: planned for %d", waiting, count)
            self.runs = self.graph.compiled_for(count)
            broken.planned_for, self.scope.warned.anew = count, True
        log.info("%s", broken)
        warnings.warn(broken, stacklevel=4)


def _with_storages(run: WaitingRun, args: Sequence[object], made: Sequence[object]) -> WaitingRun:
    """The run with what it was given, and what it made of that."""
    device = run.promise.device
    given, gives = (storages_of(each, device) for each in (args, made))
    leaves = [x for x in args if isinstance(x, torch.Tensor) and x.is_leaf and x.requires_grad]
    results = [x for x in made if isinstance(x, torch.Tensor)]
    others = {*given, *run.saved()}
    return replace(
        run,
        given=frozenset(given),
        results=frozenset(gives),
        made=tuple(map(weakref.ref, results)),
        weights=storages_of(leaves, device),
        returned_bytes=sum(size for key, size in gives.items() if key not in others)
        + sum(one.nbytes for one in results if one.requires_grad),
    )

"""The judge: plain compile's loop and the planned one, recorded and replayed for a card."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from fxremat.compat.absent.pretending import pretending
from fxremat.compat.dynamo import fresh_dynamo_caches
from fxremat.core.events import RunEvents
from fxremat.core.layout import RunLayout, StepLayout
from fxremat.core.step import ALL_RESULTS, last_first
from fxremat.cost.cuda_scratch import cublas_workspace
from fxremat.cost.device import Card, absent_card
from fxremat.memory.allocator_settings import AllocatorSettings
from fxremat.memory.composed_steps import outside_in_order
from fxremat.memory.layout import arrange
from fxremat.memory.reserved_bytes import CommonPool, keep_too_much
from fxremat.report.report import Report

from .graphs import TracedModel, checkpointed, planned_together, scratch_of_card, traced_graphs
from .recorder import Libraries, LoopRecord, LoopRecorder
from .replay import LoopUsage, replay_loop
from .stand_in import Arena, LoopGraph, StandIn, on_device, runs_as
from .steps import LOOPS, OPTIMIZERS

STAY = "training, gradients stay"
GRADIENTS_LIVE = ("accumulate4", "zero_grad_late_and_clip")
"""Loops in which gradients live on where a forward begins."""

Graphs = tuple[LoopGraph, ...]
"""Those of a model, in the order in which they run."""


@dataclass(frozen=True)
class Outcome:
    """What a loop reserves of the card, in bytes, where its peak is, and who holds what there."""

    reserved: int
    reserved_by_step: tuple[int, ...]
    unused: int
    peak_step: int
    moment: str
    held: dict[str, int]


@dataclass(frozen=True)
class Promise:
    """A model planned for a budget: what is promised, and the graphs that keep it."""

    promised: int
    least: int | None
    graphs: dict[str, Graphs]
    arena_bytes: int = 0
    pool_bytes: int = 0
    in_turn: bool = False


@dataclass
class Judge:
    """One model on one card; what is traced, and what plain compile takes, is found once.

    Graphs are called "training", "other shape" and "evaluation".
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    traces: dict[str, list[TracedModel]] = field(default_factory=dict)
    plain_graphs: dict[str, Graphs] = field(default_factory=dict)
    plain_usage: dict[str, LoopUsage] = field(default_factory=dict)
    reports: dict[tuple[Any, ...], list[Report]] = field(default_factory=dict)
    checkpoints: Judge | None = None
    """The same model with its blocks checkpointed."""

    @property
    def others(self) -> tuple[Any, ...]:
        """Inputs of another shape."""
        return half_of_batch(self.inputs)

    def plain_of(self, loop: str) -> int:
        """What plain compile reserves in a loop."""
        if loop not in self.plain_usage:
            graphs = {name: self._plain(name) for name in _graphs_of(loop)}
            self.plain_usage[loop] = replay_loop(self._recorded(loop, graphs))
        return self.plain_usage[loop].reserved

    def checkpointing_of(self, loop: str) -> int | None:
        """What it reserves with each block checkpointed, and compiled; None where it has none."""
        with checkpointed(self.model) as has_blocks:
            if not has_blocks:
                return None
            own = self.checkpoints = self.checkpoints or Judge(self.model, self.inputs)
            return own.plain_of(loop)

    def planned(self, loop: str, budget: int) -> Promise:
        """The graphs of a loop as they are planned for it. Raises `InfeasibleBudget`."""
        options = {"memory_budget": f"{budget}B", "optimizer": OPTIMIZERS[loop]}
        trained = [name for name in _graphs_of(loop) if name != "evaluation"]
        several = "other shape" in trained
        reports = {name: self._report(name, options, several) for name in trained}
        if loop in GRADIENTS_LIVE:
            reports[STAY] = self._report(STAY, options)
        placed = {name: _placed(found) for name, found in reports.items()}
        graphs = {name: self._as_planned(name, reports[name], placed[name]) for name in reports}
        first = [one for name, one in placed.items() if name != STAY]
        owns = [one[0].memory.own for one in reports.values() if len(one) == 1]
        in_turn = several and len(owns) > 1 and keep_too_much(owns, AllocatorSettings())
        first = [placed["training"]] if in_turn else first
        arena = max(one.arena_bytes for one in first)
        pool = max(one.pool_bytes for one in first)
        if "evaluation" in _graphs_of(loop):
            plain = self._plain("evaluation")
            graphs["evaluation"] = tuple(replace(one, layout=RunLayout()) for one in plain)
        # Of micro-batches, only the first runs as planned first, and none steps an optimizer then.
        stays = reports.get(STAY) if loop == "accumulate4" else None
        last = stays or [one for found in reports.values() for one in found]
        promised = [one.step_peak_bytes or one.predicted_reserved_bytes or 0 for one in last]
        least = [one.minimum_peak_bytes for one in last]
        known = [one for one in least if one is not None]
        return Promise(max(promised), max(known, default=None), graphs, arena, pool, in_turn)

    def _report(self, name: str, options: dict[str, Any], several: bool = False) -> list[Report]:
        """Planned once for the same budget; with ``several`` batches on the card, as it sees."""
        asked = name, several, *options.values()
        if asked not in self.reports:
            batches = [self.inputs, self.others]
            if name == "other shape":
                batches.reverse()
            self.reports[asked] = planned_together(
                self._traced(name),
                options,
                beside=self._segments(*batches) - self._segments(batches[0]) if several else 0,
                gradients_stay=name == STAY,
            )
        return self.reports[asked]

    def _segments(self, *batches: Sequence[Any]) -> int:
        """Bytes that the card reserves for the model and for batches."""
        held = [
            *self.model.parameters(),
            *self.model.buffers(),
            *(x for one in batches for x in one),
        ]
        sizes = [one.nbytes for one in held if isinstance(one, torch.Tensor)]
        return CommonPool(sizes).reserved(AllocatorSettings())

    def outcome(self, loop: str, promise: Promise) -> Outcome:
        """What the loop then reserves."""
        usage = replay_loop(self._recorded(loop, promise.graphs, promise))
        return Outcome(
            usage.reserved,
            tuple(step.reserved for step in usage.steps),
            usage.unused,
            usage.peak_step,
            usage.moment,
            usage.held,
        )

    def _traced(self, name: str) -> list[TracedModel]:
        shape = "other shape" if name == "other shape" else "training"
        if shape not in self.traces:
            inputs = self.others if shape == "other shape" else self.inputs
            self.traces[shape] = traced_graphs(self.model, inputs)
        return self.traces[shape]

    def _plain(self, name: str) -> Graphs:
        if name not in self.plain_graphs:
            self.plain_graphs[name] = tuple(
                _graph(one, one.evaluated() if name == "evaluation" else one.plain())
                for one in self._traced(name)
            )
        return self.plain_graphs[name]

    def _as_planned(self, name: str, reports: list[Report], placed: StepLayout) -> Graphs:
        runs = zip(self._traced(name), reports, placed.runs, strict=True)
        made = (_graph(traced, _events(one), layout) for traced, one, layout in runs)
        arena, pool = placed.arena_bytes, placed.pool_bytes
        return tuple(replace(one, arena_bytes=arena, pool_bytes=pool) for one in made)

    def _recorded(
        self, loop: str, graphs: dict[str, Graphs], promise: Promise | None = None
    ) -> LoopRecord:
        card = _card()
        libraries = Libraries(
            cublas_workspace(card.capability), card.l2_cache, scratch_of_card().blocks_of_call
        )
        recorder = LoopRecorder(libraries)
        arena, full = Arena(recorder, 0), _shapes(self.inputs)
        if promise is not None:
            arena = Arena(recorder, promise.arena_bytes, promise.pool_bytes, promise.in_turn)
        both = self.inputs, self.others if "other shape" in graphs else ()

        seen = set[bool]()

        def name_of(inputs: Sequence[Any], gradients: bool, living: bool = False) -> str:
            if not gradients:
                return "evaluation"
            seen.add(living)
            if True in seen and STAY in graphs:  # planned again, and from then on
                return STAY
            return "training" if _shapes(inputs) == full else "other shape"

        with (
            pretending(card.properties()) if _are_several(graphs) else nullcontext(),
            recorder.running(),
            on_device(self.model, both, recorder) as (inputs, others),
        ):
            if _are_several(graphs):
                model: nn.Module = Several(self.model, recorder, name_of, graphs, arena)
            else:
                model = StandIn(self.model, recorder, lambda *x: graphs[name_of(*x)][0], arena)
            with fresh_dynamo_caches():
                LOOPS[loop](model, inputs, others, recorder.next_step)
            return recorder.record()


class Several(nn.Module):
    """A model of several graphs: Dynamo runs what lies between them, and they are stood in for."""

    def __init__(
        self,
        model: nn.Module,
        recorder: LoopRecorder,
        name_of: Callable[[Sequence[Any], bool, bool], str],
        graphs: dict[str, Graphs],
        arena: Arena,
    ) -> None:
        super().__init__()
        self.name_of, self.name, self.arena = name_of, "", arena
        self.graphs = graphs
        self.own: Any = model
        """As it is without Dynamo."""
        left = {
            name: iter([x for k, one in enumerate(several) for x in (*[None] * one.before, k)])
            for name, several in graphs.items()
        }

        def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            number, outputs = next(left[self.name], None), gm.graph.output_node().args[0]
            assert isinstance(outputs, (list, tuple))
            if number is None:
                return gm
            return runs_as(lambda: self.graphs[self.name][number], len(outputs), recorder, arena)

        self.model: Any = torch.compile(model, backend=backend, dynamic=False)

    def forward(self, *inputs: Any) -> Any:
        weights, training = list(self.own.parameters()), torch.is_grad_enabled()
        living = any(one.grad is not None for one in weights)
        before, self.name = self.name, self.name_of(inputs, training, living)
        if training:
            self.arena.begin(self.graphs[self.name], weights)
        else:
            self.arena.lend()
        result = self.model(*inputs)
        if before != self.name:
            gc.collect()  # frames that Dynamo has compiled leave cycles, which hold results
        return result


def _are_several(graphs: dict[str, Graphs]) -> bool:
    return any(len(several) > 1 for several in graphs.values())


def _graph(traced: TracedModel, events: RunEvents, layout: RunLayout | None = None) -> LoopGraph:
    return LoopGraph(events, traced.inputs, traced.results, layout, before=traced.before)


def _events(report: Report) -> RunEvents:
    assert report.events is not None
    return report.events


def _placed(reports: list[Report]) -> StepLayout:
    """The addresses of graphs that run forward in this order, and backward in turn."""
    runs, order = [*map(_events, reports)], last_first(len(reports))
    outside = list(outside_in_order(runs, order, 0, held={len(runs) - 1: ALL_RESULTS}))
    return arrange(runs, order, "cuda", outside=outside).layout


def _card() -> Card:
    card = absent_card()
    assert card is not None, "loops are judged for a card that is not here"
    return card


def _graphs_of(loop: str) -> tuple[str, ...]:
    """The graphs that a loop runs."""
    more = {"evaluate": ("evaluation",), "second_shape": ("other shape",)}
    return ("training", *more.get(loop, ()))


def _shapes(inputs: Sequence[Any]) -> list[torch.Size]:
    return [one.shape for one in inputs if isinstance(one, torch.Tensor)]


def half_of_batch(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Inputs of half the rows; of half the length, where there is only one row.

    These are the sizes of the first tensor, and of all others that are as large there.
    """
    first = next(one for one in inputs if isinstance(one, torch.Tensor))
    dim = 0 if first.shape[0] > 1 else 1
    size = first.shape[dim]
    return tuple(
        one.narrow(dim, 0, max(1, size // 2)).contiguous()
        if isinstance(one, torch.Tensor) and one.dim() > dim and one.shape[dim] == size
        else one
        for one in inputs
    )

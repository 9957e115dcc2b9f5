"""Graphs of one step, planned together and not compiled, as where a model is explained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from fxremat.compat.tensors import storage_key
from fxremat.compile.constants import DRY_RUNS
from fxremat.compile.request import (
    Request,
    device_of_inputs,
    for_inputs,
    request_for,
    size_of_inputs,
)
from fxremat.core.step import ALL_RESULTS, in_order, last_first
from fxremat.memory.composed_steps import outside_in_order
from fxremat.options import Options
from fxremat.planner import step_versions as planner
from fxremat.report.report import Report
from fxremat.step.description import StepDescription
from fxremat.step.graph import Graph, NoBackward
from fxremat.step.versions import Offer, Part, version_in


@dataclass(frozen=True)
class _Asked:
    """A graph of the step, what is asked of it alone, what it offers, and what was planned."""

    graph: Graph
    request: Request
    part: Part
    planned: dict[tuple[int, int], Report] = field(default_factory=dict)
    """By the limits of versions."""

    def version(self, offer: Offer, limit_bytes: int) -> Report:
        """The graph planned as a version."""
        asked = offer.peak_bytes, offer.between_bytes
        if asked not in self.planned:
            request = self.request.with_budget(limit=limit_bytes)
            self.planned[asked] = self.graph.plan(offer.asked(request, whole=True))
        return self.planned[asked]


def plan_in_order(
    graphs: Sequence[tuple[fx.GraphModule, Sequence[Any]]],
    options: Options,
    *,
    neighbours: int = 0,
    gradients_stay: bool = False,
) -> tuple[Report, ...]:
    """The plans of graphs that run forward one after the other, and backward in turn.

    Graphs without a backward are left out. Others hold ``neighbours`` bytes. Raises
    `InfeasibleBudget` with the least that all need together.
    """
    shared = _given_from_outside(inputs for _, inputs in graphs)
    request = request_for(shared, options, neighbours=neighbours)
    request = request.with_inputs(gradients_stay=gradients_stay)
    asked = list[_Asked]()
    for gm, inputs in graphs:
        graph, own = Graph(gm, inputs, options, None), for_inputs(request, inputs)
        with suppress(NoBackward):
            asked.append(_Asked(graph, own, graph.as_part(own, 1)))
    if not asked:
        return ()
    fixed = request.budget.held + size_of_inputs(shared, device_of_inputs(shared))
    parts, part_of = [one.part for one in asked], tuple(range(len(asked)))
    interfaces, order = [one.interface for one in parts], last_first(len(parts))
    held = dict.fromkeys(part_of[-1:], ALL_RESULTS)  # whoever runs the model has what it gives
    points = in_order(interfaces, part_of, order, fixed, results_held=held)
    outside = partial(outside_in_order, order=order, held_bytes=fixed, held=held)
    step = StepDescription(points, part_of, (0,) * len(parts), parts, outside=outside)
    step.planners.update(enumerate(one.version for one in asked))
    reserved = partial(step.reserved, settings=request.budget.counted_allocator)
    limit = request.budget.limit
    if limit is None:
        return _planned(step, asked, (0,) * len(parts), fixed)
    aim = request.budget.for_step
    for _ in range(DRY_RUNS):
        chosen = planner.fastest(step.step(), aim)
        if chosen is None:
            break
        step.make_exact(chosen, limit)
        peak = step.step().peak_bytes(chosen)
        taken = reserved(chosen)
        nbytes = peak if taken is None else taken.nbytes
        if nbytes <= request.budget.for_step:
            break
        if taken is not None:
            aim = min(aim, peak) - (taken.nbytes - request.budget.for_step)
    else:
        chosen = None
    if chosen is None:
        least = step.least(request.budget, reserved)
        if least.budget_bytes > limit:
            raise least.refusal(limit)
        chosen, nbytes = least.chosen, least.budget_bytes - request.budget.autotune
    reports = _planned(step, asked, chosen, fixed)
    nbytes = max(nbytes, request.budget.optimizer_step)
    return tuple(replace(report, step_peak_bytes=nbytes) for report in reports)


def _planned(
    step: StepDescription, asked: Sequence[_Asked], chosen: Sequence[int], fixed: int
) -> tuple[Report, ...]:
    """The plans of the chosen versions, with what others hold beside each."""
    reports, saved = list[Report](), 0
    for one, part, version in zip(asked, step.parts, chosen, strict=True):
        offer, own, limit = part.offers[version], one.part.interface, one.request.budget.limit
        report = one.graph.plan(one.request) if limit is None else one.version(offer, limit)
        memory = report.memory.beside(fixed - own.resident + own.given + saved)
        reports.append(replace(report, memory=memory))
        saved += version_in(report).saved_bytes
    return tuple(reports)


def _given_from_outside(inputs: Iterable[Sequence[Any]]) -> list[torch.Tensor]:
    """Of what graphs are given, each tensor that none of them has made."""
    tensors = (x for each in inputs for x in each if isinstance(x, torch.Tensor))
    kept = (x for x in tensors if isinstance(x, nn.Parameter) or not x.requires_grad)
    return list({storage_key(x): x for x in kept}.values())

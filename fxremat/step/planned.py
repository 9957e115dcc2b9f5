"""Graphs of one step, planned together and not compiled, as where a model is explained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from fxremat.compat.tensors import storage_key
from fxremat.compile import session
from fxremat.compile.constants import DRY_RUNS
from fxremat.compile.request import Request
from fxremat.core.step import in_order, last_first
from fxremat.errors import InfeasibleBudget, forget_frames
from fxremat.options import Options
from fxremat.passes.memory_estimation import nbytes
from fxremat.planner import step_versions as planner
from fxremat.report.report import Report
from fxremat.step.description import StepDescription
from fxremat.step.graph import Graph, NoBackward
from fxremat.step.versions import Offer, Part

GraphAndInputs = tuple[fx.GraphModule, Sequence[Any]]


@dataclass(frozen=True)
class _Asked:
    """A graph of the step, what is asked of it alone, and what it offers."""

    graph: Graph
    request: Request
    part: Part

    def version(self, offer: Offer, limit_bytes: int) -> Report:
        """The graph planned as a version."""
        return self.graph.plan(offer.asked(self.request.with_budget(limit=limit_bytes)))

    def beside(self, held_bytes: int, offer: Offer) -> Report:
        """The graph planned as a version, where others hold so many bytes all the time."""
        request = self.request.with_budget(held=held_bytes)
        if request.budget.limit is not None:
            request = request.with_budget(between=offer.between_bytes, soft_limit=offer.peak_bytes)
        return self.graph.plan(request)


def plan_in_order(
    graphs: Sequence[GraphAndInputs], options: Options, study: session.Study | None = None
) -> tuple[Report, ...]:
    """The plans of graphs that run forward one after the other, and backward in turn.

    Graphs without a backward are left out. ``study`` is told what the search found for each. Raises
    `InfeasibleBudget` with the least that all need together.
    """
    asked = list(_asked(graphs, options, study))
    if not asked:
        return ()
    fixed = max(one.request.budget.held for one in asked)
    fixed += _bytes_of_all(inputs for _, inputs in graphs)
    parts, part_of = [one.part for one in asked], tuple(range(len(asked)))
    interfaces, order = [one.interface for one in parts], last_first(len(parts))
    held = part_of[-1:]  # whoever runs the model has what the last graph gives
    points = in_order(interfaces, part_of, order, fixed, results_held=held)
    step = StepDescription(points, part_of, (0,) * len(parts), parts)
    step.planners.update(enumerate(one.version for one in asked))
    limit = asked[0].request.budget.limit
    for _ in range(DRY_RUNS):
        aim = None if limit is None else asked[0].request.budget.for_step
        chosen = (0,) * len(parts) if aim is None else planner.fastest(step.step(), aim)
        if chosen is None:
            break
        reports = _planned(step, asked, chosen, fixed)
        if aim is None or (reports and step.step().peak_bytes(chosen) <= aim):
            return reports
    raise _refused(step, asked[0].request)


def _asked(
    graphs: Iterable[GraphAndInputs], options: Options, study: session.Study | None
) -> Iterable[_Asked]:
    for gm, inputs in graphs:
        graph = Graph(None, gm, inputs, options, None, study=study)
        request = graph.request()
        try:
            yield _Asked(graph, request, graph.as_part(request, 1))
        except NoBackward:
            continue


def _planned(
    step: StepDescription, asked: Sequence[_Asked], chosen: Sequence[int], fixed: int
) -> tuple[Report, ...]:
    """The plans of the chosen versions, which are then offered as they are; none if one fails."""
    reports, saved = list[Report](), 0
    for index, (one, version) in enumerate(zip(asked, chosen, strict=True)):
        offers, own = list(step.parts[index].offers), one.part.interface
        held = fixed - own.resident + own.given + saved
        try:
            reports.append(one.beside(held, offers[version]))
        except InfeasibleBudget as refused:
            offers[version] = offers[version].raised(refused)
            forget_frames(refused)
            step.offer(index, offers)
            return ()
        offers[version] = offers[version].as_counted(reports[-1])
        step.offer(index, offers)
        saved += offers[version].version.saved_bytes
    peak = step.step().peak_bytes(chosen)
    return tuple(replace(report, step_peak_bytes=peak) for report in reports)


def _refused(step: StepDescription, request: Request) -> InfeasibleBudget:
    """The error that names the least that all graphs need."""
    assert request.budget.limit is not None
    for _ in range(DRY_RUNS):
        chosen = planner.lowest(step.step())
        least = request.budget.least_for(step.step().peak_bytes(chosen))
        step.make_exact(chosen, least)
        if request.budget.least_for(step.step().peak_bytes(chosen)) <= least:
            break
    return InfeasibleBudget(request.budget.limit, least)


def _bytes_of_all(inputs: Iterable[Sequence[Any]]) -> int:
    """Of the tensors that graphs are given and none of them has made, each counted once."""
    tensors = (x for each in inputs for x in each if isinstance(x, torch.Tensor))
    kept = (x for x in tensors if isinstance(x, nn.Parameter) or not x.requires_grad)
    return sum({storage_key(x): nbytes(x) for x in kept}.values())

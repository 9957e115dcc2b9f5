"""`explain`: what would be done to a model under a budget, without compiling it.

A graph that is followed by others runs eagerly, so that these get the inputs that they will really
have. Where the model is a single graph, nothing runs. Parameters, buffers and the random state are
the same afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fxremat import planner
from fxremat.compat.dynamo import (
    fresh_dynamo_caches,
    inline_regions,
    is_whole_call,
    more_follow,
)
from fxremat.compat.joint_graph import copy_module
from fxremat.compat.measuring import random_state_kept
from fxremat.compat.tensors import on_host_without_memory
from fxremat.compile import session
from fxremat.compile.driver import total_bytes
from fxremat.compile.pipeline import Runner
from fxremat.compile.request import device_of_inputs
from fxremat.compile.search.search import SearchResult
from fxremat.core.plan import Plan
from fxremat.cost.device import absent_card
from fxremat.errors import CannotVary, FxrematError, InfeasibleBudget
from fxremat.memory.measured_peak import uncollected
from fxremat.options import Options, parse_options
from fxremat.planner import SolverOptions
from fxremat.report.exports import write_chrome_trace, write_snapshot
from fxremat.report.files import prepare_folder, tell_report, write_report
from fxremat.report.front import Front, front_of, together
from fxremat.report.page import write_page
from fxremat.report.report import Report, Row, added_time
from fxremat.step.graph import plan_only
from fxremat.step.planned import plan_in_order
from fxremat.whatif.peak_expression import PeakExpression, expression_of


class _NothingFollows(Exception):
    """The graph that would run next is the last one, and its results are not used."""


@dataclass(frozen=True)
class Explanation:
    """The plans of all graphs of one training step. Bytes are those at the peak of the step."""

    graphs: tuple[Report, ...]
    plan_again: Callable[..., tuple[Report, ...]] = field(repr=False, compare=False)
    """Takes the changes of options, and a study of each graph."""

    @property
    def predicted_peak_bytes(self) -> int:
        """The peak that the compiled step will have, in allocated bytes."""
        return max((g.predicted_peak_bytes for g in self.graphs), default=0)

    @property
    def predicted_reserved_bytes(self) -> int | None:
        """What torch's allocator will take from the device; None where that is not known."""
        known = [g.predicted_reserved_bytes for g in self.graphs]
        return max((nbytes for nbytes in known if nbytes is not None), default=None)

    @cached_property
    def minimum_peak_bytes(self) -> int:
        """The least budget that can be met: the number that `InfeasibleBudget` names.

        It is searched for when it is first read, by planning again: each refusal names the next
        budget to try. A model of one graph is planned twice: the second time confirms the number.
        """
        budget = impossible = 1  # byte: no graph with a backward fits
        while True:
            try:
                self.plan_again({"memory_budget": f"{budget}B", "report": None})
            except InfeasibleBudget as refusal:
                if refusal.minimum_bytes is None or refusal.minimum_bytes <= budget:
                    raise
                budget = refusal.minimum_bytes
            else:
                return 0 if budget == impossible else budget

    @cached_property
    def peak_expression(self) -> PeakExpression:
        """The peak in allocated bytes at every size that was traced as a symbol.

        It is that of the graph with the highest peak, and found when it is first read, by planning
        again and by dry runs at a few sizes. Sizes are those of `torch._dynamo.mark_dynamic`, up to
        what was declared. Raises `CannotVary` where the bytes are no polynomials of them.
        """
        found: list[PeakExpression] = []
        refused: list[CannotVary] = []

        def study(result: SearchResult, runner: Runner) -> None:
            try:
                found.append(expression_of(result, runner))
            except CannotVary as error:  # raised where Dynamo does not wrap it
                refused.append(error)

        self.plan_again({}, study)
        if refused:
            raise refused[0]
        if not found:
            raise CannotVary("peak", "no graph has a backward")
        return max(found, key=lambda one: one.at({each.name: each.high for each in one.ranges}))

    @property
    def store_all_peak_bytes(self) -> int:
        """The peak if nothing were recomputed."""
        return max((g.store_all_peak_bytes for g in self.graphs), default=0)

    @property
    def time_overhead(self) -> float:
        """The time added to running every op once, as a fraction, for all graphs together."""
        return added_time(self.graphs)

    @property
    def saved(self) -> tuple[Row, ...]:
        """The values kept from the forward for the backward."""
        return tuple(row for g in self.graphs for row in g.saved)

    @property
    def recomputed(self) -> tuple[Row, ...]:
        """The ops that run again in the backward, and how often."""
        return tuple(row for g in self.graphs for row in g.recomputed)

    @property
    def timeline(self) -> tuple[int, ...]:
        """Bytes live at every step, graph after graph."""
        return tuple(n for g in self.graphs for n in g.timeline)

    @property
    def plan(self) -> Plan | None:
        """The plan of the graph with the highest peak; None where no graph has a backward."""
        top = max(self.graphs, key=lambda g: g.predicted_peak_bytes, default=None)
        return top.plan if top is not None else None

    def pareto(self, time_limit_s: float | None = None) -> Front:
        """What other budgets would cost: allocated peak against time, by the planner's model.

        Operator variants are those taken here, whatever the budget. The plans explained here are
        among its points, unless others beat them. With graph breaks each graph takes its fastest
        plan at each peak; what the others hold stays as it is here.
        """
        options = SolverOptions(time_limit_s=time_limit_s)
        fronts = [
            front_of(
                g.problem,
                (*planner.front(g.problem, options), g.plan),
                budget_bytes=g.budget_bytes,
                held_bytes=g.held_bytes,
            )
            for g in self.graphs
        ]
        return together(fronts)

    def save_trace(self, path: str | Path) -> None:
        """Write the planned step as a Chrome trace, for ui.perfetto.dev; a graph is a process."""
        write_chrome_trace(path, self.graphs)

    def save_snapshot(self, path: str | Path) -> None:
        """Write the planned step for pytorch.org/memory_viz; a graph is a device there."""
        write_snapshot(path, self.graphs)

    def save_page(self, path: str | Path, front: Front | None = None) -> None:
        """Write the step as a page: one HTML file, offline (`docs/guide/looking_inside.md`).

        It shows the memory of each graph over the step, and every value in it. ``front`` is drawn
        beside it, as `pareto` finds it.
        """
        write_page(path, self.graphs, front)

    def __str__(self) -> str:
        if not self.graphs:
            return "fxremat: no graph with a backward was found; nothing to plan"
        return "\n".join(map(str, self.graphs))


@contextmanager
def _undisturbed(model: Callable[..., Any], given: Any) -> Iterator[Any]:
    """Yields what is given; at the end buffers and the random state are restored."""
    buffers = dict(model.named_buffers()) if isinstance(model, nn.Module) else {}
    before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    try:
        with random_state_kept():
            yield given
    finally:
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(before[name])


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    memory_budget: int | str | None = None,
    options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Explanation:
    """Plan ``model(*inputs, **keywords)`` for a budget and say what was decided.

    ``options`` are those of torch.compile; ``memory_budget`` is a shorthand for the one that
    matters most. Raises `InfeasibleBudget` and `InvalidOption` as compiling would.
    """
    given = dict(options or {})
    if memory_budget is not None:
        given["memory_budget"] = memory_budget

    def plan(changes: Mapping[str, Any], study: session.Study | None = None) -> tuple[Report, ...]:
        return _planned(model, inputs, keywords, {**given, **changes}, study)

    return Explanation(plan({}), plan)


def _planned_together(
    graphs: Sequence[tuple[fx.GraphModule, Sequence[Any]]], options: Options
) -> Iterator[Report]:
    """The reports of graphs that follow each other, in their order, and the files of each."""
    if options.report is not None:
        prepare_folder(options.report)
    for number, planned in enumerate(plan_in_order(graphs, options)):
        report = replace(planned, graph=number)
        tell_report(report)
        if options.report is not None:
            write_report(options.report, report)
        yield report


def _planned(
    model: Callable[..., Any],
    inputs: tuple[Any, ...],
    keywords: Mapping[str, Any],
    options: Mapping[str, Any],
    study: session.Study | None,
) -> tuple[Report, ...]:
    """The reports of all graphs of one step; ``study`` is called with what was found for each."""
    found: list[Report] = []
    together: list[tuple[fx.GraphModule, Sequence[Any]]] = []
    caller = sys._getframe().f_code  # who holds a frame that raises holds all its locals
    as_planned = _undisturbed if absent_card() is None else on_host_without_memory

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        more = more_follow(gm)
        compiled: Callable[..., Any] = gm
        if more or together:
            together.append((inline_regions(copy_module(gm)), example_inputs))
        else:
            compiled, report = plan_only(gm, example_inputs, options)
            found.extend([] if report is None else [report])

        def run(*given: Any) -> Any:
            if not more and is_whole_call(caller):
                raise _NothingFollows
            return compiled(*given)

        return run

    with (
        as_planned(model, (inputs, keywords)) as (args, kwargs),
        session.separate(study),
        fresh_dynamo_caches(),
        uncollected(),  # a fifth of the time
    ):
        try:
            with suppress(_NothingFollows):
                torch.compile(model, backend=backend)(*args, **kwargs)
            if together:
                total = total_bytes(device_of_inputs(together[0][1]))
                parsed = parse_options(options, device_total_bytes=total)
                found.extend(_planned_together(together, parsed))
        except Exception as error:
            inner = getattr(error, "inner_exception", None)
            if isinstance(inner, FxrematError):
                raise inner from None
            raise
    return tuple(found)

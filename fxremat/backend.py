"""``torch.compile(model, backend="fxremat", options={"memory_budget": "8GiB"})``.

The backend is Inductor's own compiler with our partitioner and our ordering pass in its
configuration; all of Inductor stays. With ``executor="aot_eager"`` the transformed graphs run
as they are, node by node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import fx

from fxremat.compat.call_stack import calling_modules
from fxremat.compat.compilers import (
    compile_with_inductor,
)
from fxremat.compat.configuration import (
    inductor_patches,
)
from fxremat.compat.distributed.ranks import ranks_together
from fxremat.compat.dynamo import current_compilation, inline_regions, splits_for_ddp
from fxremat.compat.inductor.lowered_ahead import forget_lowered
from fxremat.compat.joint_graph import copy_module
from fxremat.compat.tensors import places_in_joint
from fxremat.compile import session
from fxremat.compile.driver import plan_only, total_bytes
from fxremat.compile.ranks import agreed
from fxremat.compile.request import Request, device_of_inputs, request_for
from fxremat.core.places import Places
from fxremat.cost.cards import absent_card
from fxremat.errors import InfeasibleBudget, forget_frames
from fxremat.options import Options, disabled, parse_options
from fxremat.report.files import write_report
from fxremat.sizes import format_bytes
from fxremat.step import in_flight
from fxremat.step.ddp import see_parts
from fxremat.step.graph import Graph
from fxremat.step.in_flight import Runs, watch_in_flight
from fxremat.step.runs import (
    CompiledVersion,
    NoBackward,
    RunsOfOneGraph,
    fixed_inputs,
    surroundings,
)

log = logging.getLogger(__name__)


def fxremat(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """Compile one graph for a byte budget; the entry point that torch.compile finds by name.

    Raises `InvalidOption`, `InfeasibleBudget` or `VerificationFailed`; through torch.compile
    they arrive as ``BackendCompilerFailed.inner_exception``. For a card that is not here the graph
    is planned, and runs without memory as its inputs do.
    """
    if absent_card() is not None:
        planned, report = plan_only(gm, example_inputs, options or {})
        session.STATE.reports += [] if report is None else [report]
        return planned
    device = device_of_inputs(example_inputs)
    parsed = parse_options(options, device_total_bytes=total_bytes(device))
    if disabled():
        patches = inductor_patches(mode, parsed.inductor_options())
        return compile_with_inductor(gm, example_inputs, patches)
    gm = inline_regions(gm)
    ledger, place = session.ledger(options), current_compilation()
    around = surroundings(parsed, device)
    session.STATE.rank_timeout = parsed.rank_timeout
    outside = around.nbytes if calling_modules() else ledger.outside_bytes()
    request = request_for(gm, example_inputs, parsed, ledger, place, outside)
    if around.pipeline is not None and around.pipeline.whole:  # others hold what it is given
        everything = places_in_joint(example_inputs)
        request = request.with_inputs(parameters=tuple(range(everything[-1].stop)))
    ranks = ranks_together(gm, example_inputs)
    request = agreed(gm, ranks, request)
    graph = Graph(gm, copy_module(gm), example_inputs, parsed, mode, ranks)
    unseen = request.budget.held - ledger.held_by_others(*place)
    if request.budget.limit is not None and splits_for_ddp():
        see_parts(request.with_budget(soft_limit=None), around.left_bytes, graph.of_another)
    seen, index = session.seen_as(gm, example_inputs)
    as_seen = seen is not None
    if as_seen:  # all that follow have their part
        passed = seen.request is not None and seen.request.inputs.passed_on
        request = request.with_budget(soft_limit=None).with_inputs(passed_on=passed)
    if seen is None:
        seen, index = session.seen_in(next(reversed(calling_modules()), None))
    frame, compilation = place
    places = ledger.places.setdefault(frame, Places())
    count = around.runs if seen is None else len(seen.runs_of(index))
    first = places.first_units() if request.budget.metric == "allocated" else ()
    first = first if len(first) < count else ()
    runs = RunsOfOneGraph(
        request, device, around, unseen, graph.compile, graph.plan, graph.as_unit, seen, index,
        as_seen=as_seen, coming_bytes=parsed.reserve or 0, first=first,
        fixed_inputs=fixed_inputs(example_inputs) if request.budget.metric == "allocated" else (),
        places=places,
    )  # fmt: skip
    together = count > 1 or seen is not None or around.pipeline is not None
    found, told = None, len(session.STATE.reports)
    if together and request.budget.limit is not None and graph.needs_gradients:
        with suppress(NoBackward):
            found = runs.compiled_for(count)
    if found is None:
        alone, left_bytes = _alone(graph, request, ledger)
        if alone.report is None or request.budget.limit is None:
            return alone.call
        request = request.with_budget(held=request.budget.held - left_bytes)
        promised = runs.promised(alone, request)
        if left_bytes:
            promised = replace(promised, promise=replace(promised.promise, left_bytes=left_bytes))
        own = promised.promise.peak_bytes
        found = Runs((promised,), (0,), own, request.budget.held - around.late_bytes + own)
    graph.forget_inputs()
    ledger.record(frame, found.peak_bytes, compilation)
    _tell_step(parsed, told, found)

    def again(count: int) -> Runs:
        told = len(session.STATE.reports)
        anew = runs.compiled_for(count)
        _tell_step(parsed, told, anew)
        return anew

    def less() -> Runs | None:
        return again(runs.count) if runs.is_asked else None

    if runs.count and runs.seen is None and around.pipeline is None:
        ledger.runs[frame] = runs
    return watch_in_flight(found, places, again, less)


def _alone(graph: Graph, request: Request, ledger: session.Ledger) -> tuple[CompiledVersion, int]:
    """The graph by itself, and how many bytes others are to leave it more from the next step on.

    So they are where runs that wait leave it too few; this step takes more than the budget. Raises
    `InfeasibleBudget` with what all need together.
    """
    try:
        return graph.compile(request), 0
    except InfeasibleBudget as refused:
        if refused.minimum_bytes is None:
            raise
        missing = refused.minimum_bytes - refused.budget_bytes
        needed, least = refused.minimum_bytes, ledger.least_bytes(refused.minimum_bytes)
        if least is None:
            raise
        if least > refused.budget_bytes:
            raise InfeasibleBudget(refused.budget_bytes, least, *refused.args[2:]) from None
        forget_frames(refused)
    more = format_bytes(missing)
    log.warning("this step takes %s too much: parts of it are planned anew for the next", more)
    ledger.leave(needed)
    return graph.compile(request.with_budget(held=request.budget.held - missing)), missing


def _tell_step(options: Options, since: int, runs: Runs) -> None:
    """The peak of the step, in the reports made since then, and in their files."""
    for report in session.note_step_peak(since, runs.step_peak_bytes):
        if options.report is not None:
            write_report(options.report, report)


def _reset() -> None:
    """Forget what was compiled; called by ``torch._dynamo.reset()``."""
    session.reset()
    in_flight.forget()
    forget_lowered()


fxremat.reset = _reset  # type: ignore[attr-defined]

"""Building the report of a graph: what was decided, in bytes, seconds and source lines."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from torch import fx

from fxremat.compile.draft import Draft
from fxremat.compile.request import Request
from fxremat.compile.run_figures import run_events_of, version_of
from fxremat.compile.search.search import SearchResult
from fxremat.core.layout import OwnPools
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.schedule import store_all
from fxremat.core.timeline import Timeline, lifetimes_of, replay
from fxremat.errors import InfeasibleBudget
from fxremat.passes.halves import RECOMPUTED, original
from fxremat.passes.joint_graph import is_tensor, root
from fxremat.passes.memory_estimation import TANGENTS, nbytes
from fxremat.passes.offload import arrived_value
from fxremat.passes.variants.insertion import InsertedVariant
from fxremat.passes.variants.table import RULES
from fxremat.report.report import (
    MOST_ROWS,
    MUCH,
    MemoryFigures,
    Provenance,
    Report,
    Row,
    SourceLocation,
    StepMemory,
    ValueTables,
    describe,
    location_of,
)


def refusal_of(found: SearchResult, request: Request) -> InfeasibleBudget | None:
    """The error that names the least peak; None where the budget is met."""
    limit, step = request.budget.limit, request.budget.optimizer_step
    if limit is None or not (found.over or step > limit):
        return None
    largest = tuple((row.what, row.bytes) for row in at_peak(found)[:8])
    least = found.evaluation.peak_bytes + request.budget.beside
    if step > least:
        largest = (("weights, gradients and states when the optimizer steps", step),)
        return InfeasibleBudget(limit, step, largest)
    unused = found.evaluation.fragmentation_bytes
    return InfeasibleBudget(limit, least, largest, unused, large_output(found))


def large_output(found: SearchResult) -> tuple[str, int] | None:
    """The output that takes much of the peak, with its gradient if there is one: what, and bytes.

    None where no output and its gradient are `MUCH` of what is live at the peak.
    """
    joint = found.evaluation.draft.joint
    live, outputs = dict(_live_at_peak(found)), map(root, joint.forward_outputs)
    made = [node for node in outputs if node.op != "placeholder" and is_tensor(node)]
    taken = sum(live.get(node.name, 0) for node in {*joint.tangents, *made})
    if not made or not taken or taken < MUCH * sum(live.values()):
        return None
    return describe(max(made, key=_bytes)), taken


def at_peak(found: SearchResult) -> list[Row]:
    """The largest values live at the peak."""
    nodes = _nodes(found)
    rows = [
        Row(describe(nodes[name]) if name in nodes else f"{name} [Inductor's temporary]", size)
        for name, size in _live_at_peak(found)
        if size
    ]
    return sorted(rows, key=lambda row: -row.bytes)


def _live_at_peak(found: SearchResult) -> tuple[tuple[str, int], ...]:
    """Names of the values live at the peak, with their bytes."""
    evaluation = found.evaluation
    if evaluation.dry_run is not None:
        return evaluation.dry_run.at_peak
    timeline = replay(evaluation.draft.estimate.problem, evaluation.plan.steps)
    sizes = timeline.problem.bytes_of
    return tuple((name, sizes[name]) for name in timeline.live_at_peak())


def report_of(
    found: SearchResult, request: Request, graph: int, seconds: dict[str, float]
) -> Report:
    evaluation, draft = found.evaluation, found.evaluation.draft
    problem, plain = draft.estimate.problem, found.plain.estimate.problem
    plan, base = by_the_bytes_of(problem, evaluation.plan), plain.base_time_us
    plain_line = replay(plain, store_all(plain))
    return Report(
        graph=graph,
        time_overhead=plan.time_us / base - 1 if base else 0.0,
        memory=_memory(found, request, plan, plain_line),
        values=ValueTables(
            _saved(draft),
            _recomputed(found),
            _moved(found),
            tuple(map(_variant, draft.taken)),
            tuple(at_peak(found)[:MOST_ROWS]),
        ),
        provenance=Provenance(
            nodes=len(draft.joint.module.graph.nodes),
            dry_runs=found.evaluated if evaluation.dry_run is not None else 0,
            order=evaluation.candidate.order,
            seconds=seconds,
        ),
        plan=plan,
        problem=problem,
        step=_step_memory(found, plain_line),
        as_part=version_of(draft, plan, evaluation.dry_run, request),
        events=run_events_of(draft, evaluation.dry_run, request),
    )


def _memory(
    found: SearchResult, request: Request, plan: Plan, plain_line: Timeline
) -> MemoryFigures:
    evaluation, held = found.evaluation, request.budget.held
    problem, reserved = evaluation.draft.estimate.problem, evaluation.reserved
    return MemoryFigures(
        budget_bytes=request.budget.limit,
        resident_bytes=problem.resident_bytes,
        held_bytes=held,
        store_all_peak_bytes=plain_line.peak_bytes + held,
        planned_peak_bytes=plan.peak_bytes + held,
        predicted_peak_bytes=evaluation.allocated + held,
        minimum_peak_bytes=evaluation.peak_bytes + request.budget.beside if found.over else None,
        predicted_reserved_bytes=None if reserved is None else reserved.nbytes,
        own=OwnPools() if reserved is None else reserved.own,
        tuning_bytes=request.budget.autotune,
        host_peak_bytes=replay(problem, plan.steps).host_peak_bytes,
        count="allocated" if request.budget.counted_allocator is None else "reserved",
    )


def by_the_bytes_of(problem: Problem, plan: Plan) -> Plan:
    """The plan with the peak that it has in this problem.

    It may have been made for a problem with more bytes, which a dry run of another plan had shown.
    A bound that was proven there does not hold here.
    """
    peak_bytes = replay(problem, plan.steps).peak_bytes
    if peak_bytes == plan.peak_bytes:
        return plan
    return replace(plan, peak_bytes=peak_bytes, peak_bound_bytes=None)


def _saved(draft: Draft) -> tuple[Row, ...]:
    sizes = draft.problem.bytes_of
    return tuple(
        Row(describe(node), sizes.get(node.name, 0)) for node in draft.saved if is_tensor(node)
    )


def _recomputed(found: SearchResult) -> tuple[Row, ...]:
    estimate, rows = found.evaluation.draft.estimate, []
    for name, times in found.evaluation.plan.repeats().items():
        op, last = estimate.problem.op_of[name], estimate.slices[name].nodes[-1]
        written = sum(estimate.problem.bytes_of[value] for value in op.writes)
        rows.append(Row(describe(last), written, times, op.time_us))
    return tuple(rows)


def _moved(found: SearchResult) -> tuple[Row, ...]:
    estimate = found.evaluation.draft.estimate
    moves = [one.value for one in found.evaluation.plan.moves if one.kind == "to device"]
    return tuple(
        Row(describe(estimate.node_of[name]), estimate.problem.bytes_of[name], times)
        for name, times in Counter(moves).items()
    )


def _variant(taken: InsertedVariant) -> Row:
    """A variant that was taken: its rule, where it is, and the bytes that it stands in for."""
    old = [node for node in taken.stand_ins if is_tensor(node)]
    where = describe(old[0]) if old else taken.name
    lossy = " (inexact)" if any(r.lossy for r in RULES if r.name == taken.rule) else ""
    return Row(f"{taken.name}{lossy}: {where}", sum(map(_bytes, old)), 1)


def _bytes(node: fx.Node) -> int:
    return nbytes(node.meta["val"])


def _step_memory(found: SearchResult, plain_line: Timeline) -> StepMemory:
    """The step as it will run: the kernels of the dry run, else the steps of the plan."""
    shown = found.evaluation.dry_run
    if shown is not None:
        live, lifetimes = shown.live_bytes, shown.lifetimes
        computed, forward_steps = shown.computed, shown.forward_steps
    else:
        timeline = replay(found.evaluation.draft.problem, found.evaluation.plan.steps)
        live, lifetimes = timeline.live_bytes, lifetimes_of(timeline)
        computed, forward_steps = tuple(map(str, timeline.steps)), _forward_steps(timeline)
    nodes, sizes = _nodes(found), found.evaluation.draft.problem.bytes_of
    named = nodes.keys() & {*computed, *(one.value for one in lifetimes), *sizes}
    locations = {name: _location(nodes[name]) for name in sorted(named)}
    plain = plain_line.live_bytes, _forward_steps(plain_line)
    return StepMemory(live, lifetimes, computed, forward_steps, locations, *plain)


def _forward_steps(line: Timeline) -> int:
    """How many steps come before the gradients do; all, where none come."""
    return line.steps.index(TANGENTS) if TANGENTS in line.steps else len(line.steps)


def _nodes(found: SearchResult) -> dict[str, fx.Node]:
    """All nodes that a dry run or a problem can name."""
    draft = found.evaluation.draft
    planned = () if draft.rewritten is None else (draft.rewritten.module,)
    modules = (*draft.halves, *planned)
    nodes = {node.name: node for module in modules for node in module.graph.nodes}
    return nodes | draft.estimate.node_of


def _location(node: fx.Node) -> SourceLocation:
    """Where a node comes from, and which value it is a copy of."""
    arrived = arrived_value(node.name)
    if arrived is not None:
        return replace(location_of(node), value=arrived, copy="moved")
    again = "again" if RECOMPUTED in node.name else ""
    return replace(location_of(node), value=original(node.name), copy=again)

"""The report of a graph: what was decided, in bytes and seconds, and where in the source."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from torch import fx

from fxremat.compile.draft import Draft
from fxremat.compile.request import Request
from fxremat.compile.run_figures import run_events_of, version_of
from fxremat.compile.search.search import Found
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.schedule import keep_all
from fxremat.core.timeline import Lifetime, lifetimes_of, replay
from fxremat.errors import InfeasibleBudget
from fxremat.passes.halves import RECOMPUTED, original
from fxremat.passes.joint_graph import is_tensor, root
from fxremat.passes.memory_estimation import TANGENTS, nbytes
from fxremat.passes.offload import arrived_value
from fxremat.passes.variants.insertion import InsertedVariant
from fxremat.passes.variants.table import RULES
from fxremat.report.report import Report, Row
from fxremat.report.source_location import Place, describe, place_of

MOST_ROWS = 20
MUCH = 1 / 4
"""Of what is live at the peak, an output and its gradient are worth a word."""


def refusal_of(found: Found, request: Request) -> InfeasibleBudget | None:
    """The error that names the least peak; None where the budget is met."""
    if not found.over or request.budget.limit is None:
        return None
    largest = tuple((row.what, row.bytes) for row in at_peak(found)[:8])
    least = found.judged.peak_bytes + request.budget.beside
    unused = found.judged.fragmentation_bytes
    return InfeasibleBudget(request.budget.limit, least, largest, unused, large_output(found))


def large_output(found: Found) -> tuple[str, int] | None:
    """The output that takes much of the peak with its gradient: what, and bytes of both.

    None where no output and its gradient are `MUCH` of what is live at the peak.
    """
    joint = found.judged.draft.joint
    live = dict(_live_at_peak(found))
    incoming = [node for node in joint.tangents if node.name in live]
    outputs = [node for node in map(root, joint.forward_outputs) if node.name in live]
    outputs = [node for node in outputs if node.op != "placeholder" and is_tensor(node)]
    taken = sum(live[node.name] for node in {*incoming, *outputs})
    if not taken or taken < MUCH * sum(live.values()):
        return None
    given = [node for node in joint.forward_outputs if is_tensor(node)]
    largest = max((node for node in given if node.op != "placeholder"), key=_bytes, default=None)
    return None if largest is None else (describe(largest), taken)


def at_peak(found: Found) -> list[Row]:
    """The largest values live at the peak."""
    nodes = _nodes(found)
    rows = [
        Row(describe(nodes[name]) if name in nodes else f"{name} [Inductor's temporary]", size)
        for name, size in _live_at_peak(found)
        if size
    ]
    return sorted(rows, key=lambda row: -row.bytes)


def _live_at_peak(found: Found) -> tuple[tuple[str, int], ...]:
    """By name, and bytes."""
    judged = found.judged
    if judged.rehearsal is not None:
        return judged.rehearsal.at_peak
    timeline = replay(judged.draft.estimate.problem, judged.plan.steps)
    sizes = timeline.problem.bytes_of
    return tuple((name, sizes[name]) for name in timeline.live_at(timeline.peak_step))


def report_of(found: Found, request: Request, graph: int, seconds: dict[str, float]) -> Report:
    """What was decided for one graph."""
    judged, draft = found.judged, found.judged.draft
    plan = by_the_bytes_of(draft.estimate.problem, judged.plan)
    problem, plain = draft.estimate.problem, found.plain.estimate.problem
    held, base, taken = request.budget.held, plain.base_time_us, judged.reserved
    plain_timeline, course = replay(plain, keep_all(plain)), _course(found)
    return Report(
        graph=graph,
        nodes=len(draft.joint.module.graph.nodes),
        budget_bytes=request.budget.limit,
        resident_bytes=problem.resident_bytes,
        keep_all_peak_bytes=plain_timeline.peak_bytes + held,
        planned_peak_bytes=plan.peak_bytes + held,
        predicted_peak_bytes=judged.allocated_bytes + held,
        minimum_peak_bytes=judged.peak_bytes + request.budget.beside if found.over else None,
        held_bytes=held,
        tuning_bytes=request.budget.autotune,
        time_overhead=plan.time_us / base - 1 if base else 0.0,
        saved=_saved(draft),
        recomputed=_recomputed(found),
        moved=_moved(found),
        variants=tuple(map(_variant, draft.taken)),
        host_peak_bytes=replay(problem, plan.steps).host_peak_bytes,
        at_peak=tuple(at_peak(found)[:MOST_ROWS]),
        timeline=course.live_bytes,
        lifetimes=course.lifetimes,
        making=course.making,
        forward_steps=course.forward_steps,
        places=_places(found, course),
        keep_all_timeline=plain_timeline.live_bytes,
        keep_all_forward_steps=_forward_steps(tuple(map(str, plain_timeline.steps))),
        predicted_reserved_bytes=None if taken is None else taken.usage.peak_reserved_bytes,
        segment_bytes=0 if taken is None else taken.segment_bytes,
        count=request.budget.metric,
        order=judged.candidate.order,
        plan=plan,
        rehearsals=found.judged_candidates if judged.rehearsal is not None else 0,
        seconds=seconds,
        problem=problem,
        as_unit=version_of(draft, plan, judged.rehearsal, request),
        events=run_events_of(draft, judged.rehearsal, request.inputs.parameters),
    )


def by_the_bytes_of(problem: Problem, plan: Plan) -> Plan:
    """The plan with the peak that it has in this problem.

    It may have been made by more bytes, which a rehearsal of another plan had shown. What is proven
    by these bounds no peak here.
    """
    peak_bytes = replay(problem, plan.steps).peak_bytes
    if peak_bytes == plan.peak_bytes:
        return plan
    return replace(plan, peak_bytes=peak_bytes, peak_bound_bytes=None)


def _saved(draft: Draft) -> tuple[Row, ...]:
    sizes = draft.estimate.problem.bytes_of
    kept = [node for node in draft.saved if is_tensor(node)]
    return tuple(Row(describe(node), sizes.get(node.name, 0)) for node in kept)


def _recomputed(found: Found) -> tuple[Row, ...]:
    estimate, rows = found.judged.draft.estimate, []
    for name, times in found.judged.plan.repeats().items():
        op, last = estimate.problem.op_of[name], estimate.slices[name].nodes[-1]
        written = sum(estimate.problem.bytes_of[value] for value in op.writes)
        rows.append(Row(describe(last), written, times, op.time_us))
    return tuple(rows)


def _moved(found: Found) -> tuple[Row, ...]:
    estimate = found.judged.draft.estimate
    moves = [one.value for one in found.judged.plan.moves if one.kind == "to device"]
    return tuple(
        Row(describe(estimate.node_of[name]), estimate.problem.bytes_of[name], times)
        for name, times in Counter(moves).items()
    )


def _variant(taken: InsertedVariant) -> Row:
    """Its rule, where it is, and the bytes that it stands in for."""
    old = [node for node in taken.stand_ins if is_tensor(node)]
    where = describe(old[0]) if old else taken.name
    lossy = " (inexact)" if any(r.lossy for r in RULES if r.name == taken.rule) else ""
    what = f"{taken.name}{lossy}: {where}"
    return Row(what, sum(_bytes(node) for node in old), 1)


def _bytes(node: fx.Node) -> int:
    return nbytes(node.meta["val"])


@dataclass(frozen=True)
class _Course:
    """The step as it will run: the kernels that were rehearsed, else the steps of the plan."""

    live_bytes: tuple[int, ...]
    lifetimes: tuple[Lifetime, ...]
    making: tuple[str, ...]
    forward_steps: int


def _course(found: Found) -> _Course:
    judged = found.judged
    shown = judged.rehearsal
    if shown is not None:
        return _Course(shown.live_bytes, shown.lifetimes, shown.making, shown.forward_moments)
    problem, steps = judged.draft.estimate.problem, judged.plan.steps
    timeline = replay(problem, steps)
    making = tuple(map(str, steps))
    return _Course(timeline.live_bytes, lifetimes_of(timeline), making, _forward_steps(making))


def _forward_steps(making: tuple[str, ...]) -> int:
    """How many steps come before the gradients do; all, where none come."""
    return making.index(TANGENTS) if TANGENTS in making else len(making)


def _nodes(found: Found) -> dict[str, fx.Node]:
    """All that a rehearsal or a problem can name."""
    draft = found.judged.draft
    modules = [*draft.newest()]
    if draft.rewritten is not None:
        modules.append(draft.rewritten.module)
    nodes = {node.name: node for module in modules for node in module.graph.nodes}
    return nodes | draft.estimate.node_of


def _places(found: Found, course: _Course) -> dict[str, Place]:
    """Of what the step computes and holds, and of the values of the problem."""
    nodes = _nodes(found)
    problem = found.judged.draft.estimate.problem
    names = {*course.making, *(one.value for one in course.lifetimes), *problem.bytes_of}
    return {name: _place(nodes[name]) for name in sorted(names) if name in nodes}


def _place(node: fx.Node) -> Place:
    """Where it comes from, and whose copy it is."""
    arrived = arrived_value(node.name)
    if arrived is not None:
        return replace(place_of(node), value=arrived, copy="moved")
    again = "again" if RECOMPUTED in node.name else ""
    return replace(place_of(node), value=original(node.name), copy=again)

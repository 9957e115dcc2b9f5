"""The passes in order, and the runner: joint graph in; forward, backward and report out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from fxremat import compat
from fxremat.compiling.choosing import fit_in_forms
from fxremat.compiling.fitting import QUICK_SOLVER, Run, Split
from fxremat.compiling.request import Clock, Costs, Request, device_of, op_timer, prepare
from fxremat.core.schedule import keep_all
from fxremat.core.timeline import replay
from fxremat.cost.workspaces import Workspaces
from fxremat.errors import InfeasibleBudget
from fxremat.passes.accumulation import accumulate
from fxremat.passes.joint_graph import is_tensor
from fxremat.passes.variants.chunks.inductor_kernels import compile_rows
from fxremat.report.report import Report, Row
from fxremat.report.where import describe


@dataclass(frozen=True)
class Outcome:
    """The modules to compile, and the report. With a ``refusal`` they are over the budget."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    report: Report
    refusal: InfeasibleBudget | None = None


def transform(
    module: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    static_input_indices: Sequence[int],
    request: Request,
    graph: int,
    trace_seconds: float,
) -> Outcome:
    """Plan the joint graph for the request and split it.

    ``trace_seconds`` is what making the joint graph took, for the report.

    Where not even the plan of least peak fits the budget, the outcome is that plan, refused.
    Raises `VerificationFailed` where a check on our own work fails.
    """
    clock = Clock({"trace": trace_seconds})
    if request.budget_bytes is not None:
        compat.plan_for_sizes_seen(module.graph)
    with clock.stage("estimate"):
        sums = request.executor == "inductor" and "sums" not in request.disabled
        joint = prepare(module, num_fwd_outputs, fused=sums)
        joint = accumulate(joint, request.accumulated, static_input_indices)
        device = device_of(module.graph)
        timer, workspaces = op_timer(request, device), Workspaces(device)
        costs = Costs(request, device, timer, workspaces, f"graph {graph}")
        found = costs.estimate(joint)
    static = [joint.primals[i] for i in static_input_indices if i < len(joint.primals)]
    fitted = fit_in_forms(Run(request, joint, found, static, costs, clock))
    run, split = fitted.run, fitted.split
    refusal = None
    if fitted.over:
        assert request.budget_bytes is not None
        refusal = InfeasibleBudget(
            request.budget_bytes,
            split.peak_bytes + request.held_bytes,
            tuple((row.what, row.bytes) for row in _at_peak(run, split)[:8]),
        )
    elif request.executor == "inductor":
        with clock.stage("kernels"):
            compile_rows(split.forward)
            compile_rows(split.backward)
    report = _report(run, split, fitted.rehearsals, graph)
    return Outcome(split.forward, split.backward, report, refusal)


def _live_bytes(run: Run, split: Split) -> tuple[int, ...]:
    if split.rehearsal is not None:
        return split.rehearsal.live_bytes
    return replay(run.found.problem, split.plan.steps).live_bytes


def _at_peak(run: Run, split: Split) -> list[Row]:
    """The largest values live at the peak, named by module and source line."""
    nodes = {n.name: n for n in split.rewritten.module.graph.nodes}
    nodes |= run.found.node_of
    if split.rehearsal is not None:
        live = split.rehearsal.at_peak
    else:
        timeline = replay(run.found.problem, split.plan.steps)
        sizes = timeline.problem.bytes_of
        live = tuple((name, sizes[name]) for name in timeline.live_at(timeline.peak_step))
    rows = [
        Row(describe(nodes[name]) if name in nodes else f"{name} [Inductor's temporary]", size)
        for name, size in live
        if size
    ]
    return sorted(rows, key=lambda row: -row.bytes)


def _report(run: Run, split: Split, rehearsals: int, graph: int) -> Report:
    problem, plan = run.found.problem, split.plan
    plain = run.plain or problem
    full = replay(plain, keep_all(plain))
    least = run.answer(0, QUICK_SOLVER)
    sizes = problem.bytes_of
    saved = [
        Row(describe(node), sizes.get(node.name, 0))
        for node in split.rewritten.saved
        if node.op != "placeholder" and is_tensor(node)
    ]
    recomputed = [
        Row(
            describe(run.found.cones[name].nodes[-1]),
            sum(sizes[w] for w in problem.op_of[name].writes),
            times,
            problem.op_of[name].time_us,
        )
        for name, times in plan.repeats().items()
    ]
    fetches = Counter(move.value for move in plan.moves if move.kind == "to device")
    moved = [
        Row(describe(run.found.node_of[name]), sizes[name], times)
        for name, times in fetches.items()
    ]
    held = run.request.held_bytes
    return Report(
        graph=graph,
        nodes=len(run.joint.module.graph.nodes),
        budget_bytes=run.request.budget_bytes,
        resident_bytes=problem.resident_bytes,
        keep_all_peak_bytes=full.peak_bytes + held,
        planned_peak_bytes=plan.peak_bytes + held,
        predicted_peak_bytes=split.peak_bytes + held,
        minimum_peak_bytes=least.peak_bytes + held,
        held_bytes=held,
        time_overhead=plan.time_us / plain.base_time_us - 1 if plain.base_time_us else 0.0,
        saved=tuple(saved),
        recomputed=tuple(recomputed),
        moved=tuple(moved),
        variants=run.variants,
        host_peak_bytes=replay(problem, plan.steps).host_peak_bytes,
        at_peak=tuple(_at_peak(run, split)[:20]),
        timeline=_live_bytes(run, split),
        plan=plan,
        rehearsals=rehearsals,
        seconds=run.clock.seconds,
        problem=problem,
    )

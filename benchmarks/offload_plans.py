"""Plans for steps that do not fit their device: recompute, move to host memory, or both.

Four strategies answer each case with the same solver, and the independent checker judges each
answer: keep everything, recompute only (nothing may move), offload only (no op may run again), and
both. Where recomputation cannot meet the budget with the weights on the device, all weights live
in host memory, for each strategy alike: they come for the ops that read them, their gradients
leave, and "recompute" then means that no activation moves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.schedule import ops_of, store_all
from fxremat.core.timeline import Timeline, replay
from fxremat.planner import SolverOptions, solve
from fxremat.planner.local import greedy
from fxremat.planner.moves import offload
from fxremat.planner.moves.host_weights import on_host, select
from fxremat.planner.plans import make_plan

from . import planner
from .offload_problems import GB, Architecture, Device, Traced, batch_for, trace
from .offload_table import CLAIM_LINK, HALF, HEADING, SAME, Case, Row, Status, line

ALL = "device"
"""The budget that is the device's memory; `HALF` is half of what store-all needs."""
BUDGETS = (ALL, HALF)
OPTIONS = SolverOptions()


@dataclass(frozen=True)
class Question:
    """A case, its problem with moves, the one without, and what it was made of."""

    case: Case
    problem: Problem
    still: Problem
    traced: Traced


Answer = Callable[[Question, str], Plan]


def _keep(question: Question, solver: str) -> Plan:
    return make_plan(question.problem, store_all(question.problem), "store-all")


def _recompute(question: Question, solver: str) -> Plan:
    """The problem is a new one to solvers that remember, so that it takes its time."""
    return solve(replace(question.still), question.case.budget_bytes, solver, OPTIONS)


def _offload(question: Question, solver: str) -> Plan:
    """Ops that may not run again leave nothing but moves."""
    ops = tuple(replace(op, repeatable=False) for op in question.problem.ops)
    once = replace(question.problem, ops=ops)
    return solve(once, question.case.budget_bytes, solver, OPTIONS)


def _both(question: Question, solver: str) -> Plan:
    return solve(question.problem, question.case.budget_bytes, solver, OPTIONS)


STRATEGIES: dict[str, Answer] = {
    "keep": _keep,
    "recompute": _recompute,
    "offload": _offload,
    "both": _both,
}


# -- the cases -------------------------------------------------------------------------------


def settings(
    device: Device, links: Sequence[int] | None, budgets: Sequence[str]
) -> list[tuple[int, str]]:
    """Links and budgets of a device; without links, its own one, for half that of the claims."""
    if links is not None:
        return [(link, budget) for link in links for budget in budgets]
    own = round(device.spec.host_bytes_per_s)
    return [(CLAIM_LINK if budget == HALF else own, budget) for budget in budgets]


def questions(
    architecture: Architecture,
    devices: Iterable[Device],
    layers: int | None,
    links: Sequence[int] | None,
    budgets: Sequence[str],
) -> Iterator[Question]:
    """All cases of a network, each traced when its turn comes.

    Without links, half of store-all is asked for the claims, so only with weights on the device.
    """
    depth = layers or architecture.layers
    sample: int | None = None
    for device in devices:
        if sample is None:
            sample = trace(architecture, depth, 1, device.spec).activation_bytes
        batch = batch_for(sample, device.nbytes)
        traced = trace(architecture, depth, batch, device.spec)
        for link, budget in settings(device, links, budgets):
            question = pose(traced, device, link, budget, depth, batch)
            if links is not None or budget == ALL or not question.case.weights_on_host:
                yield question


def pose(
    traced: Traced, device: Device, link: int, budget: str, layers: int, batch: int
) -> Question:
    """The question of a case, with its weights where it needs them."""
    nbytes = device.nbytes if budget == ALL else traced.store_all_bytes // 2
    away = greedy.solve(traced.problem, nbytes, OPTIONS).peak_bytes > nbytes
    case = Case(
        model=traced.problem.name,
        layers=layers,
        batch=batch,
        device=device.name,
        link=link,
        budget=budget,
        budget_bytes=nbytes,
        store_all_bytes=traced.store_all_bytes,
        parameter_bytes=traced.parameter_bytes,
        compute_us=traced.problem.base_time_us,
        weights_on_host=away,
    )
    if not away:
        return Question(case, traced.with_link(link), traced.problem, traced)
    problem = traced.with_weights_on_host(link)
    assert problem.copies is not None
    still = replace(problem, copies=replace(problem.copies, only_host=True))
    return Question(case, problem, still, traced)


# -- one strategy on one case ----------------------------------------------------------------


def answered(question: Question, strategy: str, solver: str) -> Row:
    """The row of a strategy."""
    started = time.perf_counter()
    plan = STRATEGIES[strategy](question, solver)
    return judged(question.case, question.problem, strategy, plan, time.perf_counter() - started)


def selected(question: Question) -> Row:
    """Both, with as few weights in host memory as pays, of the greedy solver's quick plans."""
    started = time.perf_counter()
    case, weights = question.case, question.traced.gradient_of
    whole = question.traced.with_link(case.link)
    answer = select(
        whole,
        weights,
        case.budget_bytes,
        lambda its: offload.quick(its, case.budget_bytes, OPTIONS),
    )
    chosen = on_host(whole, {name: weights[name] for name in answer.weights})
    seconds = time.perf_counter() - started
    row = judged(case, chosen, "select", answer.plan, seconds)
    return replace(row, weights_moved=len(answer.weights))


def judged(case: Case, problem: Problem, strategy: str, plan: Plan, seconds: float) -> Row:
    """The row of a plan, whose figures are those of the checker and of a replay."""
    fits = plan.peak_bytes <= case.budget_bytes
    failure = failure_of(problem, plan, case.budget_bytes if fits else None)
    status: Status = "FAILED" if failure else "ok" if fits else "over"
    shown = replay(problem, plan.steps)
    busy = {kind: _engine_us(shown, kind) for kind in ("to host", "to device")}
    moved = {kind: _moved_bytes(shown, kind) for kind in busy}
    base = case.compute_us
    return Row(
        case=case,
        strategy=strategy,
        status=status,
        seconds=seconds,
        solver=plan.solver,
        peak_bytes=plan.peak_bytes,
        time_us=plan.time_us,
        bound_us=base if plan.time_bound_us is None else plan.time_bound_us,
        transfers_us=max(busy.values()),
        moving_us=sum(busy.values()),
        stall_us=shown.timing.stall_us,
        again_us=sum(problem.op_of[name].time_us for name in ops_of(plan.steps)) - base,
        out_bytes=moved["to host"],
        back_bytes=moved["to device"],
        host_peak_bytes=shown.host_peak_bytes,
        reason=failure,
    )


def _engine_us(line: Timeline, kind: str) -> float:
    return sum(its.end_us - its.start_us for its in line.timing.transfers if its.kind == kind)


def _moved_bytes(line: Timeline, kind: str) -> int:
    sizes = line.problem.bytes_of
    return sum(sizes[its.value] for its in line.timing.transfers if its.kind == kind)


def failure_of(problem: Problem, plan: Plan, budget_bytes: int | None) -> str:
    """What the checker has against the plan and its figures; nothing where all is well."""
    failure = planner.failure_of(problem, plan, budget_bytes)
    if failure:
        return failure
    if plan.time_bound_us is not None and plan.time_us < plan.time_bound_us * (1 - SAME):
        return f"its time is below its bound, {plan.time_bound_us} us"
    return ""


def run(question: Question, solver: str, choose: bool) -> list[Row]:
    """Print the rows of a case as they come."""
    print(f"{question.case}\n{HEADING}", flush=True)
    rows = []
    for strategy in STRATEGIES:
        rows.append(answered(question, strategy, solver))
        print(line(rows[-1]), flush=True)
    if choose and question.case.weights_on_host:
        rows.append(selected(question))
        print(line(rows[-1]), flush=True)
    return rows


def link_of(text: str) -> int:
    """Bytes per second of a link given in GB/s."""
    return round(float(text) * GB)

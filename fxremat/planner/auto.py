"""The default: the solver over instants, then what fits a problem that it leaves a gap on.

Each solver starts from the best plan so far, and what one proves holds for the others' plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner import checkmate, hrockmate, instants
from fxremat.planner.clock import Clock
from fxremat.planner.model import build_model
from fxremat.planner.options import SolverOptions
from fxremat.planner.reruns import all_runs

CLOSE = 1e-3
"""Of the time of keep-all: a plan so near to its bound is not worked on any more."""
FEW_RUNS = 8_000
"""Repeats to choose from in a problem that the full programme of Checkmate mostly solves."""
SECONDS, SECONDS_PER_OP, MOST_SECONDS = 5.0, 0.01, 20.0
"""Time limit where the caller gives none: small against the time to compile such a graph."""
FIRST_PART = 0.5
"""Of the time, for the solver over instants."""


def solve(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """The plan of least time within the budget, or of least peak where none fits."""
    limit = options.time_limit_s
    if limit is None:
        limit = min(MOST_SECONDS, SECONDS + SECONDS_PER_OP * len(problem.ops))
    clock = Clock(limit)
    best = instants.solve(problem, budget_bytes, replace(options, time_limit_s=FIRST_PART * limit))
    if budget_bytes is None:
        return best
    for solver in _others(problem):
        if _settled(best, problem) or not clock.running():
            break
        rest = replace(options, start=best.steps, time_limit_s=clock.left())
        best = _better(best, solver(problem, budget_bytes, rest))
    return replace(best, seconds=clock.seconds())


def _others(problem: Problem) -> list[Callable[[Problem, int | None, SolverOptions], Plan]]:
    small = sum(map(len, all_runs(build_model(problem)))) <= FEW_RUNS
    return [checkmate.solve, hrockmate.solve] if small else [hrockmate.solve]


def _settled(plan: Plan, problem: Problem) -> bool:
    """Whether the plan is as good as proven, or proven not to exist."""
    assert plan.budget_bytes is not None
    if plan.peak_bytes > plan.budget_bytes:
        return plan.peak_bound_bytes is not None and plan.peak_bound_bytes > plan.budget_bytes
    bound = plan.time_bound_us or problem.base_time_us
    return plan.time_us - bound <= CLOSE * problem.base_time_us


def _better(one: Plan, other: Plan) -> Plan:
    """The better plan, with what both prove."""
    assert one.budget_bytes is not None
    budget = one.budget_bytes
    best = min(one, other, key=lambda plan: (max(plan.peak_bytes, budget), plan.time_us))
    times = [plan.time_bound_us for plan in (one, other) if plan.time_bound_us is not None]
    peaks = [plan.peak_bound_bytes for plan in (one, other) if plan.peak_bound_bytes is not None]
    return replace(
        best,
        time_bound_us=max(times, default=None),
        peak_bound_bytes=max(peaks, default=None),
    )

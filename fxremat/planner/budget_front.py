"""The front of peak against time: what every budget would cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.local import greedy
from fxremat.planner.milp import moments
from fxremat.planner.moves import offload
from fxremat.planner.options import SolverOptions
from fxremat.planner.plans import limit_s


def front(problem: Problem, options: SolverOptions | None = None) -> tuple[Plan, ...]:
    """Non-dominated plans: peak strictly decreasing, time strictly increasing."""
    options = options or SolverOptions()
    if problem.copies is not None:
        return tuple(_best(_with_moves(problem, options), problem.base_time_us))
    known, plans = greedy.whole_front(problem, options), [*greedy.front(problem, options)]
    slow = [plan for plan in plans if plan.time_us > problem.base_time_us]
    count = min(constants.FRONT_POINTS, len(slow))
    picks = [slow[round(k * (len(slow) - 1) / max(1, count - 1))] for k in range(count)]
    deadline = Deadline(limit_s(problem, options))
    for k, pick in enumerate(picks):
        if not deadline.running():
            break
        part = Deadline(deadline.left() / (count - k))
        plans.append(moments.improved(known, pick.peak_bytes, options, part))
    return tuple(_best(plans, problem.base_time_us))


def _with_moves(problem: Problem, options: SolverOptions) -> Iterator[Plan]:
    """Plans between the fastest and that of least peak, evenly spread, while there is time."""
    deadline = Deadline(limit_s(problem, options))
    fastest, least = (offload.quick(problem, budget, options) for budget in (None, 0))
    yield fastest
    yield least
    span = fastest.peak_bytes - least.peak_bytes
    for k in range(1, constants.FRONT_POINTS // 2):
        if deadline.running():
            budget = least.peak_bytes + span * k // (constants.FRONT_POINTS // 2)
            yield offload.quick(problem, budget, options)


def _best(plans: Iterable[Plan], base_us: float) -> list[Plan]:
    """The plans that none beats. Bounds that hold within one budget are left out."""
    out: list[Plan] = []
    for plan in sorted(plans, key=lambda each: (each.time_us, each.peak_bytes)):
        if not out or plan.peak_bytes < out[-1].peak_bytes:
            out.append(replace(plan, budget_bytes=None, time_bound_us=base_us))
    return out

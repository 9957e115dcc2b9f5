"""Decide: problem and budget in, plan out. Torch-free.

Every solver has the one signature ``solve(problem, budget_bytes, options) -> Plan``. First runs
stay in base order, and ops that are not repeatable run once. ``Plan.peak_bytes`` and ``time_us``
come from a replay. Where nothing found fits the budget, the plan of least peak is returned: the
caller compares ``plan.peak_bytes`` with its budget.
"""

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
from fxremat.planner.plans import limit_s, not_beaten
from fxremat.planner.solvers import MOVING, SOLVERS, ProblemRefused, Solver, SolverOptions, named
from fxremat.planner.variants import choose_and_plan


def solve(
    problem: Problem,
    budget_bytes: int | None,
    solver: str = "auto",
    options: SolverOptions | None = None,
) -> Plan:
    """The plan of the named solver, with moves where values may move.

    Where the problem has variants, it is the plan of the best choice of them that was found.

    Raises `ProblemRefused` where the solver cannot take the problem.
    """
    options = options or SolverOptions()
    run = named(solver)
    if problem.variants:
        return choose_and_plan.solve(
            problem,
            budget_bytes,
            options,
            lambda left: solve(left, budget_bytes, solver, options),
            is_quick=solver == greedy.QUICK_NAME and problem.copies is None,
        )
    if problem.copies is not None and solver not in MOVING:
        return offload.solve(problem, budget_bytes, options, run)
    plan, base = run(problem, budget_bytes, options), problem.base_time_us
    if plan.peak_bound_bytes is None:
        plan = replace(plan, peak_bound_bytes=offload.least_bytes(problem))
    # Whether a bound on the time is known that is above the time of store-all, or is reached.
    proven = plan.time_us <= base or (plan.time_bound_us or base) > base
    if proven or problem.copies or budget_bytes is None or plan.peak_bytes > budget_bytes:
        return plan
    bound = moments.time_bound(problem, budget_bytes, options)
    return replace(plan, time_bound_us=min(bound, plan.time_us))


def front(problem: Problem, options: SolverOptions | None = None) -> tuple[Plan, ...]:
    """Non-dominated plans: peak strictly decreasing, time strictly increasing."""
    options = options or SolverOptions()
    if problem.copies is not None:
        return tuple(_best(_with_moves(problem, options), problem.base_time_us))
    known, plans = greedy.whole_front(problem, options), [*greedy.front(problem, options)]
    slow = [plan for plan in plans if plan.time_us > problem.base_time_us]
    deadline = Deadline(limit_s(problem, options))
    for k, pick in enumerate(slow):
        if not deadline.running():
            break
        part = Deadline(deadline.left() / (len(slow) - k))
        plans.append(moments.improved(known.front, known, pick.peak_bytes, options, part))
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
    offered = list(plans)
    best = not_beaten([(plan.time_us, plan.peak_bytes) for plan in offered])
    return [replace(offered[k], budget_bytes=None, time_bound_us=base_us) for k in best]


__all__ = ["SOLVERS", "ProblemRefused", "Solver", "SolverOptions", "front", "solve"]

"""Decide: problem and budget in, plan out. Torch-free.

Every solver has the one signature ``solve(problem, budget_bytes, options) -> Plan``. First runs
stay in base order, and ops that are not repeatable run once. ``Plan.peak_bytes`` and ``time_us``
come from a replay. Where nothing found fits the budget, the plan of least peak is returned: the
caller compares ``plan.peak_bytes`` with its budget.
"""

from __future__ import annotations

from dataclasses import replace

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner.budget_front import front
from fxremat.planner.indexed_problem import build_model
from fxremat.planner.local import greedy
from fxremat.planner.milp import moments
from fxremat.planner.moves import offload
from fxremat.planner.options import ProblemRefused, SolverOptions
from fxremat.planner.peak_bound import peak_bound
from fxremat.planner.solvers import MOVING, SOLVERS, Solver, named
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
            lambda left, near: _quick(left, budget_bytes, options, near),
            lambda left: solve(left, budget_bytes, solver, options),
        )
    if problem.copies is not None and solver not in MOVING:
        return offload.solve(problem, budget_bytes, options, run)
    plan = run(problem, budget_bytes, options)
    if problem.copies is not None:
        return plan
    if plan.peak_bound_bytes is None:
        plan = replace(plan, peak_bound_bytes=peak_bound(build_model(problem)))
    if budget_bytes is None or plan.peak_bytes > budget_bytes or _proves(plan, problem):
        return plan
    bound = moments.time_bound(problem, budget_bytes, options)
    return replace(plan, time_bound_us=min(bound, plan.time_us))


def _quick(
    problem: Problem,
    budget_bytes: int | None,
    options: SolverOptions,
    near: Plan | None,
) -> Plan:
    """A plan found with less work, to compare choices of variants by.

    ``near`` is that of an almost equal choice.
    """
    if problem.copies is not None:
        return offload.quick(problem, budget_bytes, options)
    if near is not None and budget_bytes is not None:
        return greedy.adapt(near, problem, budget_bytes, options)
    return greedy.quick(problem, budget_bytes, options)


def _proves(plan: Plan, problem: Problem) -> bool:
    """Whether a bound on the time is known that is above the time of store-all, or is reached."""
    base = problem.base_time_us
    return plan.time_us <= base or (plan.time_bound_us or base) > base


__all__ = ["SOLVERS", "ProblemRefused", "Solver", "SolverOptions", "front", "solve"]

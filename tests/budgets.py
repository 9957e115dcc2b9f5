"""Budgets between the least peak and that of store-all, and whether a plan keeps to its own."""

from __future__ import annotations

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.timeline import replay
from fxremat.planner.indexed_problem import build_model
from fxremat.planner.peak_bound import peak_bound


def budget_between(problem: Problem, percent: int) -> int:
    """A budget from the bound on the least peak (0) to the peak of store-all (100)."""
    low = peak_bound(build_model(problem))
    high = replay(problem, problem.base_steps()).peak_bytes
    return low + (high - low) * percent // 100


def fits(plan: Plan) -> bool:
    """Whether the plan keeps to its budget."""
    return plan.budget_bytes is None or plan.peak_bytes <= plan.budget_bytes

"""Budgets between the least peak and that of store-all, and plans that are verified."""

from __future__ import annotations

import pytest

from fxremat import planner
from fxremat.core.check import check
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.timeline import replay
from fxremat.planner.indexed_problem import build_model, peak_bound


def budget_between(problem: Problem, percent: int) -> int:
    """A budget from the bound on the least peak (0) to the peak of store-all (100)."""
    low = peak_bound(build_model(problem))
    high = replay(problem, problem.base_steps()).peak_bytes
    return low + (high - low) * percent // 100


def fits(plan: Plan) -> bool:
    """Whether the plan keeps to its budget."""
    return plan.budget_bytes is None or plan.peak_bytes <= plan.budget_bytes


def solved(problem: Problem, budget: int, solver: str = "greedy") -> Plan:
    """What the solver finds, verified."""
    plan = planner.solve(problem, budget, solver)
    verdict = check(problem, plan.steps, budget if plan.peak_bytes <= budget else None)
    assert verdict.ok, str(verdict)
    assert verdict.peak_bytes == plan.peak_bytes
    assert verdict.time_us == pytest.approx(plan.time_us)
    return plan

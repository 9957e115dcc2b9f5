"""The default: what several solvers find and prove, put together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.core.constants import MEASURABLE
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.timeline import replay
from fxremat.planner import SolverOptions, auto, solve
from tests.brute import least_time
from tests.chains import blocks, chains, homogeneous, skipping
from tests.examples import examples

# For what is proven: the search ends by itself, within 2 s on an idle core. A busy machine can
# reach the default limit first.
PATIENT = SolverOptions(time_limit_s=60.0)


def peak(problem: Problem) -> int:
    return replay(problem, problem.base_steps()).peak_bytes


@examples(25)
@given(chains(2, 3), st.integers(40, 100))
def test_small_problems_are_solved_and_proven(problem: Problem, percent: int) -> None:
    budget = peak(problem) * percent // 100
    plan, best = solve(problem, budget, "auto", PATIENT), least_time(problem, budget)
    if best is None:
        assert plan.peak_bytes > budget
        assert least_time(problem, plan.peak_bytes) is not None
        return
    assert plan.peak_bytes <= budget
    assert plan.time_us <= best[0] + MEASURABLE / 2 * problem.base_time_us
    assert plan.time_bound_us is not None
    assert plan.time_bound_us <= best[0] * (1 + 1e-9)


def test_the_least_peak_of_a_small_problem_is_searched_for() -> None:
    """The greedy solver gets down to 15 bytes."""
    plan = solve(homogeneous(6), 8, "auto", PATIENT)
    assert plan.peak_bytes == plan.peak_bound_bytes == 11
    assert plan.budget_bytes == 8
    assert replay(homogeneous(6), plan.steps).peak_bytes == 11


@pytest.mark.parametrize("problem", [blocks(10), skipping()])
@pytest.mark.parametrize("percent", [80, 60])
def test_never_worse_than_the_first_solver(problem: Problem, percent: int) -> None:
    budget = peak(problem) * percent // 100
    first = solve(problem, budget, "moments", PATIENT)
    best = solve(problem, budget, "auto", PATIENT)
    assert best.time_us <= first.time_us * (1 + 1e-9)
    assert (best.time_bound_us or 0) >= (first.time_bound_us or 0) * (1 - 1e-9)


def test_what_one_proves_holds_for_the_plan_of_the_other() -> None:
    fast = Plan(("a",), "fast", 10, 9, 100.0, time_bound_us=80.0, peak_bound_bytes=5)
    slow = Plan(("b",), "slow", 10, 8, 110.0, time_bound_us=95.0, peak_bound_bytes=7)
    both = auto._better(slow, fast)
    assert (both.solver, both.time_bound_us, both.peak_bound_bytes) == ("fast", 95.0, 7)
    tight = replace(fast, peak_bytes=11)
    assert auto._better(slow, tight).solver == "slow"

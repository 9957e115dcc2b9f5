"""What every solver must hold to, judged by the checker and by brute force."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.core.check import check
from fxremat.core.problem import Problem
from fxremat.core.timeline import replay
from fxremat.planner import SOLVERS, SolverOptions, solve
from fxremat.planner.published import rotor
from fxremat.planner.published.chain import NotAChain
from tests.brute import least_time
from tests.chains import growing_chain
from tests.examples import examples
from tests.strategies import problems

THERE = [name for name in SOLVERS if name != "moccasin" or find_spec("ortools")]
CHAINS_ONLY = ("pofo", "rotor", "rockmate")
OPTIMAL_ON_CHAINS = ("moments", "checkmate")
SHARE = 1e-9


def is_chain(problem: Problem) -> bool:
    try:
        rotor.solve(problem, None, SolverOptions())
    except NotAChain:
        return False
    return True


def plan_or_refusal(problem: Problem, budget: int, name: str) -> bool:
    """Judge the solver's plan; False where it says that the problem is no chain."""
    if name in CHAINS_ONLY and not is_chain(problem):
        with pytest.raises(NotAChain, match="auto"):
            solve(problem, budget, name)
        return False
    plan = solve(problem, budget, name)
    verdict = check(problem, plan.steps)
    assert verdict.ok
    assert verdict.peak_bytes == plan.peak_bytes
    assert verdict.time_us == pytest.approx(plan.time_us)
    best = least_time(problem, budget)
    if plan.peak_bytes <= budget:
        assert best is not None
        assert plan.time_us >= best[0] * (1 - SHARE)
        assert plan.time_bound_us is None or plan.time_bound_us <= best[0] * (1 + SHARE)
    if best is not None and plan.peak_bound_bytes is not None:
        assert plan.peak_bound_bytes <= budget
    return True


@pytest.mark.parametrize("name", THERE)
@examples(20)
@given(st.data())
def test_on_random_problems(name: str, data: st.DataObject) -> None:
    problem = data.draw(problems(max_ops=5))
    full = replay(problem, problem.base_steps()).peak_bytes
    plan_or_refusal(problem, data.draw(st.integers(0, full)), name)


@pytest.mark.parametrize("percent", [100, 80, 60])
@pytest.mark.parametrize("name", THERE)
def test_on_a_chain(name: str, percent: int) -> None:
    problem = growing_chain(5)
    budget = replay(problem, problem.base_steps()).peak_bytes * percent // 100
    assert plan_or_refusal(problem, budget, name)
    if name in OPTIMAL_ON_CHAINS:
        best = least_time(problem, budget)
        assert best is not None
        assert solve(problem, budget, name).time_us == pytest.approx(best[0])


@pytest.mark.parametrize("name", THERE)
def test_the_same_plan_every_time(name: str) -> None:
    problem = growing_chain(6)
    budget = replay(problem, problem.base_steps()).peak_bytes * 2 // 3
    assert solve(problem, budget, name).steps == solve(growing_chain(6), budget, name).steps


@pytest.mark.parametrize("name", THERE)
def test_without_a_budget_nothing_runs_twice(name: str) -> None:
    if name != "least_peak":
        assert solve(growing_chain(4), None, name).steps == growing_chain(4).base_steps()


@pytest.mark.parametrize("name", THERE)
def test_the_least_peak_where_nothing_fits(name: str) -> None:
    plan = solve(growing_chain(5), 1, name)
    assert plan.peak_bytes > 1
    assert plan.steps
    assert solve(growing_chain(5), 1, name, SolverOptions(time_limit_s=0.0)).steps

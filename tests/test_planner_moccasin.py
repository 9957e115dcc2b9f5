"""Retention intervals on CP-SAT against brute force; most tests need OR-Tools."""

from __future__ import annotations

import importlib.util
import sys
import time

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from fxremat.core.check import check
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.timeline import replay
from fxremat.planner.local import greedy
from fxremat.planner.plans import make_plan
from fxremat.planner.published import known_schedule, moccasin
from fxremat.planner.published.moccasin import Failed, NotInstalled, solve
from fxremat.planner.solvers import Progress, SolverOptions
from tests import brute
from tests.brute import plain
from tests.budgets import budget_between, fits
from tests.chains import unphased_chain
from tests.examples import examples
from tests.strategies import problems

needs_cp_sat = pytest.mark.skipif(
    importlib.util.find_spec("ortools") is None,
    reason="needs OR-Tools: pip install 'fxremat[cpsat]'",
)


def test_without_or_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools", None)
    with pytest.raises(NotInstalled, match=r"pip install 'fxremat\[cpsat\]'"):
        solve(unphased_chain(5), 13, SolverOptions())
    assert issubclass(NotInstalled, ImportError)


def alone(problem: Problem, budget: int, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """What CP-SAT finds if only store-all is known."""
    store_all = make_plan(problem, problem.base_steps(), "store all")
    monkeypatch.setattr(known_schedule, "start_plan", lambda *args: store_all)
    return solve(problem, budget, SolverOptions())


@needs_cp_sat
@examples(10, suppress_health_check=list(HealthCheck))
@given(problems(min_ops=4, max_ops=7), st.integers(0, 99), st.booleans())
def test_never_better_than_the_optimum(problem: Problem, percent: int, shared: bool) -> None:
    problem = problem if shared else plain(problem)
    budget = budget_between(problem, percent)
    assume(replay(problem, problem.base_steps()).peak_bytes > budget)
    with pytest.MonkeyPatch.context() as monkeypatch:
        plan = alone(problem, budget, monkeypatch)
    assert check(problem, plan.steps, budget if fits(plan) else None).ok
    assert plan.time_bound_us == problem.base_time_us
    if fits(plan) and not shared:
        best = brute.least_time(problem, budget)
        assert best is not None
        assert plan.time_us >= best[0] - 1e-6


@needs_cp_sat
def test_start_progress_and_the_same_plan_twice() -> None:
    problem = unphased_chain(8)
    slow = greedy.front(problem, SolverOptions())[-1]
    told: list[Progress] = []
    options = SolverOptions(start=slow.ops, progress=told.append)
    first, second = solve(problem, 15, options), solve(problem, 15, options)
    assert first.steps == second.steps
    assert first.time_us < slow.time_us
    assert told[-1].time_us == first.time_us


@needs_cp_sat
def test_the_time_limit_is_kept() -> None:
    started = time.perf_counter()
    plan = solve(unphased_chain(40), 70, SolverOptions(time_limit_s=0.5))
    assert plan.peak_bytes <= 70
    assert time.perf_counter() - started < 10


@needs_cp_sat
def test_a_process_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moccasin, "WORK", "much")
    with pytest.raises(Failed, match="much"):
        solve(unphased_chain(5), 13, SolverOptions())


@needs_cp_sat
def test_a_budget_below_any_schedule() -> None:
    plan = solve(unphased_chain(5), 8, SolverOptions())
    assert plan.peak_bytes == 9 == plan.peak_bound_bytes
    assert solve(unphased_chain(5), None, SolverOptions()).steps == unphased_chain(5).base_steps()

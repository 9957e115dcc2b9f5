"""The greedy front against brute force, and what every plan must hold to."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from fxremat.core.plan import Plan
from fxremat.core.problem import Op, Problem, Value, validate
from fxremat.core.timeline import replay
from fxremat.planner import SolverOptions, front, solve
from fxremat.planner.indexed_problem import build_model
from fxremat.planner.local import greedy
from tests import brute
from tests.chains import phased_chain
from tests.examples import examples
from tests.strategies import problems_from_a_seed


def check(problem: Problem, plan: Plan) -> None:
    """The plan is what it claims, and a schedule that the passes can apply."""
    line = replay(problem, plan.steps)
    assert plan.peak_bytes == line.peak_bytes
    assert plan.time_us == line.time_us
    assert tuple(dict.fromkeys(plan.steps)) == problem.base_steps()
    assert all(problem.op_of[name].repeatable for name in plan.repeats())
    assert plan.peak_bound_bytes is not None
    assert plan.peak_bound_bytes <= plan.peak_bytes
    assert plan.time_bound_us is not None
    assert plan.time_bound_us <= plan.time_us


@examples(25, suppress_health_check=list(HealthCheck))
@given(problems_from_a_seed(8))
def test_never_better_than_the_optimum(problem: Problem) -> None:
    plans = front(problem)
    for plan in plans:
        check(problem, plan)
        best = brute.least_time(problem, plan.peak_bytes)
        assert best is not None
        assert replay(problem, best[1]).peak_bytes <= plan.peak_bytes
        assert plan.time_us >= best[0] - 1e-9
    least = brute.least_peak(problem)
    bound = plans[-1].peak_bound_bytes
    assert bound is not None
    assert bound <= least <= plans[-1].peak_bytes


@examples(25, suppress_health_check=list(HealthCheck))
@given(problems_from_a_seed(5))
def test_tiny_problems_are_solved_to_the_optimum(problem: Problem) -> None:
    plans = front(problem)
    for plan in plans:
        best = brute.least_time(problem, plan.peak_bytes)
        assert best is not None
        assert plan.time_us == pytest.approx(best[0])
    least = brute.least_peak(problem)
    assert plans[-1].peak_bytes == least == plans[-1].peak_bound_bytes


@examples(25, suppress_health_check=list(HealthCheck))
@given(problems_from_a_seed(8), problems_from_a_seed(8), st.integers(30, 100))
def test_a_plan_of_another_problem_becomes_one_of_this(
    problem: Problem, other: Problem, percent: int
) -> None:
    """Whatever the other problem was; of the same problem it becomes no worse."""
    budget = replay(problem, problem.base_steps()).peak_bytes * percent // 100
    for source in (other, problem):
        plan = greedy.quick(source, budget, SolverOptions())
        adapted = greedy.adapt(plan, problem, budget, SolverOptions())
        line = replay(problem, adapted.steps)
        assert (adapted.peak_bytes, adapted.time_us) == (line.peak_bytes, line.time_us)
        assert tuple(dict.fromkeys(adapted.steps)) == problem.base_steps()
    assert adapted.peak_bytes <= max(plan.peak_bytes, budget)
    if plan.peak_bytes <= budget:
        assert adapted.time_us <= plan.time_us * (1 + 1e-9)


def test_steps_of_unknown_ops_are_left_out() -> None:
    model = build_model(phased_chain(3))
    names = model.names(range(model.n))
    again = names[0]
    steps = [*names[:3], "other", again, "another", *names[3:]]
    assert greedy.extra_runs(model, steps) == [(0, 3)]


@examples(8, suppress_health_check=list(HealthCheck))
@given(problems_from_a_seed(8))
def test_monotone_in_the_budget(problem: Problem) -> None:
    plans = front(problem)
    assert all(a.peak_bytes > b.peak_bytes for a, b in pairwise(plans))
    assert all(a.time_us < b.time_us for a, b in pairwise(plans))
    assert plans[0].time_us == problem.base_time_us
    top = plans[0].peak_bytes
    budgets = range(top + 2, -1, -1)
    chosen = [solve(problem, budget, "greedy") for budget in budgets]
    others = [solve(problem, budget) for budget in budgets[::4]]
    for larger, smaller in (*pairwise(chosen), *pairwise(others)):
        assert smaller.peak_bytes <= larger.peak_bytes
        assert smaller.time_us >= larger.time_us
    for plan in (*chosen, *others):
        assert plan.budget_bytes is not None
        fits = plan.peak_bytes <= plan.budget_bytes
        assert fits or plan.peak_bytes == plans[-1].peak_bytes


def test_inplace_values_share_their_bytes() -> None:
    """``b`` takes over ``a`` where ``a`` dies there; computing ``a`` again makes that so."""
    problem = validate(
        Problem(
            "inplace",
            (Value("a", 8), Value("b", 8), Value("c", 1)),
            (
                Op("a", (), ("a",), 1.0),
                Op("b", ("a",), ("b",), 1.0, inplace=(("a", "b"),)),
                Op("c", ("b",), ("c",), 1.0),
                Op("d", ("a", "c"), (), 1.0),
            ),
        )
    )
    assert solve(problem, None).peak_bytes == 17
    plan = solve(problem, 9)
    assert plan.steps == ("a", "b", "c", "a", "d")
    assert plan.peak_bytes == 9 == plan.peak_bound_bytes


@examples(15)
@given(problems_from_a_seed(8), st.integers(0, 99))
def test_the_seed_changes_no_promise(problem: Problem, seed: int) -> None:
    options = SolverOptions(seed=seed)
    plans = front(problem, options)
    for plan in plans:
        check(problem, plan)
    twin = Problem(**{field.name: getattr(problem, field.name) for field in fields(problem)})
    assert [plan.steps for plan in front(twin, options)] == [plan.steps for plan in plans]


def test_nothing_to_plan() -> None:
    plan = solve(Problem("empty", (Value("w", 3),), (), resident=("w",)), 1)
    assert (plan.steps, plan.peak_bytes, plan.time_us) == ((), 3, 0)


def test_unknown_solver() -> None:
    with pytest.raises(ValueError, match="unknown solver 'best'"):
        solve(phased_chain(2), None, "best")

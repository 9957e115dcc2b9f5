"""The relaxation over moments: its bound, the plans made from it, and their refinement."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.core.check import check
from fxremat.core.constants import ROUNDS
from fxremat.core.problem import Op, Problem, Value, validate
from fxremat.core.timeline import replay
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import build_model
from fxremat.planner.local.stage_schedule import StageSchedule
from fxremat.planner.milp import moments
from fxremat.planner.milp.highs import Milp, Status
from fxremat.planner.milp.relaxation import Relaxation, extra_runs_for
from fxremat.planner.solvers import Progress, SolverOptions
from tests.brute import least_time
from tests.chains import growing_chain
from tests.examples import examples
from tests.strategies import problems

OPTIONS = SolverOptions()
NO_LIMIT = Deadline(None)


def relaxation(problem: Problem, budget: int, *stages: int) -> Relaxation:
    model = build_model(problem)
    return Relaxation(model, budget, sorted({*stages}))


# --- the bound -----------------------------------------------------------------------------------


@examples(40)
@given(problems(max_ops=6), st.data())
def test_no_schedule_within_the_budget_is_faster_than_the_bound(
    problem: Problem, data: st.DataObject
) -> None:
    full = replay(problem, problem.base_steps()).peak_bytes
    budget = data.draw(st.integers(0, full))
    count = len(problem.ops)
    stages = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count))
    found = relaxation(problem, budget, *stages)
    bound = found.time_bound_us(found.solve(NO_LIMIT))
    best = least_time(problem, budget)
    if best is not None:
        assert bound <= best[0] * (1 + 1e-9)


def test_bytes_of_runs_between_neighbouring_moments_count() -> None:
    """Without c the op "peak" fits, but c comes from a value that has no room beside w."""
    values = [Value("a", 1), Value("big", 50), Value("c", 10), Value("w", 30), Value("p", 0)]
    ops = [
        Op("a", (), ("a",), 1.0),
        Op("big", ("a",), ("big",), 1.0),
        Op("c", ("big",), ("c",), 1.0),
        Op("w", ("a",), ("w",), 1.0, repeatable=False),
        Op("peak", ("w",), ("p",), 1.0, 30, repeatable=False),
        Op("last", ("c", "w", "p"), ("out",), 1.0, repeatable=False),
    ]
    values.append(Value("out", 0))
    problem = validate(Problem("neighbours", tuple(values), tuple(ops), outputs=("out",)))
    assert least_time(problem, 65) is None
    alone, both = relaxation(problem, 65, 4), relaxation(problem, 65, 4, 5)
    assert math.isfinite(alone.time_bound_us(alone.solve(NO_LIMIT)))
    assert both.time_bound_us(both.solve(NO_LIMIT)) == math.inf


def test_what_is_written_over_and_read_later_runs_again() -> None:
    sizes = {"x": 1, "v": 10, "e": 10, "out": 0, "last": 0}
    values = tuple(Value(name, size) for name, size in sizes.items())
    ops = (
        Op("v", ("x",), ("v",), 4.0),
        Op("e", ("v",), ("e",), 1.0, repeatable=False, inplace=(("v", "e"),)),
        Op("f", ("e",), ("out",), 1.0, repeatable=False),
        Op("g", ("v",), ("last",), 1.0, repeatable=False),
    )
    problem = validate(Problem("over", values, ops, ("x",), outputs=("out", "last")))
    found = relaxation(problem, 11, 1)
    solution = found.solve(NO_LIMIT)
    assert found.time_bound_us(solution) == pytest.approx(problem.base_time_us + 4.0)
    best = least_time(problem, 11)
    assert best is not None
    assert best[0] == problem.base_time_us + 4.0
    model = build_model(problem)
    assert (
        StageSchedule(model, extra_runs_for(model, dict(found.held_in(solution)))).max_peak() == 11
    )


# --- schedules -----------------------------------------------------------------------------------


@examples(40)
@given(problems(max_ops=7), st.data())
def test_whatever_is_held_the_schedule_is_possible(problem: Problem, data: st.DataObject) -> None:
    model = build_model(problem)
    stages = st.integers(0, model.n - 1)
    values = st.sets(st.integers(0, max(0, len(model.bytes) - 1)))
    held = data.draw(st.dictionaries(stages, values, max_size=3))
    steps = model.names(StageSchedule(model, extra_runs_for(model, held)).steps())
    assert check(problem, steps).ok


# --- plans ---------------------------------------------------------------------------------------


@examples(40)
@given(problems(max_ops=6), st.data())
def test_plans_are_possible_and_bounds_hold(problem: Problem, data: st.DataObject) -> None:
    full = replay(problem, problem.base_steps()).peak_bytes
    budget = data.draw(st.integers(0, full))
    plan = moments.solve(problem, budget, OPTIONS)
    best = least_time(problem, budget)
    assert check(problem, plan.steps).ok
    assert (plan.peak_bytes <= budget) == (best is not None)
    assert plan.time_bound_us is not None
    assert plan.peak_bound_bytes is not None
    if best is None:
        assert plan.peak_bound_bytes <= plan.peak_bytes
    else:
        assert plan.time_us >= best[0] * (1 - 1e-9)
        assert plan.time_bound_us <= best[0] * (1 + 1e-9)


@pytest.mark.slow
def test_a_larger_budget_never_takes_longer_than_proven_for_a_smaller_one() -> None:
    problem = growing_chain(24)
    full = replay(problem, problem.base_steps()).peak_bytes
    plans = [moments.solve(problem, full * p // 100, OPTIONS) for p in (40, 50, 60, 80)]
    for smaller, larger in itertools.pairwise(plans):
        assert larger.time_bound_us is not None
        assert larger.time_bound_us <= smaller.time_us * (1 + 1e-9)
        assert larger.time_us <= smaller.time_us * (1 + 1e-9)


@pytest.mark.slow
def test_equal_plans_and_progress() -> None:
    problem = growing_chain(14)
    told: list[Progress] = []
    options = SolverOptions(progress=told.append)
    budget = replay(problem, problem.base_steps()).peak_bytes // 3
    first = moments.solve(problem, budget, options)
    assert first.time_bound_us is not None
    assert first.time_bound_us < 0.99 * first.time_us, "not proven: every part of it has run"
    assert moments.solve(problem, budget, OPTIONS).steps == first.steps
    assert told
    assert all(t.bound_us is not None for t in told)


@pytest.mark.parametrize("percent", [70, 45, 33])
def test_a_plan_near_enough_to_its_bound_is_not_worked_on(percent: int) -> None:
    """It ends as soon as the gap is reached, which takes no more rounds than to close it."""
    problem = growing_chain(12)
    budget = replay(problem, problem.base_steps()).peak_bytes * percent // 100
    rounds = []
    for gap in (0.0, 0.2):
        told: list[Progress] = []
        plan = moments.solve(problem, budget, SolverOptions(gap=gap, progress=told.append))
        rounds.append(len(told))
        assert check(problem, plan.steps).ok
        assert plan.peak_bytes <= budget
    assert plan.time_bound_us is not None
    near_us = 0.2 * problem.base_time_us
    if rounds[1] >= ROUNDS:  # from there on it is content with less
        near_us *= 2
    assert plan.time_us - plan.time_bound_us <= near_us
    assert rounds[1] <= rounds[0]


# --- HiGHS ---------------------------------------------------------------------------------------


def test_without_time_nothing_is_claimed() -> None:
    milp = Milp()
    columns = [milp.binary(-1.0 - k % 7) for k in range(60)]
    for k in range(60):
        milp.row([(c, 1.0 + (k * c) % 5) for c in columns], high=40.0 + k)
    solution = milp.solve(Deadline(0.0))
    assert solution.status in (Status.UNDECIDED, Status.FEASIBLE)
    assert solution.bound <= milp.solve(NO_LIMIT, nodes=1).objective

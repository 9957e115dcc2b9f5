"""Least energy: paging where computing is dear, computing where paging is, both within a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat import planner
from fxremat.core.check import check
from fxremat.core.plan import Plan
from fxremat.core.problem import Copies, Problem
from fxremat.core.timeline import replay
from fxremat.planner import SolverOptions
from tests.chains import chain_with_copies
from tests.examples import examples
from tests.strategies import problems

BUDGET = 507


def device(op_uj: float, byte_uj: float, *, rate: float = 10.0) -> Problem:
    """The chain on a device where each op and each moved byte take so much."""
    problem = chain_with_copies(8, copies=Copies(rate, rate, energy_uj=byte_uj))
    return replace(problem, ops=tuple(replace(op, energy_uj=op_uj) for op in problem.ops))


def solved(problem: Problem, *, most_time_us: float | None = None) -> Plan:
    options = SolverOptions(objective="energy", most_time_us=most_time_us)
    plan = planner.solve(problem, BUDGET, "greedy", options)
    verdict = check(problem, plan.steps, BUDGET)
    assert verdict.ok, str(verdict)
    assert verdict.energy_uj == pytest.approx(plan.energy_uj)
    assert plan.solver.endswith("+energy")
    return plan


def moved_bytes(plan: Plan, problem: Problem) -> int:
    return sum(problem.bytes_of[move.value] for move in plan.moves if move.kind != "wait")


def test_energy_of_a_schedule() -> None:
    problem = device(3.0, 0.5)
    plan = planner.solve(problem, BUDGET, "greedy", SolverOptions(objective="energy"))
    assert plan.energy_uj == 3.0 * len(plan.ops) + 0.5 * moved_bytes(plan, problem)
    assert replay(problem, plan.steps).energy_uj == plan.energy_uj


def test_where_computing_is_dear_values_are_paged() -> None:
    problem = device(1000.0, 0.01)
    plan = solved(problem)
    assert plan.moves
    assert not plan.repeats()


def test_where_paging_is_dear_values_are_computed_again() -> None:
    problem = device(1.0, 100.0)
    plan = solved(problem)
    assert not plan.moves
    assert plan.repeats()


def test_slow_paging_is_given_up_where_time_is_short() -> None:
    """Paging takes next to no energy, but 100 us for each value."""
    problem = device(1000.0, 0.001, rate=1.0)
    patient, hurried = solved(problem), solved(problem, most_time_us=1.6 * problem.base_time_us)
    assert patient.energy_uj < hurried.energy_uj
    assert hurried.time_us <= 1.6 * problem.base_time_us < patient.time_us


def test_kilobytes_and_slow_paging() -> None:
    """A device of four kilobytes that pages a kilobyte in a second still has a plan."""
    problem = device(50.0, 0.1, rate=0.001)
    small = replace(problem, values=tuple(replace(v, bytes=8 * v.bytes) for v in problem.values))
    options = SolverOptions(objective="energy")
    plan = planner.solve(small, 4096, "greedy", options)
    assert check(small, plan.steps, 4096).ok


@pytest.mark.slow
def test_energy_is_never_more_than_that_of_the_fastest_plan() -> None:
    for byte_uj in (0.01, 0.1, 1.0):
        problem = device(20.0, byte_uj)
        fastest = planner.solve(problem, BUDGET, "greedy")
        assert solved(problem).energy_uj <= fastest.energy_uj


@examples(8)
@given(problems(), st.floats(0.4, 1.0), st.sampled_from((0.0, 0.1, 5.0)))
def test_random_problems(problem: Problem, part: float, byte_uj: float) -> None:
    ops = tuple(replace(op, energy_uj=op.time_us + 1.0) for op in problem.ops)
    problem = replace(problem, ops=ops, copies=Copies(8.0, 8.0, energy_uj=byte_uj))
    budget = int(part * replay(problem, problem.base_steps()).peak_bytes)
    plan = planner.solve(problem, budget, "greedy", SolverOptions(objective="energy"))
    verdict = check(problem, plan.steps)
    assert verdict.ok
    assert verdict.energy_uj == pytest.approx(plan.energy_uj)
    alone = planner.solve(replace(problem, copies=None), budget, "greedy")
    assert plan.peak_bytes <= max(budget, alone.peak_bytes)

"""POET: paging where computing is dear, computing where paging is, both within a time."""

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
from fxremat.planner.published.poet import Energy, solve
from tests.chains import chain_with_copies
from tests.examples import examples
from tests.strategies import problems

BUDGET = 507


def device(*, rate: float = 10.0) -> Problem:
    """A chain on a device that moves so many bytes in a microsecond."""
    return chain_with_copies(8, copies=Copies(rate, rate))


def solved(problem: Problem, energy: Energy) -> Plan:
    plan = solve(problem, BUDGET, SolverOptions(), energy)
    verdict = check(problem, plan.steps, BUDGET)
    assert verdict.ok, str(verdict)
    assert plan.solver == "poet"
    return plan


def energy_uj(problem: Problem, plan: Plan, energy: Energy) -> float:
    return energy.of(replay(problem, plan.steps))


def test_energy_of_a_schedule() -> None:
    problem, energy = device(), Energy(watts=3.0, nj_per_byte=500.0)
    plan = planner.solve(problem, BUDGET, "poet")
    moved = sum(problem.bytes_of[move.value] for move in plan.moves if move.kind != "wait")
    ops_us = sum(problem.op_of[name].time_us for name in plan.ops)
    assert energy_uj(problem, plan, energy) == pytest.approx(3.0 * ops_us + 0.5 * moved)


def test_where_computing_is_dear_values_are_paged() -> None:
    plan = solved(device(), Energy(watts=1000.0, nj_per_byte=10.0))
    assert plan.moves
    assert not plan.repeats()


def test_where_paging_is_dear_values_are_computed_again() -> None:
    plan = solved(device(), Energy(watts=0.1, nj_per_byte=1e5))
    assert not plan.moves
    assert plan.repeats()


def test_slow_paging_is_given_up_where_time_is_short() -> None:
    """Paging takes next to no energy, but 100 us for each value."""
    problem, energy = device(rate=1.0), Energy(watts=1000.0, nj_per_byte=1.0)
    patient, hurried = solved(problem, energy), solved(problem, replace(energy, most_time=1.6))
    assert energy_uj(problem, patient, energy) < energy_uj(problem, hurried, energy)
    assert hurried.time_us <= 1.6 * problem.base_time_us < patient.time_us


def test_kilobytes_and_slow_paging() -> None:
    """A device of four kilobytes that pages a kilobyte in a second still has a plan."""
    problem = device(rate=0.001)
    small = replace(problem, values=tuple(replace(v, bytes=8 * v.bytes) for v in problem.values))
    plan = solve(small, 4096, SolverOptions(), Energy(watts=5.0, nj_per_byte=100.0))
    assert check(small, plan.steps, 4096).ok


def test_energy_is_never_more_than_that_of_the_fastest_plan() -> None:
    for nj_per_byte in (10.0, 100.0, 1000.0):
        problem, energy = device(), Energy(watts=2.0, nj_per_byte=nj_per_byte)
        fastest = planner.solve(problem, BUDGET, "greedy")
        least = solved(problem, energy)
        assert energy_uj(problem, least, energy) <= energy_uj(problem, fastest, energy)


@examples(8)
@given(problems(), st.floats(0.4, 1.0), st.sampled_from((0.0, 100.0, 5000.0)))
def test_random_problems(problem: Problem, part: float, nj_per_byte: float) -> None:
    problem = replace(problem, copies=Copies(8.0, 8.0))
    budget = int(part * replay(problem, problem.base_steps()).peak_bytes)
    plan = solve(problem, budget, SolverOptions(), Energy(1.0, nj_per_byte))
    assert check(problem, plan.steps).ok
    alone = planner.solve(replace(problem, copies=None), budget, "greedy")
    assert plan.peak_bytes <= max(budget, alone.peak_bytes)

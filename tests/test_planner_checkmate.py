"""Checkmate, Moccasin and POET against brute force, and their programmes against replay."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from fxremat import planner
from fxremat.core.check import check
from fxremat.core.plan import Plan
from fxremat.core.problem import Copies, Op, Problem, Value, validate
from fxremat.core.timeline import replay, store_all_peak
from fxremat.planner import Solver, constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.local import greedy
from fxremat.planner.local.greedy import extra_runs
from fxremat.planner.local.stage_schedule import ExtraRun, steps_of
from fxremat.planner.plans import make_plan
from fxremat.planner.published import known_schedule
from fxremat.planner.published.checkmate import solve, solve_pruned
from fxremat.planner.published.checkmate_milp import CheckmateMilp
from fxremat.planner.published.known_schedule import all_runs, without_unread
from fxremat.planner.published.moccasin import solve as moccasin_solve
from fxremat.planner.published.poet import Energy
from fxremat.planner.published.poet import solve as poet_solve
from fxremat.planner.solvers import ProblemRefused, Progress, SolverOptions
from tests import brute
from tests.brute import budget_between, fits, plain
from tests.chains import chain_with_copies, phased_chain
from tests.examples import examples
from tests.strategies import problems, schedules

unphased_chain = partial(phased_chain, phases=False)

SLACK = 1e-6
FEW = examples(25, suppress_health_check=list(HealthCheck))


@FEW
@given(problems(max_ops=6).map(plain), st.integers(0, 99))
def test_the_optimum_is_found_and_proven(problem: Problem, percent: int) -> None:
    budget = budget_between(problem, percent)
    best = brute.least_time(problem, budget)
    plan, pruned = (run(problem, budget, SolverOptions()) for run in (solve, solve_pruned))
    assert (plan.solver, pruned.solver) == ("checkmate", "checkmate_pruned")
    assert fits(plan) == (best is not None)
    assert plan.time_bound_us is not None
    assert plan.peak_bound_bytes is not None
    if best is None:
        assert plan.peak_bound_bytes > budget
        assert not fits(pruned)
    else:
        assert plan.peak_bound_bytes <= budget
        assert plan.time_us == pytest.approx(best[0])
        assert plan.time_bound_us <= best[0] + SLACK
        assert not fits(pruned) or pruned.time_us >= best[0] - SLACK
    assert pruned.time_bound_us == problem.base_time_us


def allowed(programme: CheckmateMilp, runs: Sequence[ExtraRun]) -> bool:
    """Whether the programme has a solution with these runs."""
    values = programme.start_values(runs)
    assert values is not None
    known = [(k, value) for k, value in enumerate(values) if math.isfinite(value)]
    for column, value in known:
        programme.milp.low[column] = programme.milp.high[column] = value
    return programme.milp.solve(Deadline(None)).values is not None


@FEW
@given(problems(max_ops=7).map(plain), st.data())
def test_bytes_are_those_of_replay(problem: Problem, data: st.DataObject) -> None:
    """A schedule fits the rows of a budget if and only if it fits the budget."""
    model = IndexedProblem(problem)
    runs = without_unread(model, extra_runs(model, data.draw(schedules(problem))))
    peak = replay(problem, model.names(steps_of(model.n, runs))).peak_bytes
    everywhere = range(model.n)
    some = data.draw(st.frozensets(st.sampled_from(everywhere)))
    for ordered in (frozenset(everywhere), some, frozenset[int]()):
        assert allowed(CheckmateMilp(model, peak, all_runs(model), ordered), runs)
    if peak > 1:
        assert not allowed(CheckmateMilp(model, peak - 1, all_runs(model), everywhere), runs)


@pytest.mark.parametrize("run", [solve, solve_pruned])
def test_a_budget_below_any_schedule(run: Solver) -> None:
    plan = run(unphased_chain(5), 8, SolverOptions())
    assert plan.peak_bytes == 9
    assert plan.peak_bound_bytes == 9


def test_infeasibility_is_proven_by_the_programme(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither the bound nor the greedy solver know."""
    problem = unphased_chain(5)
    store_all = solve(problem, None, SolverOptions())
    monkeypatch.setattr(known_schedule, "start_plan", lambda *args: store_all)
    monkeypatch.setattr(known_schedule, "peak_bound", lambda model: 0)
    plan = solve(problem, 8, SolverOptions())
    assert (plan.peak_bytes, plan.peak_bound_bytes) == (21, 9)


def test_the_order_of_repeats_may_matter() -> None:
    """x and y go before m, and both chains to them run again after it, one after the other."""
    sizes = {"a": 10, "b": 10, "x": 1, "y": 1, "m": 12}
    ops = (
        Op("a1", (), ("a",), 1.0),
        Op("b1", (), ("b",), 1.0),
        Op("a2", ("a",), ("x",), 1.0),
        Op("b2", ("b",), ("y",), 1.0),
        Op("m", (), ("m",), 1.0),
        Op("n", ("m",), (), 1.0),
        Op("end", ("x", "y"), (), 1.0),
    )
    problem = validate(Problem("two", tuple(Value(*item) for item in sizes.items()), ops))
    best = brute.least_time(problem, 12)
    assert best is not None
    plan = solve(problem, 12, SolverOptions())
    assert plan.peak_bytes == 12
    assert plan.time_us == best[0] == 13.0
    assert plan.time_bound_us == pytest.approx(13.0, rel=1e-5)


def test_a_start_is_used_and_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = unphased_chain(5)
    slow = next(plan for plan in greedy.front(problem, SolverOptions()) if plan.peak_bytes <= 10)

    def refuse(*args: object) -> Plan:
        raise AssertionError("the start fits, so nothing else is needed")

    monkeypatch.setattr(greedy, "solve", refuse)
    options = SolverOptions(start=slow.ops)
    assert solve(problem, 17, options).time_us == 11.0
    stopped = solve(problem, 17, replace(options, time_limit_s=0.0))
    assert stopped.steps == slow.steps


def test_progress_and_no_limit_on_time() -> None:
    told: list[Progress] = []
    plan = solve(unphased_chain(8), 14, SolverOptions(progress=told.append))
    assert plan.peak_bytes <= 14
    for progress in told:
        assert progress.solver == "checkmate"
        assert progress.bound_us is not None
        assert progress.bound_us <= plan.time_us * (1 + SLACK)
        assert progress.time_us is not None
        assert math.isfinite(progress.time_us)
        assert progress.time_us >= plan.time_us


def test_too_large_for_the_full_programme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxremat.planner.constants.MOST_RUNS", 3)
    with pytest.raises(ProblemRefused, match="use solver 'checkmate_pruned'"):
        solve(unphased_chain(5), 13, SolverOptions())
    assert solve_pruned(unphased_chain(5), 13, SolverOptions()).peak_bytes <= 13


# --- moccasin -----------------------------------------------------------------------------

needs_cp_sat = pytest.mark.skipif(
    importlib.util.find_spec("ortools") is None,
    reason="needs OR-Tools: pip install 'fxremat[cpsat]'",
)


def test_without_or_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools", None)
    with pytest.raises(ProblemRefused, match=r"pip install 'fxremat\[cpsat\]'"):
        moccasin_solve(unphased_chain(5), 13, SolverOptions())


def alone(problem: Problem, budget: int, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """What CP-SAT finds if only store-all is known."""
    store_all = make_plan(problem, problem.base_steps(), "store all")
    monkeypatch.setattr(known_schedule, "start_plan", lambda *args: store_all)
    return moccasin_solve(problem, budget, SolverOptions())


@needs_cp_sat
@examples(10, suppress_health_check=list(HealthCheck))
@given(problems(min_ops=4, max_ops=7), st.integers(0, 99), st.booleans())
def test_never_better_than_the_optimum(problem: Problem, percent: int, shared: bool) -> None:
    problem = problem if shared else plain(problem)
    budget = budget_between(problem, percent)
    assume(store_all_peak(problem) > budget)
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
    first, second = moccasin_solve(problem, 15, options), moccasin_solve(problem, 15, options)
    assert first.steps == second.steps
    assert first.time_us < slow.time_us
    assert told[-1].time_us == first.time_us


@needs_cp_sat
def test_the_time_limit_is_kept() -> None:
    started = time.perf_counter()
    plan = moccasin_solve(unphased_chain(40), 70, SolverOptions(time_limit_s=0.5))
    assert plan.peak_bytes <= 70
    assert time.perf_counter() - started < 10


@needs_cp_sat
def test_a_process_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "MOCCASIN_WORK", "much")
    with pytest.raises(ProblemRefused, match="much"):
        moccasin_solve(unphased_chain(5), 13, SolverOptions())


# --- poet ---------------------------------------------------------------------------------

BUDGET = 507


def device(*, rate: float = 10.0) -> Problem:
    """A chain on a device that moves so many bytes in a microsecond."""
    return chain_with_copies(8, copies=Copies(rate, rate))


def solved(problem: Problem, energy: Energy) -> Plan:
    plan = poet_solve(problem, BUDGET, SolverOptions(), energy)
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


def test_what_is_dear_is_not_done() -> None:
    dear_ops = solved(device(), Energy(watts=1000.0, nj_per_byte=10.0))
    dear_moves = solved(device(), Energy(watts=0.1, nj_per_byte=1e5))
    assert dear_ops.moves
    assert not dear_ops.repeats()
    assert dear_moves.repeats()
    assert not dear_moves.moves


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
    plan = poet_solve(small, 4096, SolverOptions(), Energy(watts=5.0, nj_per_byte=100.0))
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
    budget = int(part * store_all_peak(problem))
    plan = poet_solve(problem, budget, SolverOptions(), Energy(1.0, nj_per_byte))
    assert check(problem, plan.steps).ok
    alone = planner.solve(replace(problem, copies=None), budget, "greedy")
    assert plan.peak_bytes <= max(budget, alone.peak_bytes)

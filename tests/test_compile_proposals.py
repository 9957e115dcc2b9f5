"""Which plans are proposed under an aim and of least peak, given what dry runs show of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.compile.dry_run.dry_run import DryRun
from fxremat.compile.search.candidates import Candidate, Evaluation
from fxremat.compile.search.planning import LOCAL_SEARCH
from fxremat.compile.search.proposals import UnderAim, fastest_under, least
from fxremat.core.constants import MEASURABLE
from fxremat.core.plan import Plan
from fxremat.core.problem import Op, Problem, Value
from fxremat.core.timeline import replay
from tests.chains import blocks
from tests.search_trials import NEAR_PEAK, PROBLEM, Trial, draft_of, planning


def within(trial: Trial, aim: int) -> Evaluation | None:
    """The fastest that is under the aim."""
    return fastest_under(aim, trial.seen)


@pytest.mark.parametrize("error", [-0.3, -0.07, 0.0, 0.07])
def test_a_constant_error_of_the_planner_is_corrected(error: float) -> None:
    """What is found is near the best, however wrong the planner is by a constant."""
    whole = planning().solve(PROBLEM, None).peak_bytes
    offset, aim = round(error * whole), round(0.8 * whole)
    trial = Trial(lambda planned, order: planned + offset)
    trial.follow(UnderAim(draft_of(PROBLEM), aim, planning()).proposals())
    found = within(trial, aim)
    best = planning().solve(PROBLEM, aim - offset)
    assert found is not None
    assert found.plan.time_us * (1 - MEASURABLE) <= best.time_us <= found.plan.time_us


@pytest.mark.parametrize(("seed", "floats"), [(4, True), (400, False)])
def test_where_a_mask_of_a_seed_runs_again_so_is_all_that_does(seed: int, floats: bool) -> None:
    """Inductor could make it, and what reads it, far too early."""
    sizes = {"seed": seed, "mask": 100, "dropped": 100, "x": 100, "wide": 900, "g": 1}
    ops = (
        Op("seed", (), ("seed",), 1.0, repeatable=False),
        Op("mask", ("seed",), ("mask",), 1.0),
        Op("drop", ("x", "mask"), ("dropped",), 1.0),
        Op("wide", ("dropped",), ("wide",), 1.0, phase="backward"),
        Op("g", ("x", "mask", "dropped"), ("g",), 1.0, phase="backward"),
    )
    values = tuple(Value(name, size) for name, size in sizes.items())
    problem = Problem("masks", values, ops, (), ("x",), ("g",))
    steps = ("seed", "mask", "drop", "wide", "mask", "drop", "g")
    line = replay(problem, steps)
    plan = Plan(steps, "by hand", 10_000, line.peak_bytes, line.time_us)
    found = Candidate.near_peak(draft_of(problem), plan, 10_000)
    assert found.held == (frozenset({4, 5}) if floats else frozenset())


def test_plans_of_least_peak_do_not_know_the_budget() -> None:
    """Asked twice they are the same. All hold their order; what takes too much is tried looser."""
    found = []
    for _ in range(2):
        trial = Trial(lambda planned, order: planned + 3)
        trial.follow(least(draft_of(blocks(2)), planning("auto"), []))
        assert set(trial.orders[:-1]) == {"planned"}
        assert trial.orders[-1] == NEAR_PEAK
        found.append([one.plan.steps for one in trial.asked])
    assert found[0] == found[1]


def test_what_a_dry_run_shows_of_scratch_memory_is_known_to_later_plans() -> None:
    """An op that needs much more than was known is planned for with that."""
    op = PROBLEM.ops[5]
    trial = Trial(lambda planned, order: planned, scratch={op.name: 500})
    seen = trial.follow(least(draft_of(PROBLEM), planning(LOCAL_SEARCH), []))
    assert seen[0].plan.peak_bytes < 500 <= seen[-1].plan.peak_bytes


def showing(candidate: Candidate, more: dict[str, int]) -> Evaluation:
    """The dry run of a candidate whose ops take more than planned by so many bytes each."""
    problem = candidate.draft.problem
    line = replay(problem, candidate.plan.steps)
    live = [n + more.get(str(s), 0) for s, n in zip(line.steps, line.live_bytes, strict=True)]
    computed = tuple(f"{step}_recompute" for step in line.steps)
    shown = DryRun(max(live), tuple(live), (), {}, computed=computed)
    return Evaluation(candidate, candidate.draft, shown.peak_bytes, shown)


def test_what_is_live_beside_an_op_is_corrected_where_it_is_too_much() -> None:
    """By how much the plan was wrong there; what is within the aim is left as it was."""
    plan = planning().solve(PROBLEM, None)
    candidate = Candidate.planned(draft_of(PROBLEM), plan)
    line = replay(PROBLEM, plan.steps)
    highest = str(line.steps[line.live_bytes.index(plan.peak_bytes)])
    lowest = str(line.steps[line.live_bytes.index(min(line.live_bytes))])
    shown = showing(candidate, {highest: 7, lowest: 1})
    corrections = shown.corrections_above(plan.peak_bytes)
    assert corrections.beside == {highest: 7}
    corrected = corrections.apply_to(PROBLEM)
    assert replay(corrected, plan.steps).peak_bytes == shown.peak_bytes == plan.peak_bytes + 7
    assert shown.corrections_above(plan.peak_bytes + 7).apply_to(PROBLEM) == PROBLEM


@given(st.lists(st.integers(-20, 20), min_size=32, max_size=32), st.floats(0.4, 1.0))
def test_any_errors_of_the_planner(errors: list[int], share: float) -> None:
    """Candidates differ, are few, and one that is under the aim is not left for a slower one."""
    aim = round(share * planning().solve(PROBLEM, None).peak_bytes)
    trial = Trial(lambda planned, order: planned + errors[planned % 32] + (order == NEAR_PEAK))
    trial.follow(UnderAim(draft_of(PROBLEM), aim, planning()).proposals())
    planned_only = [one for one in trial.asked if one.order == "planned"]
    assert len({one.key for one in planned_only}) == len(planned_only)
    best = within(trial, aim)
    for one in trial.seen:
        if best is not None and one.peak_bytes <= aim:
            assert best.plan.time_us <= one.plan.time_us

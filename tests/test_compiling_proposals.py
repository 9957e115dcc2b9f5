"""Which plans are proposed under an aim and of least peak, given what the judge says of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.compile.draft import Learnt
from fxremat.compile.dry_run.dry_run import DryRun
from fxremat.compile.search import tuning
from fxremat.compile.search.candidates import Candidate, Judged
from fxremat.compile.search.planning import QUICK_SOLVER
from fxremat.compile.search.proposals import (
    fastest,
    least,
    next_target,
    under,
)
from fxremat.compile.search.tuning import CLOSE_ENOUGH, MADE_ANEW, NOT_SEEN
from fxremat.core.plan import Plan
from fxremat.core.problem import Op, Problem, Value
from fxremat.core.timeline import replay
from fxremat.passes.variants.insertion import InsertedVariant
from tests.chains import blocks
from tests.trial_judge import NEAR_PEAK, PROBLEM, Trial, draft_of, planning

AIM = 1000


def within(trial: Trial, aim: int) -> Judged | None:
    """The fastest that is under the aim."""
    return fastest(one for one in trial.judged if one.peak_bytes <= aim)


@pytest.mark.parametrize("error", [-0.3, -0.07, 0.0, 0.07])
def test_a_constant_error_of_the_planner_is_learnt(error: float) -> None:
    """What is found is near the best, however wrong the planner is by a constant."""
    whole = planning().solve(PROBLEM, None).peak_bytes
    offset, aim = round(error * whole), round(0.8 * whole)
    trial = Trial(lambda planned, order: planned + offset)
    trial.follow(under(draft_of(PROBLEM), aim, planning()))
    found = within(trial, aim)
    best = planning().solve(PROBLEM, aim - offset)
    assert found is not None
    assert found.plan.time_us * (1 - NOT_SEEN) <= best.time_us <= found.plan.time_us
    assert len(trial.asked) <= 6


def test_what_no_measured_time_could_tell_is_not_rehearsed() -> None:
    """A plan for more bytes is tried only if it is faster by more than that."""
    whole = planning().solve(PROBLEM, None).peak_bytes
    aim = round(0.8 * whole)
    first = planning().solve(PROBLEM, aim)
    for less in range(whole // 2):
        trial = Trial(lambda planned, order, less=less: planned - less)  # type: ignore[misc]
        trial.follow(under(draft_of(PROBLEM), aim, planning()))
        times = [one.plan.time_us for one in trial.judged]
        assert times[0] == first.time_us
        fits = [one.plan.time_us for one in trial.judged if one.peak_bytes <= aim]
        for before, after in pairwise(fits):
            assert after < before * (1 - NOT_SEEN)


def test_the_order_is_held_only_where_it_must_be() -> None:
    """A candidate that fits with its order held near the peak ends it; else it is everywhere."""
    aim = round(0.7 * planning().solve(PROBLEM, None).peak_bytes)
    fits = Trial(lambda planned, order: planned)
    fits.follow(under(draft_of(PROBLEM), aim, planning()))
    assert set(fits.orders) == {NEAR_PEAK}
    missing = aim - planning().solve(PROBLEM, aim).peak_bytes + aim // 10
    loose = Trial(lambda planned, order: planned + (missing if order == NEAR_PEAK else 0))
    loose.follow(under(draft_of(PROBLEM), aim, planning()))
    assert loose.orders[:2] == [NEAR_PEAK, "planned"]
    assert within(loose, aim) is not None


def test_what_is_found_with_its_order_held_is_tried_without() -> None:
    """Both orders miss with the first plan, Inductor's by little more: the next fits in both."""
    aim = round(0.8 * planning().solve(PROBLEM, None).peak_bytes)
    missing = aim - planning().solve(PROBLEM, aim).peak_bytes + 1
    trial = Trial(lambda planned, order: planned + missing + (order != "planned"))
    trial.follow(under(draft_of(PROBLEM), aim, planning()))
    assert trial.orders[:3] == [NEAR_PEAK, "planned", "planned"]
    assert trial.orders[-1] != "planned"
    best = within(trial, aim)
    assert best is not None
    assert best.candidate is trial.asked[-1]


def test_where_a_plan_is_near_the_aim_its_order_is_held() -> None:
    """At those steps alone; with room for all, nowhere."""
    plan = planning().solve(PROBLEM, round(0.7 * planning().solve(PROBLEM, None).peak_bytes))
    live = replay(PROBLEM, plan.steps).live_bytes
    found = Candidate.near_peak(draft_of(PROBLEM), plan, plan.peak_bytes)
    assert found.held is not None
    assert 0 < len(found.held) < len(plan.steps)
    for step, nbytes in enumerate(live):
        assert (step in found.held) == (nbytes >= tuning.NEAR_PEAK * plan.peak_bytes)
    with_room = Candidate.near_peak(draft_of(PROBLEM), plan, 10 * plan.peak_bytes)
    assert (with_room.order, with_room.held) == ("inductor", frozenset())


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


def test_an_aim_out_of_reach_is_not_rehearsed() -> None:
    lowest = planning().quick(PROBLEM, 0).peak_bytes
    trial = Trial(lambda planned, order: planned)
    trial.follow(under(draft_of(PROBLEM), lowest - 1, planning("greedy")))
    assert trial.asked == []


def test_without_a_rehearsal_the_order_is_held() -> None:
    """Nothing shows what Inductor's own order takes."""
    aim = round(0.7 * planning().solve(PROBLEM, None).peak_bytes)
    proposals = under(draft_of(PROBLEM), aim, planning())
    first = next(proposals)
    second = proposals.send(Judged(first, first.draft, first.plan.peak_bytes, None))
    assert (first.order, second.order) == (NEAR_PEAK, "planned")
    assert first.plan == second.plan


def judged(planned: int, real: int, *, again: bool = True, time_us: float = 1.0) -> Judged:
    """A candidate of made-up figures."""
    plan = Plan(("a", "a") if again else ("a",), "made up", None, planned, time_us)
    shown = DryRun(real, (), (), {})
    return Judged(Candidate.planned(draft_of(PROBLEM), plan), draft_of(PROBLEM), real, shown)


def test_close_below_the_aim_is_good_enough() -> None:
    assert next_target([judged(995, int((1 - CLOSE_ENOUGH) * AIM))], AIM) is None


def test_nothing_is_gained_where_nothing_runs_again() -> None:
    assert next_target([judged(600, 500, again=False)], AIM) is None
    assert next_target([judged(600, 500)], AIM) == 1100


def test_the_first_miss_moves_the_target_by_as_much() -> None:
    assert next_target([judged(990, 1090)], AIM) == 900


def test_the_line_through_two_misses_leads_to_the_aim() -> None:
    """The real peak falls by a fourth of what the planned one does."""
    assert next_target([judged(1000, 1100), judged(900, 1075)], AIM) == 900 - 4 * 75


def test_a_real_peak_that_does_not_move_is_left_in_long_steps() -> None:
    assert next_target([judged(1000, 1002), judged(998, 1002)], AIM) == 998 - 10


def test_between_too_much_and_enough_the_gap_is_halved() -> None:
    history = [judged(1000, 1300), judged(700, 400)]
    assert next_target(history, AIM) == 850
    assert next_target([judged(710, 1300), judged(700, 400)], AIM) is None


def test_fragmentation_is_something_to_gain() -> None:
    """Of a plan that meets the aim by what it reserves: another may reserve as little."""
    over, exact = judged(900, 1200), judged(600, AIM)
    assert next_target([over, exact], AIM) is None
    shown = DryRun(700, (), (), {})
    assert next_target([over, replace(exact, dry_run=shown)], AIM) == 750


def test_the_fastest_of_equals_holds_its_order_at_the_fewest_steps() -> None:
    held, loose = judged(1, 1), judged(1, 1)
    loose = replace(loose, candidate=replace(loose.candidate, held=frozenset([0])))
    loose = replace(loose, candidate=replace(loose.candidate, order=NEAR_PEAK))
    assert fastest(iter([held, loose])) is loose
    held, loose = replace(held, dry_run=None), replace(loose, dry_run=None)
    assert fastest(iter([loose, held])) is held
    assert fastest(iter([])) is None


def test_plans_of_least_peak_do_not_know_the_budget() -> None:
    """Asked twice they are the same. All hold their order; what takes too much is tried looser."""
    found = []
    for _ in range(2):
        trial = Trial(lambda planned, order: planned + 3)
        trial.follow(least(draft_of(blocks(2)), planning("auto"), []))
        assert set(trial.orders[:-1]) == {"planned"}
        assert trial.orders[-1] == NEAR_PEAK
        assert len(trial.asked) <= 2 + 1 + 1
        found.append([one.plan.steps for one in trial.asked])
    assert found[0] == found[1]


def test_only_plans_that_might_be_lowest_are_judged() -> None:
    """With no error, one of a higher planned peak than the lowest real one cannot be."""
    trial = Trial(lambda planned, order: planned)
    judged = trial.follow(least(draft_of(PROBLEM), planning(QUICK_SOLVER), []))
    lowest = min(one.peak_bytes for one in judged)
    assert all(one.plan.peak_bytes == lowest for one in judged)


@pytest.mark.parametrize(("more", "tried"), [(0, False), (10, True)])
def test_plans_of_other_graphs_count_for_the_lowest(more: int, tried: bool) -> None:
    """A graph is left out whose least planned peak is no lower than what another one takes."""
    before = Trial(lambda planned, order: planned + more)
    others = before.follow(least(draft_of(PROBLEM), planning(QUICK_SOLVER), []))
    trial = Trial(lambda planned, order: planned)
    trial.follow(least(draft_of(PROBLEM), planning(QUICK_SOLVER), others))
    assert bool(trial.asked) == tried


def test_what_a_rehearsal_shows_of_scratch_memory_is_known_to_later_plans() -> None:
    """An op that needs much more than was known is planned for with that."""
    op = PROBLEM.ops[5]
    trial = Trial(lambda planned, order: planned, scratch={op.name: 500})
    judged = trial.follow(least(draft_of(PROBLEM), planning(QUICK_SOLVER), []))
    assert judged[0].plan.peak_bytes < 500 <= judged[-1].plan.peak_bytes


def showing(candidate: Candidate, more: dict[str, int]) -> Judged:
    """What a rehearsal shows whose ops take more than planned by so many bytes each."""
    problem = candidate.draft.estimate.problem
    line = replay(problem, candidate.plan.steps)
    live = [n + more.get(str(s), 0) for s, n in zip(line.steps, line.live_bytes, strict=True)]
    making = tuple(f"{step}_recompute" for step in line.steps)
    shown = DryRun(max(live), tuple(live), (), {}, making=making)
    return Judged(candidate, candidate.draft, shown.peak_bytes, shown)


def test_what_is_live_beside_an_op_is_learnt_where_it_is_too_much() -> None:
    """By how much the plan was wrong there; what is within the aim is left as it was."""
    plan = planning().solve(PROBLEM, None)
    candidate = Candidate.planned(draft_of(PROBLEM), plan)
    line = replay(PROBLEM, plan.steps)
    highest = str(line.steps[line.live_bytes.index(plan.peak_bytes)])
    lowest = str(line.steps[line.live_bytes.index(min(line.live_bytes))])
    shown = showing(candidate, {highest: 7, lowest: 1})
    learnt = shown.learnt_above(plan.peak_bytes)
    assert learnt.beside == {highest: 7}
    told = learnt.told(PROBLEM)
    assert replay(told, plan.steps).peak_bytes == shown.peak_bytes == plan.peak_bytes + 7
    assert shown.learnt_above(plan.peak_bytes + 7).told(PROBLEM) == PROBLEM


def test_what_several_have_shown_is_the_most_of_each_op() -> None:
    one, other = Learnt({"a": 1}, {"a": 5, "b": 1}), Learnt({"b": 2}, {"a": 3, "c": 4})
    assert Learnt.of_all([one, other]) == Learnt({"a": 1, "b": 2}, {"a": 5, "b": 1, "c": 4})


@pytest.mark.parametrize("times", [1, MADE_ANEW])
def test_a_plan_that_takes_too_much_is_made_anew_by_what_was_live(times: int) -> None:
    """A loop of one op takes more than planned; the plan that knows it fits, at the same aim."""
    aim = round(0.8 * planning().solve(PROBLEM, None).peak_bytes)
    proposals = under(draft_of(PROBLEM), aim, planning())
    candidate, more = next(proposals), dict[str, int]()
    for _ in range(times):
        line = replay(PROBLEM, candidate.plan.steps)
        highest = max(
            (s for s in line.steps if str(s) not in more),
            key=lambda s: line.live_bytes[line.steps.index(s)],
        )
        more[str(highest)] = 1 + aim - line.live_bytes[line.steps.index(highest)]
        shown = showing(candidate, more)
        assert shown.peak_bytes > aim
        candidate = proposals.send(shown)
        assert candidate.order != "planned"
    assert showing(candidate, more).peak_bytes <= aim


@pytest.mark.parametrize(("more", "kept"), [(0, True), (1, False)])
def test_a_plan_that_still_comes_as_near_is_kept(more: int, kept: bool) -> None:
    """Though more is known of its problem; it is not planned anew."""
    aim = round(0.8 * planning().solve(PROBLEM, None).peak_bytes)
    plan = planning().solve(PROBLEM, aim)
    line = replay(PROBLEM, plan.steps)
    highest = line.steps[line.live_bytes.index(plan.peak_bytes)]
    scratch = {
        str(highest): PROBLEM.op_of[str(highest)].workspace_bytes + aim - plan.peak_bytes + more
    }
    trial = Trial(lambda planned, order: planned + aim * (order == NEAR_PEAK), scratch=scratch)
    trial.follow(under(draft_of(PROBLEM), aim, planning()))
    assert (trial.asked[1].plan.steps == plan.steps) is kept
    if kept:
        assert trial.asked[1].plan.peak_bytes == aim


def test_plans_under_an_aim_know_what_a_rehearsal_has_shown() -> None:
    """The first that was tried would fit, but for scratch memory that nobody knew of."""
    aim = round(0.8 * planning().solve(PROBLEM, None).peak_bytes)
    trial = Trial(lambda planned, order: 500, scratch={PROBLEM.ops[5].name: 500})
    judged = trial.follow(under(draft_of(PROBLEM), aim, planning()))
    assert judged[0].plan.peak_bytes <= aim < 500 <= judged[1].plan.peak_bytes


@pytest.mark.parametrize("more", [False, True])
def test_what_fits_is_left_only_for_what_is_faster(more: bool) -> None:
    """The plan made anew, by what was learnt, takes as long: there is nothing to rehearse."""
    aim = round(0.8 * planning().solve(PROBLEM, None).peak_bytes)
    real = 0.5 if more else 0.99
    trial = Trial(lambda planned, order: round(real * planned))
    judged = trial.follow(under(draft_of(PROBLEM), aim, planning()))
    times = [one.plan.time_us for one in judged]
    assert all(later < first for first, later in pairwise(times))
    assert (len(judged) > 1) == more


def test_candidates_are_equal_only_by_variants_plan_and_order() -> None:
    draft, plan = draft_of(PROBLEM), planning().solve(PROBLEM, None)
    one = InsertedVariant("one", "rule", (), {}, {}, frozenset(), {}, frozenset())
    candidates = [
        Candidate(draft, plan, NEAR_PEAK),
        Candidate(draft, plan, "planned"),
        Candidate(draft, planning().quick(PROBLEM, 0), NEAR_PEAK),
        Candidate(replace(draft, taken=(one,)), plan, NEAR_PEAK),
    ]
    assert len({each.key for each in candidates}) == len(candidates)
    assert candidates[0].key == Candidate(draft_of(PROBLEM), plan, NEAR_PEAK).key


def test_every_solver_is_asked_for_itself() -> None:
    asked = planning("moments")
    solvers = [asked.quick(PROBLEM, 100).solver, asked.solve(PROBLEM, 100).solver]
    assert solvers == [QUICK_SOLVER, "moments"]


def test_learnt_workspaces_reach_ops_by_name_and_nothing_else() -> None:
    ops = Op("f", (), ("a",), 1.0, 10), Op("g", ("a",), ("b",), 1.0, 20)
    problem = Problem("two", (Value("a", 1), Value("b", 1)), ops, outputs=("b",))
    told = Learnt({"g": 2, "unknown": 9}).told(problem)
    assert [op.workspace_bytes for op in told.ops] == [10, 2]
    assert Learnt({"g": 20}).told(problem) is problem


@given(st.lists(st.integers(-20, 20), min_size=32, max_size=32), st.floats(0.4, 1.0))
def test_any_errors_of_the_planner(errors: list[int], share: float) -> None:
    """Candidates differ, are few, and one that is under the aim is not left for a slower one."""
    aim = round(share * planning().solve(PROBLEM, None).peak_bytes)
    trial = Trial(lambda planned, order: planned + errors[planned % 32] + (order == NEAR_PEAK))
    trial.follow(under(draft_of(PROBLEM), aim, planning()))
    keys = [one.key for one in trial.asked]
    assert len(keys) <= 40
    planned_only = [one for one in trial.asked if one.order == "planned"]
    assert len({one.key for one in planned_only}) == len(planned_only)
    best = within(trial, aim)
    for one in trial.judged:
        if best is not None and one.peak_bytes <= aim:
            assert best.plan.time_us <= one.plan.time_us

"""The search for a plan whose real peak is under the budget, with peaks made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from fxremat.compiling.fitting import (
    CLOSE_ENOUGH,
    LOWEST_PERCENT,
    MAX_REHEARSALS,
    Run,
    Split,
    _Search,
    fit,
)
from fxremat.core.plan import Plan

BUDGET = 1000


@dataclass
class Known:
    """A run whose plans are known: (planner's peak, real peak), cheapest first.

    The first recomputes nothing; each has a smaller peak for the planner than the one before.
    """

    peaks: list[tuple[int, int]]
    loose: int = 0  # how much more the same plan takes in Inductor's own order
    rehearsed: list[int] = field(default_factory=list)
    held: list[bool] = field(default_factory=list)

    def plan(self, index: int) -> Plan:
        return Plan((f"plan {index}",), "known", None, self.peaks[index][0], 100.0 + index)

    def solve(self, budget: int, solver: str | None = None) -> Plan:
        """The cheapest plan under the budget, or that of least peak."""
        fits = [i for i, (model, _) in enumerate(self.peaks) if model <= budget]
        return self.plan(min(fits, default=len(self.peaks) - 1))

    def split(self, plan: Plan, hold: bool) -> Split:
        index = int(plan.ops[0].split()[1])
        self.rehearsed.append(index)
        self.held.append(hold)
        rewritten: Any = SimpleNamespace(recomputed=("op",) if index else ())
        nothing = fx.GraphModule({}, fx.Graph())
        peak = self.peaks[index][1] + (0 if hold else self.loose)
        return Split(nothing, nothing, plan, rewritten, peak, None)


def search(known: Known) -> Split:
    """What the pipeline does after the first plan."""
    found = _Search(cast(Run, known), BUDGET).fit(known.solve(BUDGET))
    tried = list(zip(known.rehearsed, known.held, strict=True))
    assert len(tried) == len(set(tried)) <= MAX_REHEARSALS + 2 + len(LOWEST_PERCENT)
    return found


def cheapest(known: Known) -> tuple[str, ...]:
    """The steps of the cheapest plan that is really under the budget."""
    return known.plan(min(i for i, (_, r) in enumerate(known.peaks) if r <= BUDGET)).ops


def offset(by: int) -> Known:
    """Real peaks that are all off by the same."""
    return Known([(model, model + by) for model in range(2000, 400, -50)])


@pytest.mark.parametrize("by", [-430, -70, 0, 70, 430])
def test_a_constant_error_is_learnt_at_once(by: int) -> None:
    known = offset(by)
    assert search(known).plan.steps == cheapest(known)
    assert len(known.rehearsed) <= 4


def test_the_order_is_held_only_where_it_must_be() -> None:
    fits = Known([(2000, 2000), (990, 900), (500, 400)], loose=50)
    search(fits)
    assert fits.held == [False]
    misses = Known([(2000, 2000), (990, 985), (500, 400)], loose=50)
    assert search(misses).peak_bytes == 985
    assert misses.held == [False, True]


def test_a_plan_found_with_its_order_held_is_tried_without() -> None:
    """The first plan misses both ways; the second fits, and does so in Inductor's order too."""
    known = Known([(2000, 2000), (1000, 1200), (790, 700), (500, 400)], loose=100)
    assert search(known).peak_bytes == 800
    assert (known.rehearsed, known.held) == ([1, 1, 2, 2], [False, True, True, False])


def test_a_plan_close_below_the_budget_is_good_enough() -> None:
    known = Known([(1200, 1100), (995, int((1 - CLOSE_ENOUGH) * BUDGET)), (500, 500)])
    assert search(known).plan.steps == ("plan 1",)
    assert known.rehearsed == [1]


def test_nothing_is_gained_where_nothing_is_recomputed() -> None:
    known = Known([(600, 500), (300, 200)])
    assert search(known).plan.steps == ("plan 0",)
    assert known.rehearsed == [0]


def test_between_too_much_and_enough_the_gap_is_halved() -> None:
    """The real peak jumps: by as much as it misses, one lands far below."""
    known = Known([(m, m + 300 if m > 880 else m - 300) for m in range(1500, 100, -20)])
    found = search(known)
    assert found.plan.steps == cheapest(known)
    assert found.plan.peak_bytes == 880


def test_a_real_peak_that_hardly_moves_is_left_in_long_steps() -> None:
    """Each step down by as much as is missed would stay on the plain for all the rehearsals."""
    plain = [(model, 1002) for model in range(990, 890, -1)]
    known = Known([(2000, 2000), *plain, (500, 900)], loose=300)
    assert search(known).peak_bytes == 900
    assert len(known.rehearsed) <= MAX_REHEARSALS


def test_the_line_through_the_last_two_plans_leads_to_the_budget() -> None:
    """The real peak falls by a fourth of what the planned one does."""
    known = Known([(model, 800 + model // 4) for model in range(2000, 400, -4)])
    found = search(known)
    assert (1 - CLOSE_ENOUGH) * BUDGET <= found.peak_bytes <= BUDGET
    assert known.rehearsed == sorted(known.rehearsed)
    assert len(known.rehearsed) <= 5


def test_an_order_that_costs_more_than_there_is_left_is_not_tried_again() -> None:
    known = Known([(2000, 2000), (1000, 1200), (790, 990), (500, 400)], loose=100)
    assert search(known).peak_bytes == 990
    assert (known.rehearsed, known.held) == ([1, 1, 2], [False, True, True])


def test_of_the_plans_of_least_peak_only_those_that_might_be_lowest_are_tried() -> None:
    """The second would have to take less than it plans for, as the first does not."""
    known = Known([(3000, 3000), (2380, 2400), (2150, 2200), (2000, 2100)])
    assert search(known).peak_bytes == 2100
    assert 1 not in known.rehearsed
    short = Known([(3000, 3000), (2380, 1900), (2150, 1850), (2000, 2000 - 300)])
    assert search(short).peak_bytes == 1700


def test_the_plan_of_least_peak_has_the_last_word() -> None:
    """Where no plan tried is under the budget it decides, also about failing."""
    fits = Known([(m, 1500 - m // 100) for m in range(1500, 100, -20)] + [(100, 900)])
    assert search(fits).plan.steps == fits.plan(len(fits.peaks) - 1).steps
    misses = Known([(m, 1500) for m in range(1500, 100, -20)])
    found = search(misses)
    assert found.plan.steps == misses.plan(len(misses.peaks) - 1).steps
    assert found.peak_bytes > BUDGET


def test_what_was_planned_before_anything_was_learnt_may_be_lower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By what is known now its planned peak is 2050, and its real one the lowest of all."""
    known = Known([(3000, 3000), (2000, 2100), (1000, 2090)])
    before: Any = SimpleNamespace()
    run = SimpleNamespace(
        solve=lambda budget, solver=None: known.plan(1),
        split=known.split,
        answer=lambda budget, solver, problem: known.plan(2) if problem is before else None,
        checked=lambda plan: plan,
        found=SimpleNamespace(problem=None),
    )
    replayed = SimpleNamespace(peak_bytes=2050)
    monkeypatch.setattr("fxremat.compiling.fitting.replay", lambda _problem, _steps: replayed)
    found = _Search(cast(Run, run), BUDGET, hold=True, before=before).least()
    assert (found.peak_bytes, found.plan.peak_bytes) == (2090, 2050)


@pytest.mark.parametrize("executor", ["inductor", "aot_eager"])
def test_the_solver_that_was_asked_for_may_find_less_than_the_quick_one(executor: str) -> None:
    """Whatever the budget, asked for the least it gives the same."""
    known = Known([(3000, 3000), (2000, 2000), (1500, 1500)])
    asked: list[tuple[int, str | None]] = []

    def solve(budget: int, solver: str | None = None) -> Plan:
        asked.append((budget, solver))
        return known.plan(2 if (budget, solver) == (0, None) else 1)

    run: Any = run_of(known)
    run.request.executor, run.solve = executor, solve
    split = _Search(run, BUDGET).least() if executor == "inductor" else fit(run)[0]
    assert split.peak_bytes == 1500
    assert asked[-1] == (0, None)


@given(
    st.lists(st.integers(1, 1500), min_size=1, max_size=40, unique=True),
    st.lists(st.integers(-300, 300), min_size=40, max_size=40),
)
def test_any_errors(models: list[int], errors: list[int]) -> None:
    """The cheapest of the plans tried; under the budget where the one of least peak is."""
    models.sort(reverse=True)
    known = Known([(m, max(0, m + e)) for m, e in zip(models, errors, strict=False)])
    found = search(known)
    tried = [i for i in known.rehearsed if known.peaks[i][1] <= BUDGET]
    assert found.plan.steps == known.plan(min(tried, default=len(models) - 1)).steps
    assert found.peak_bytes <= BUDGET or known.peaks[-1][1] > BUDGET


def test_a_plan_far_above_the_budget_is_rehearsed_in_its_order_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fxremat.compiling.fitting._learn", lambda _run, _shown: None)
    known = Known([(3000, 3000), (2000, 2100)], loose=500)
    split, rehearsals = fit(run_of(known))
    assert (split.peak_bytes, rehearsals) == (2100, 1)
    assert known.held == [True]


@pytest.mark.parametrize("learns", [True, False])
def test_a_plan_that_stays_the_same_is_rehearsed_once(
    learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first rehearsal teaches of scratch memory changes the problem, not the graphs."""
    monkeypatch.setattr(
        "fxremat.compiling.fitting._learn", lambda _run, _shown: "before" if learns else None
    )
    known = Known([(900, 950)])
    split, rehearsals = fit(run_of(known))
    assert split.plan.peak_bytes == 900
    assert known.rehearsed == [0]
    assert rehearsals == 1


def run_of(known: Known) -> Run:
    """A run of these plans under Inductor."""
    request = SimpleNamespace(wanted_bytes=None, executor="inductor")
    run: Any = SimpleNamespace(
        request=request, budget=BUDGET, solve=known.solve, split=rehearsed(known)
    )
    return cast(Run, run)


def rehearsed(known: Known) -> Callable[[Plan, bool], Split]:
    """Splits that say that they were rehearsed."""
    return lambda plan, hold: replace(known.split(plan, hold), rehearsal=cast(Any, object()))

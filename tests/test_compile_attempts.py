"""Which candidate the search ends with, where peaks are made up."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from fxremat.compile.request import Budget, Policy, Request
from fxremat.compile.search.candidates import Candidate
from fxremat.compile.search.planning import Planning
from fxremat.compile.search.search import Search
from fxremat.compile.stage_times import StageTimes
from fxremat.core.plan import Plan
from tests.search_trials import NEAR_PEAK, PROBLEM, Trial, draft_of


@dataclass
class Alone(Search):
    """A search over one graph without variants, with a partition of torch that is made up."""

    own: Plan | None = None
    asked_of_torch: list[bool] = field(default_factory=list)

    def _torch(self, *, donated: bool) -> Candidate | None:
        self.asked_of_torch.append(donated)
        order = "torch, donated" if donated else "torch"
        return None if self.own is None else Candidate(self.graphs.plain, self.own, order)  # type: ignore[arg-type]


def searching(
    trial: Trial, budget: int, own: Plan | None = None, wanted: int | None = None
) -> Alone:
    request = Request(Budget(budget, soft_limit=wanted), policy=Policy(solver="greedy"))
    planning = Planning(request, StageTimes())
    evaluator: Any = trial
    graphs: Any = SimpleNamespace(plain=draft_of(PROBLEM), offered=None)
    return Alone(planning, evaluator, graphs, own=own)


def plan_under(part: float) -> Plan:
    whole = Planning(Request(policy=Policy(solver="greedy")), StageTimes())
    full = whole.solve(PROBLEM, None).peak_bytes
    return whole.solve(PROBLEM, int(part * full))


@pytest.mark.parametrize(
    ("time", "peak", "order"), [(0.99, 0, "torch"), (1.01, 0, NEAR_PEAK), (0.99, 1, NEAR_PEAK)]
)
def test_torchs_partition_is_taken_where_it_is_faster_and_fits(
    time: float, peak: int, order: str
) -> None:
    """Never the one whose buffers are donated: something else fits."""
    best = plan_under(0.7)
    own = replace(best, time_us=time * best.time_us, steps=(*best.steps, best.steps[0]))
    budget = best.peak_bytes

    def real(planned: int, order: str) -> int:
        return budget + peak if order == "torch" else planned

    search = searching(Trial(real), budget, own)
    found = search.run()
    assert found.evaluation.candidate.order == order
    assert not found.over
    assert search.asked_of_torch == [False]


def test_the_least_that_is_named_is_of_candidates_that_no_budget_changes() -> None:
    """Not of those that were made for the budget, though one of them takes less."""
    least = plan_under(0.0).peak_bytes
    budget = int(1.05 * least)

    def real(planned: int, order: str) -> int:
        if order == NEAR_PEAK and planned > least:
            return budget + 1
        return planned + (2000 if order == NEAR_PEAK else 1000)

    trial = Trial(real)
    found = searching(trial, budget).run()
    assert NEAR_PEAK in trial.orders
    assert found.over
    assert found.evaluation.candidate.order == "planned"
    assert found.evaluation.peak_bytes == least + 1000


def test_what_is_within_the_budget_is_not_taken_where_less_is_wanted_and_found() -> None:
    wanted = plan_under(0.7).peak_bytes
    more = wanted // 50
    trial = Trial(lambda planned, order: planned + more * (order == NEAR_PEAK))
    found = searching(trial, 2 * wanted, wanted=wanted).run()
    assert trial.seen[0].peak_bytes == wanted + more
    assert found.evaluation.candidate.order == "planned"
    assert found.evaluation.peak_bytes <= wanted


def test_a_part_of_a_step_is_taken_as_soon_as_it_is_near_what_is_wanted() -> None:
    wanted = plan_under(0.7).peak_bytes
    trial = Trial(lambda planned, order: planned + 1)
    found = searching(trial, 2 * wanted, wanted=wanted).run()
    assert [one.peak_bytes for one in trial.seen] == [wanted + 1]
    assert found.evaluation is trial.seen[0]

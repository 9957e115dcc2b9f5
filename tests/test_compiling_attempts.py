"""Which candidate the search ends with, where the judge's peaks are made up."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from fxremat.compiling.draft import Draft
from fxremat.compiling.request import Request
from fxremat.compiling.searching.candidates import Candidate, Judged
from fxremat.compiling.searching.planning import Planning
from fxremat.compiling.searching.search import Search
from fxremat.compiling.stage_times import StageTimes
from fxremat.core.plan import Plan
from tests.trial_judge import PROBLEM, Trial, draft_of


@dataclass
class Alone(Search):
    """A search over one graph without variants, with a partition of torch that is made up."""

    own: Plan | None = None
    asked_of_torch: list[bool] = field(default_factory=list)

    def draft(self, names: tuple[str, ...], variants: Any = None) -> Draft:
        """The one graph."""
        return self.prepared

    def _variants(self, *, allow_lossy: bool) -> None:
        return None

    def _torch(self, *, donated: bool) -> Candidate | None:
        self.asked_of_torch.append(donated)
        order = "torch, donated" if donated else "torch"
        return None if self.own is None else Candidate(self.prepared, self.own, order)  # type: ignore[arg-type]


class JudgeOfTrials(Trial):
    """The judge that the search asks."""

    @property
    def seen(self) -> list[Judged]:
        """All that was judged."""
        return self.judged


def searching(trial: Trial, budget: int, own: Plan | None = None) -> Alone:
    planning = Planning(Request(solver="greedy", budget_bytes=budget), StageTimes())
    judge: Any = trial
    return Alone(cast(Any, None), planning, judge, draft_of(PROBLEM), own=own)


def plan_under(part: float) -> Plan:
    whole = Planning(Request(solver="greedy"), StageTimes())
    full = whole.solve(PROBLEM, None).peak_bytes
    return whole.solve(PROBLEM, int(part * full))


@pytest.mark.parametrize(
    ("time", "peak", "order"), [(0.99, 0, "torch"), (1.01, 0, "inductor"), (0.99, 1, "inductor")]
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

    search = searching(JudgeOfTrials(real), budget, own)
    found = search.run()
    assert found.judged.candidate.order == order
    assert not found.over
    assert search.asked_of_torch == [False]


def test_the_least_that_is_named_is_of_candidates_that_no_budget_changes() -> None:
    """Not of those that were made for the budget, though one of them takes less."""
    least = plan_under(0.0).peak_bytes
    budget = int(1.05 * least)

    def real(planned: int, order: str) -> int:
        return budget + 1 if order == "inductor" else planned + 1000

    trial = JudgeOfTrials(real)
    found = searching(trial, budget).run()
    assert "inductor" in trial.orders
    assert found.over
    assert found.judged.candidate.order == "planned"
    assert found.judged.peak_bytes == least + 1000

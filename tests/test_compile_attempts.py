"""Which candidate the search ends with, where peaks are made up."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from fxremat.compile.constants import OUT_OF_REACH
from fxremat.compile.draft import Draft
from fxremat.compile.request import Budget, Policy, Request
from fxremat.compile.search.candidates import Candidate
from fxremat.compile.search.planning import Planning
from fxremat.compile.search.search import Search
from fxremat.compile.search.variant_sets import VariantSet, with_doubt
from fxremat.compile.stage_times import StageTimes
from fxremat.core.constants import TIME_DOUBT
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem, Value, Variant
from fxremat.core.variants import take
from tests.search_trials import NEAR_PEAK, PROBLEM, Trial, draft_of
from tests.variant_problem import LOSS_PROBLEM


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


def searching(
    trial: Trial, budget: int, own: Plan | None = None, wanted: int | None = None
) -> Alone:
    request = Request(Budget(budget, soft_limit=wanted), policy=Policy(solver="greedy"))
    planning = Planning(request, StageTimes())
    evaluator: Any = trial
    return Alone(cast(Any, None), planning, evaluator, draft_of(PROBLEM), own=own)


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


@pytest.mark.parametrize(("above", "tried"), [(0, True), (2, False)])
def test_a_partition_of_torch_that_is_far_too_large_is_not_tried(
    above: int, tried: bool
) -> None:
    best = plan_under(0.7)
    much = int(OUT_OF_REACH * best.peak_bytes) + above
    own = replace(best, time_us=best.time_us / 2, peak_bytes=much)
    trial = Trial(lambda planned, order: planned)
    found = searching(trial, best.peak_bytes, own).run()
    assert ("torch" in trial.orders) is tried
    assert found.evaluation.candidate.order == NEAR_PEAK


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
    trial = Trial(lambda planned, order: planned + (order == NEAR_PEAK))
    found = searching(trial, 2 * wanted, wanted=wanted).run()
    assert trial.seen[0].peak_bytes == wanted + 1
    assert found.evaluation.candidate.order == "planned"
    assert found.evaluation.peak_bytes <= wanted


@pytest.mark.parametrize(("above", "tried"), [(0, True), (2, False)])
def test_torchs_partition_is_no_least_peak_where_its_plan_is_far_too_large(
    above: int, tried: bool
) -> None:
    least = plan_under(0.0)
    own = replace(least, peak_bytes=int(OUT_OF_REACH * least.peak_bytes) + above)
    trial = Trial(lambda planned, order: planned)
    assert searching(trial, least.peak_bytes - 1, own).run().over
    assert ("torch, donated" in trial.orders) is tried


def test_a_variant_has_to_save_more_than_times_may_be_wrong_by() -> None:
    """Its ops take longer in the choice; what it stands for takes what was measured."""
    doubted = with_doubt(LOSS_PROBLEM)
    assert doubted.ops == LOSS_PROBLEM.ops
    assert doubted.base_time_us == LOSS_PROBLEM.base_time_us
    for before, after in zip(LOSS_PROBLEM.variants, doubted.variants, strict=True):
        assert after.outputs == before.outputs
        for old, new in zip(before.ops, after.ops, strict=True):
            assert new == replace(old, time_us=old.time_us * (1 + TIME_DOUBT))


# --- variants that are made up ---------------------------------------------------------------


class Choosing(Alone):
    """A search over a problem that has variants."""

    def draft(self, names: tuple[str, ...], variants: Any = None) -> Draft:
        """The graph with these taken."""
        if names not in self.drafts:
            problem = self.prepared.estimate.problem
            self.drafts[names] = draft_of(take(problem, names))
        return self.drafts[names]

    def _variants(self, *, allow_lossy: bool) -> VariantSet:  # type: ignore[override]
        return VariantSet((), self.prepared.estimate)


def choosing(problem: Problem, trial: Trial, budget: int) -> Choosing:
    planning = Planning(Request(Budget(budget), policy=Policy(solver="greedy")), StageTimes())
    evaluator: Any = trial
    return Choosing(cast(Any, None), planning, evaluator, draft_of(problem))


@pytest.mark.parametrize(("less", "fits"), [(0, True), (1, False)])
def test_variants_are_chosen_for_the_least_that_they_take(less: int, fits: bool) -> None:
    search = choosing(LOSS_PROBLEM, Trial(lambda planned, order: planned), 1)
    least = search.planning.local_search(LOSS_PROBLEM, 0)
    assert least.variants == ("chunks",)
    offered = search._variants(allow_lossy=False)
    chosen = search._chosen(LOSS_PROBLEM, least.peak_bytes - less, offered)
    assert (chosen is not None) == fits


def in_two_ways() -> Problem:
    """A loss in chunks, or in parts that take a little more."""
    chunks = LOSS_PROBLEM.variants[0]
    parts = Variant(
        "parts",
        ops=tuple(
            replace(
                op,
                name=op.name.replace("chunks", "parts"),
                writes=tuple(name.replace("2", "3") for name in op.writes),
                workspace_bytes=op.workspace_bytes + 10,
            )
            for op in chunks.ops
        ),
        outputs=tuple((old, new.replace("2", "3")) for old, new in chunks.outputs),
    )
    values = (*LOSS_PROBLEM.values, Value("loss3", 4), Value("dx3", 10))
    return replace(LOSS_PROBLEM, values=values, variants=(chunks, parts))


@pytest.mark.parametrize(("shown", "others"), [({}, []), ({"dx_in_chunks": 5000}, ["parts"])])
def test_variants_of_least_peak_are_chosen_anew_by_what_was_shown(
    shown: dict[str, int], others: list[str]
) -> None:
    """A call of the first choice takes much more than was known."""
    more = max(shown.values(), default=0)
    trial = Trial(lambda planned, order: planned + more, scratch=shown)
    search = choosing(in_two_ways(), trial, 1)
    assert search.run().over
    assert list(search.drafts) == [(), ("chunks",), *((name,) for name in others)]

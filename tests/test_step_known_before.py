"""A step that was planned as one is known when the program runs again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fxremat
from fxremat.compat.configuration import cache_directory
from fxremat.compile.request import Request
from fxremat.step.graph import CompiledVersion, Graph
from fxremat.step.versions import KnownVersions
from tests import test_step_planned
from tests.end_to_end import QUICK
from tests.test_step_planned import Case, TwoBreaks, blocks, eager_between, two_breaks

INDUCTOR = {"solver": "greedy", "variants": "none", "op_times": "roofline"}

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("ignore::fxremat.PromiseBroken", "ignore::fxremat.BudgetExceeded"),
]


apart = eager_between.__wrapped__
"""Not shared with other tests: modules that were frozen between tests are not found again."""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Graph, Request]]:
    """Each graph that is compiled, and what was asked of it."""
    asked, real = list[tuple[Graph, Request]](), Graph._compiled

    def counted(graph: Graph, request: Request) -> CompiledVersion:
        asked.append((graph, request))
        return real(graph, request)

    monkeypatch.setattr(Graph, "_compiled", counted)
    return asked


class Longer(TwoBreaks):
    """The first graph is that of `TwoBreaks`, and more follows."""

    def __init__(self) -> None:
        super().__init__()
        self.more = blocks(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        x = self.blocks[2](self.blocks[1](x))
        torch._dynamo.graph_break()
        loss: Tensor = self.more(self.blocks[3](x)).square().mean()
        return loss


def test_the_first_step_takes_what_was_offered_and_does_not_look_for_better(
    compiled: list[tuple[Graph, Request]],
) -> None:
    """Until all graphs are known; then each is planned as well as one that is alone."""
    case = two_breaks()
    budget = case.budget(75)
    compiled.clear()
    assert case.kept(budget) <= budget
    asked = [request.policy for _, request in compiled]
    assert [(one.solver, one.taken) for one in asked[:2]] == [("quick", ())] * 2
    assert {(one.solver, one.taken) for one in asked[2:]} == {(QUICK["solver"], None)}


@pytest.mark.parametrize("make", [two_breaks, apart])
def test_later_runs_begin_with_the_plan_of_the_whole_step(
    make: Callable[[], Case], compiled: list[tuple[Graph, Request]]
) -> None:
    """No graph is compiled a second time, and each takes what it took in the run before."""
    case = make()
    budget = case.budget(80)
    compiled.clear()
    before = case.kept(budget)
    first = {request for _, request in compiled}
    assert len(compiled) > len({id(graph) for graph, _ in compiled})
    compiled.clear()
    assert case.kept(budget) == before
    assert len(compiled) == len({id(graph) for graph, _ in compiled})
    assert {request for _, request in compiled} <= first


def test_torchs_cache_answers_for_what_was_compiled_in_a_later_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Graphs that are compiled again outside of Dynamo are to it those that Dynamo gives."""
    monkeypatch.setattr(test_step_planned, "QUICK", INDUCTOR)
    case = two_breaks()
    budget = case.budget(80)
    before = case.kept(budget)
    assert len(fxremat.reports()) > 3
    assert case.kept(budget) == before
    assert [report.from_cache for report in fxremat.reports()] == [True] * 3


def test_a_step_that_goes_on_otherwise_than_before_is_planned_anew(
    compiled: list[tuple[Graph, Request]],
) -> None:
    """Its first graph is that of another program, and takes what that took until all is known."""
    longer, case = two_breaks(Longer), two_breaks()
    budget = longer.budget(70)
    case.kept(budget)
    compiled.clear()
    longer.kept(budget)
    assert len(compiled) > 3


def test_what_was_known_is_left_where_it_is_refused_or_spoiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Then the step is planned as in a first run."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    case, real = two_breaks(), KnownVersions.recalled
    budget = case.budget(80)
    before = case.kept(budget)

    def too_tight(signature: str, request: Request) -> KnownVersions | None:
        found = real(signature, request)
        if found is None:
            return None
        offers = (replace(one, peak_bytes=0, tight=True, asked_as=None) for one in found.offers)
        return replace(found, offers=tuple(offers))

    monkeypatch.setattr(KnownVersions, "recalled", too_tight)
    assert case.kept(budget) == before
    monkeypatch.setattr(KnownVersions, "recalled", real)
    files = [*(cache_directory() / "steps").glob("*.json")]
    assert files
    for file in files:
        file.write_text(file.read_text().replace("of_run", "run"))
    assert case.kept(budget) == before

"""The arena of a training loop: taken for planned steps, and never in the way of others."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.memory.arena import Arena
from fxremat.step import scope as scopes
from tests.small import Block

BUDGET = "6MiB"
OPTIONS: dict[str, Any] = {
    "memory_budget": BUDGET, "solver": "greedy", "variants": "none", "arena": True,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("fresh_budgets")


class Trained:
    """A model, its inputs, and the loss of it compiled within a budget."""

    def __init__(self, budget: str = BUDGET) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block(64) for _ in range(4)))
        self.x = torch.randn(1024, 64)
        given = {**OPTIONS, "memory_budget": budget}
        self.call: Any = torch.compile(self.loss, backend="fxremat", options=given)

    def loss(self, x: Tensor) -> Tensor:
        found: Tensor = self.model(x).square().mean()
        return found

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.call(self.x).backward()

    def evaluate(self) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.call(self.x)
        return found

    def gradients(self) -> list[Tensor]:
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def peak_bytes(self, run: Any) -> int:
        self.model.zero_grad(set_to_none=True)
        return fxremat.measure_peak(run, held=(self.model, self.x)).peak_bytes

    @property
    def arena(self) -> Arena:
        (scope,) = scopes._SCOPES.values()
        assert scope.own.arena is not None
        return scope.own.arena


def test_the_peak_is_as_predicted_with_the_arena_held() -> None:
    trained = Trained()
    trained.step()
    first = trained.gradients()
    for _ in range(3):
        trained.step()
        assert all(map(torch.equal, first, trained.gradients()))
    assert trained.arena.nbytes > 0
    assert (trained.arena.conflicts, trained.arena.differences, trained.arena.missed) == (0, 0, 0)
    (report,) = fxremat.reports()
    assert trained.peak_bytes(trained.step) == report.predicted_peak_bytes


def test_the_block_that_is_given_back_is_gone() -> None:
    """No half keeps it alive: a peak measured later counts it again, and an evaluation has it."""
    trained = Trained()
    for _ in range(3):
        trained.step()
    peaks = [trained.peak_bytes(trained.step) for _ in range(3)]
    (report,) = fxremat.reports()
    assert peaks == [report.predicted_peak_bytes] * 3
    block = weakref.ref(trained.arena.block)
    trained.model.zero_grad(set_to_none=True)
    trained.evaluate()
    assert block() is None


def test_graphs_of_two_shapes_have_the_arena_in_turn() -> None:
    """Where they would keep too much together, each gives back all that it has to the next."""
    trained = Trained()
    trained.call = torch.compile(trained.loss, backend="fxremat", options=OPTIONS, dynamic=False)
    whole, half = trained.x, trained.x[:512].clone()

    def steps(x: Tensor) -> tuple[list[Tensor], int]:
        trained.x = x
        for _ in range(3):
            trained.step()
        return trained.gradients(), trained.arena.nbytes

    found = [steps(x) for x in (whole, half)]
    (scope,) = scopes._SCOPES.values()
    needed = sorted(graph.layout.arena_bytes for graph in scope.graphs)
    assert found[1][1] == needed[1] > needed[0] > 0
    scope.own.in_turn = True
    again = [steps(x) for x in (whole, half)]
    assert sorted(nbytes for _, nbytes in again) == needed
    for (one, _), (other, _) in zip(found, again, strict=True):
        assert all(map(torch.equal, one, other))
    assert (trained.arena.conflicts, trained.arena.missed) == (0, 0)


def test_an_evaluation_has_the_bytes_of_the_arena() -> None:
    trained = Trained()
    for _ in range(3):
        trained.step()
    before, taken = trained.gradients(), trained.arena.nbytes
    trained.model.zero_grad(set_to_none=True)
    trained.evaluate()
    assert trained.arena.nbytes == 0
    peak = trained.peak_bytes(trained.evaluate)
    assert peak <= fxremat.reports()[-1].predicted_peak_bytes
    trained.step()
    assert trained.arena.nbytes == taken
    assert all(map(torch.equal, before, trained.gradients()))
    assert trained.arena.conflicts == 0


def test_gradients_that_live_on_are_planned_for_before_the_forward() -> None:
    """Two micro-batches: the budget is kept from the first iteration on that has both."""
    trained = Trained("6MiB")

    def iteration() -> None:
        trained.step()
        trained.call(trained.x).backward()

    iteration()
    reports = fxremat.reports()
    assert len(reports) == 2
    weights = sum(p.nbytes for p in trained.model.parameters())
    assert reports[1].held_bytes - reports[0].held_bytes == weights
    for _ in range(3):
        assert trained.peak_bytes(iteration) <= 6 * 2**20
    assert len(fxremat.reports()) == 2
    doubled = trained.gradients()
    trained.step()
    for one, two in zip(trained.gradients(), doubled, strict=True):
        torch.testing.assert_close(2 * one, two)

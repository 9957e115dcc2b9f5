"""Graphs that share a budget: which ones do, and for how long they count."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from fxremat.step import scope
from tests.small import Stack, seeded

QUICK: dict[str, Any] = {"executor": "aot_eager", "solver": "greedy"}
BUDGET = "64MiB"


pytestmark = pytest.mark.usefixtures("fresh_budgets")


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="fxremat", options={**QUICK, **options})


def test_a_budget_is_the_same_however_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """By equal options, in other words, or by the environment; another number is another one."""
    monkeypatch.setenv("FXREMAT_MEMORY_BUDGET", BUDGET)
    calls = [
        compiled(nn.Linear(8, 8), memory_budget=BUDGET),
        compiled(nn.Linear(8, 9), memory_budget=BUDGET),
        compiled(nn.Linear(8, 10), memory_budget=64 * 2**20),
        compiled(nn.Linear(8, 11)),
    ]
    for call in calls:
        call(torch.ones(4, 8)).sum().backward()
    [only] = scope._SCOPES.values()
    assert len(only.graphs) == len(calls)
    assert len(only.given.parameters) == 2 * len(calls)
    compiled(nn.Linear(8, 12), memory_budget="65MiB")(torch.ones(4, 8)).sum().backward()
    assert len(scope._SCOPES) == 2


def test_what_is_gone_counts_no_longer() -> None:
    """A model, what it was given, and a forward that waits, whoever else goes on."""
    model, x = seeded(Stack, 64, 32)
    waiting = compiled(model, memory_budget=BUDGET)(x)
    other = nn.Linear(8, 8)
    compiled(other, memory_budget=BUDGET)(torch.ones(4, 8)).sum().backward()
    [only] = scope._SCOPES.values()

    def neighbours() -> scope.Neighbours:
        return only.neighbours((0, None), other.parameters(), (), torch.device("cpu"), 1)

    before = neighbours()
    assert before.resident >= sum(weight.nbytes for weight in model.parameters())
    assert before.batch >= x.nbytes
    assert before.waiting > 0
    assert len(only.graphs) == 2
    del waiting
    gc.collect()
    assert not only.waiting
    assert neighbours().waiting == 0
    del model, x
    gc.collect()
    after = neighbours()
    assert (after.resident, after.batch, after.waiting) == (0, 0, 0)
    assert len(only.given.parameters) == 2


def trained() -> scope.BudgetScope:
    model, x = seeded(Stack, 64, 32)
    compiled(model, memory_budget=BUDGET)(x).sum().backward()
    [only] = scope._SCOPES.values()
    assert only.graphs
    return only


def test_graphs_are_gone_with_the_code_that_runs_them() -> None:
    """Dynamo keeps that code longer than its modules; such a graph holds nothing."""
    only = trained()
    gc.collect()
    assert not only.given.parameters
    assert not only.given.batch
    torch._dynamo.reset()
    gc.collect()
    assert not only.graphs


def test_what_only_garbage_holds_while_it_compiles_is_not_planned_for() -> None:
    """Dynamo leaves cycles behind that hold results until Python collects them."""
    at_hand = []
    for keep in (False, True):
        torch._dynamo.reset()
        model = nn.Linear(8, 8)
        result = compiled(model, memory_budget=BUDGET)(torch.ones(4, 8))
        loss, cycle = result.sum(), [result]
        cycle.append(cycle)
        at_hand += [result] if keep else []
        del result, cycle
        loss.backward()
        [only] = scope._SCOPES.values()
        assert [one.holds for one in only.order if one.phase == "forward"] == [keep]
        scope.forget()

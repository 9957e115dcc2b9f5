"""Jagged nested tensors train within a budget: the lengths of their rows are no size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat

pytestmark = pytest.mark.usefixtures("fresh")


def rows(count: int) -> Tensor:
    """Three rows of so many words in all."""
    offsets = torch.tensor([0, 5, 9, count])
    jagged: Tensor = torch.nested.nested_tensor_from_jagged(torch.ones(count, 8), offsets)
    return jagged


def gradients(model: nn.Module, **how: Any) -> list[Tensor | None]:
    """After a batch of one length and one of another."""

    def loss(x: Tensor) -> Tensor:
        found: Tensor = model(x).values().square().mean()
        return found

    torch._dynamo.reset()
    run: Any = torch.compile(loss, **how)
    model.zero_grad(set_to_none=True)
    for count in (20, 30):
        run(rows(count)).backward()
    return [one.grad for one in model.parameters()]


@pytest.mark.filterwarnings("ignore:NestedTensor does not implement")
def test_a_jagged_batch_trains_under_a_budget() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    expected = gradients(model, backend="aot_eager")
    options = {"memory_budget": "64MiB", "executor": "aot_eager"}
    found = gradients(model, backend="fxremat", options=options)
    torch.testing.assert_close(found, expected)
    assert fxremat.reports()[-1].budget_bytes == 64 << 20

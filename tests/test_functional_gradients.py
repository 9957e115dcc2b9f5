"""Gradients that a compiled function takes itself: they are right, and nothing is planned."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import fxremat

pytestmark = pytest.mark.usefixtures("fresh")
OPTIONS: dict[str, Any] = {"memory_budget": "64MiB", "executor": "aot_eager"}


def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    found: Tensor = functional_call(MODEL, weights, (x,)).square().mean()
    return found


MODEL = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))


def whole(weights: dict[str, Tensor], x: Tensor) -> Any:
    return grad(loss)(weights, x)


def per_sample(weights: dict[str, Tensor], x: Tensor) -> Any:
    return vmap(grad(loss), (None, 0))(weights, x)


@pytest.mark.parametrize("function", [whole, per_sample])
def test_a_budget_without_effect_is_told(function: Any, caplog: pytest.LogCaptureFixture) -> None:
    weights = {name: one.detach() for name, one in MODEL.named_parameters()}
    x = torch.randn(6, 4)
    run: Any = torch.compile(function, backend="fxremat", options=OPTIONS)
    with caplog.at_level(logging.WARNING, "fxremat"):
        torch.testing.assert_close(run(weights, x), function(weights, x))
    told = [one for one in caplog.records if "takes gradients itself" in one.getMessage()]
    assert len(told) == 1
    assert not fxremat.reports()


def test_an_evaluation_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    run: Any = torch.compile(MODEL, backend="fxremat", options=OPTIONS)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "fxremat"):
        run(torch.randn(6, 4))
    assert not caplog.records

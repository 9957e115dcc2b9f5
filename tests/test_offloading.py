"""Weights in host memory for a number of bytes: chosen, compiled and trained."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from benchmarks import copying
from fxremat.runtime.host_memory import is_host
from tests.end_to_end import measured
from tests.small import Layers, Tied, seeded

SPEED = 2e9
RATE = int(SPEED)
OPTIONS: dict[str, Any] = {"executor": "aot_eager", "solver": "greedy", "host_bandwidth": RATE}


@pytest.fixture(autouse=True)
def _throttled() -> Iterator[None]:
    torch._dynamo.reset()
    with copying.set_copy_speed(SPEED, SPEED):
        yield
    torch._dynamo.reset()


def made() -> tuple[nn.Module, torch.Tensor]:
    return seeded(Layers, 8, 64)


def full_peak(model: nn.Module, x: torch.Tensor) -> int:
    return fxremat.explain(model, x, options=OPTIONS).store_all_peak_bytes


def train(model: nn.Module, call: Callable[..., Any], x: torch.Tensor, steps: int) -> list[float]:
    """The losses of some AdamW steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = call(x)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def on_host(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if is_host(p)]


def test_a_model_four_times_the_budget_trains_as_in_eager() -> None:
    """Parameters, gradients and activations together are four times what the device may hold."""
    model, x = made()
    budget = full_peak(model, x) // 4
    plain = copy.deepcopy(model)
    expected = train(plain, plain, x, 5)
    model = fxremat.offload(model, (x,), memory_budget=f"{budget}B", **OPTIONS)
    assert on_host(model)
    options = {**OPTIONS, "memory_budget": f"{budget}B"}
    assert train(model, torch.compile(model, backend="fxremat", options=options), x, 5) == expected
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_the_peak_is_the_predicted_one_and_within_the_budget() -> None:
    model, x = made()
    budget = full_peak(model, x) // 3
    fxremat.offload(model, (x,), memory_budget=f"{budget}B", **OPTIONS)
    options = {**OPTIONS, "memory_budget": f"{budget}B"}
    peak = measured(model, torch.compile(model, backend="fxremat", options=options), (x,))
    report = fxremat.reports()[-1]
    assert peak == report.predicted_peak_bytes <= budget
    assert {row.times for row in report.moved} >= {1}


def test_the_more_bytes_the_fewer_weights(caplog: pytest.LogCaptureFixture) -> None:
    counts = []
    for part in (2.0, 0.9, 0.4):
        model, x = made()
        budget = int(part * full_peak(model, x))
        with caplog.at_level(logging.INFO, logger="fxremat"):
            fxremat.offload(model, (x,), memory_budget=f"{budget}B", **OPTIONS)
        counts.append(len(on_host(model)))
    assert 0 == counts[0] < counts[1] <= counts[2]
    assert f"{counts[2]} of 8 parameters" in caplog.text


def test_a_budget_that_nothing_fits_names_the_least() -> None:
    model, x = made()
    with pytest.raises(fxremat.InfeasibleBudget) as caught:
        fxremat.offload(model, (x,), memory_budget="10kB", **OPTIONS)
    assert on_host(model) == []
    least = caught.value.minimum_bytes
    assert least is not None
    fxremat.offload(model, (x,), memory_budget=f"{least}B", **OPTIONS)
    assert on_host(model)


@pytest.mark.parametrize(
    "given",
    [
        {"example_inputs": (torch.zeros(8, 64),)},
        {"memory_budget": "1GiB"},
        {"memory_budget": "1GiB", "weights": "all", "example_inputs": (torch.zeros(8, 64),)},
        {"weights": "no_such_weight"},
        {"memory_budget": "lots", "example_inputs": (torch.zeros(8, 64),)},
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(fxremat.InvalidOption):
        fxremat.offload(Layers(), **given)


def test_through_inductor() -> None:
    model, x = made()
    plain = copy.deepcopy(model)
    plain(x).backward()
    fxremat.offload(model)
    budget = f"{full_peak(plain, x) // 2}B"
    options = {**OPTIONS, "executor": "inductor", "variants": "none", "memory_budget": budget}
    torch.compile(model, backend="fxremat", options=options)(x).backward()
    found, expected = ([p.grad for p in one.parameters()] for one in (model, plain))
    assert None not in found
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_gradients_of_a_tied_weight_are_added_before_they_leave() -> None:
    torch.manual_seed(0)
    model, index = Tied(), torch.arange(64) % 32
    plain = copy.deepcopy(model)
    plain(index).backward()
    fxremat.offload(model)
    torch.compile(model, backend="fxremat", options=OPTIONS)(index).backward()
    found, expected = ([p.grad for p in one.parameters()] for one in (model, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert all(one is not None and is_host(one) for one in found)
    left = {move.value for move in fxremat.reports()[-1].plan.moves if move.kind == "to host"}
    assert len(left) == 3

"""Training with weights in host memory: the same numbers, however the model is run."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fxremat
from benchmarks import copying
from fxremat.runtime.host_memory import is_host
from fxremat.training import host_weights
from tests.end_to_end import measured
from tests.host_weights import (
    CPU,
    WAYS,
    _nothing_left,  # noqa: F401  a fixture of each test
    _one_thread,  # noqa: F401  a fixture of each test
    aot,
    batches,
    equal,
    gradients_elsewhere,
    in_host_memory,
    language,
    loss_of,
    moved,
    perceptron,
    training,
)
from tests.small import Convolutions, Stack, Tied, seeded, train
from tests.stepping import RATE, STEP_OPTIONS, layers_and_input

# --- the same training --------------------------------------------------------------------


CASES: list[tuple[str, int, dict[str, bool]]] = [
    *((way, 1, {}) for way in WAYS),
    *((way, 1, {"checkpointed": True}) for way in ("eager", "model")),
    *((way, 1, {"tied": True, "twice": True}) for way in ("eager", "model")),
    ("model", 2, {}),
]


@pytest.mark.parametrize(("way", "accumulate", "options"), CASES)
def test_training_is_the_same(way: str, accumulate: int, options: dict[str, bool]) -> None:
    """With weights that are read twice, too, whose gradients are added; and frozen ones."""
    plain, model = language(**options), moved(language(**options))
    expected = training(plain, loss_of(plain), accumulate=accumulate)
    assert equal(training(model, WAYS[way](model), accumulate=accumulate), expected)
    assert in_host_memory(model) == [name for name, _ in model.named_parameters()]
    assert gradients_elsewhere(model) == [] or "twice" in options
    assert (model.head.weight is model.embedding.weight) == ("tied" in options)
    assert model.frozen.weight.grad is None
    if way != "eager":
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
        assert not counters["recompiles"]
    model.requires_grad_(False)
    assert not model(next(batches(1))[0]).requires_grad


def as_plain(make: Callable[[], nn.Module], *shape: int) -> tuple[Any, Tensor, Any]:
    """A model with weights in host memory, its input, and what training gives without that."""
    plain, x = seeded(make, *shape)
    expected = train(plain, x, plain)
    return moved(seeded(make, *shape)[0]), x, expected


@pytest.mark.slow
def test_inductor() -> None:
    model, x, expected = as_plain(perceptron, 1, 8)
    losses, gradients, _ = train(model, x, torch.compile(model, fullgraph=True))
    assert losses == pytest.approx(expected[0])
    torch.testing.assert_close(gradients, expected[1])
    assert gradients_elsewhere(model) == []


def test_autocast() -> None:
    def step_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return cast("Tensor", model(x).square().sum())

        return step

    plain, x = seeded(perceptron, 4, 8)
    expected = train(plain, x, step_of(plain))[0]
    for compiled in (False, True):
        model = moved(seeded(perceptron, 4, 8)[0])
        step = step_of(model)
        assert train(model, x, aot(step) if compiled else step)[0] == expected


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gradients_have_the_strides_of_their_weights(layout: torch.memory_format) -> None:
    def make() -> nn.Module:
        return Convolutions().to(memory_format=layout)  # type: ignore[call-overload,no-any-return]

    model, x, expected = as_plain(make, 2, 3, 8, 8)
    compiled = aot(model) if layout == torch.channels_last else model
    losses, gradients, buffers = train(model, x, compiled)
    assert losses == expected[0]
    assert equal([*gradients, *buffers], [*expected[1], *expected[2]])
    assert gradients_elsewhere(model) == []
    assert not any(map(is_host, model.buffers()))


def test_a_graph_break_inside_the_model() -> None:
    model, x, expected = as_plain(lambda: Stack(broken=True), 4, 32)
    assert train(model, x, torch.compile(model, backend="aot_eager"))[0] == expected[0]
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["recompiles"]


def test_blocks_compiled_one_by_one_share_their_code() -> None:
    """One graph for the first, whose input wants no gradient, and one for all others."""
    model, x, expected = as_plain(Stack, 4, 32)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    assert train(model, x, model)[0] == expected[0]
    assert counters["stats"]["unique_graphs"] == 2


def test_compiled_before_it_is_moved() -> None:
    model, x = seeded(perceptron, 4, 8)
    compiled = aot(model)
    expected = compiled(x)
    assert moved(compiled) is compiled
    assert torch.equal(compiled(x), expected)
    assert len(in_host_memory(model)) == 4


# --- chosen for a number of bytes ---------------------------------------------------------

OPTIONS: dict[str, Any] = {"executor": "aot_eager", **STEP_OPTIONS}


@pytest.fixture(autouse=True)
def _throttled() -> Iterator[None]:
    with copying.set_copy_speed(RATE, RATE):
        yield


def full_peak(model: nn.Module, x: torch.Tensor) -> int:
    return fxremat.explain(model, x, options=OPTIONS).store_all_peak_bytes


def adamw_losses(
    model: nn.Module, call: Callable[..., Any], x: torch.Tensor, steps: int
) -> list[float]:
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


def test_a_model_four_times_the_budget_trains_as_in_eager() -> None:
    """Parameters, gradients and activations together are four times what the device may hold."""
    model, x = layers_and_input()
    plain = copy.deepcopy(model)
    expected = adamw_losses(plain, plain, x, 5)
    options = {**OPTIONS, "memory_budget": f"{full_peak(model, x) // 4}B"}
    model = fxremat.offload(model, (x,), **options)
    assert in_host_memory(model)
    call = torch.compile(model, backend="fxremat", options=options)
    assert adamw_losses(model, call, x, 5) == expected
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_the_peak_is_the_predicted_one_and_within_the_budget() -> None:
    model, x = layers_and_input()
    budget = full_peak(model, x) // 3
    options = {**OPTIONS, "memory_budget": f"{budget}B"}
    fxremat.offload(model, (x,), **options)
    peak = measured(model, torch.compile(model, backend="fxremat", options=options), (x,))
    report = fxremat.reports()[-1]
    assert peak == report.predicted_peak_bytes <= budget
    assert {row.times for row in report.moved} >= {1}


def test_the_more_bytes_the_fewer_weights(caplog: pytest.LogCaptureFixture) -> None:
    counts = []
    for part in (2.0, 0.9, 0.4):
        model, x = layers_and_input()
        budget = int(part * full_peak(model, x))
        with caplog.at_level(logging.INFO, logger="fxremat"):
            fxremat.offload(model, (x,), memory_budget=f"{budget}B", **OPTIONS)
        counts.append(len(in_host_memory(model)))
    assert 0 == counts[0] < counts[1] <= counts[2]
    assert f"{counts[2]} of 8 parameters" in caplog.text


def test_a_budget_that_nothing_fits_names_the_least() -> None:
    model, x = layers_and_input()
    with pytest.raises(fxremat.InfeasibleBudget) as caught:
        fxremat.offload(model, (x,), memory_budget="10kB", **OPTIONS)
    assert in_host_memory(model) == []
    least = caught.value.minimum_bytes
    assert least is not None
    fxremat.offload(model, (x,), memory_budget=f"{least}B", **OPTIONS)
    assert in_host_memory(model)


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
        fxremat.offload(layers_and_input()[0], **given)


def test_through_inductor() -> None:
    model, x = layers_and_input()
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


# --- with a GPU ---------------------------------------------------------------------------


@pytest.mark.gpu
def test_training_on_cuda() -> None:
    plain = seeded(lambda: Stack(width=256), 4, 256)[0]
    model = fxremat.offload(copy.deepcopy(plain))
    assert all(p.is_pinned() and is_host(p) for p in model.parameters())
    x = torch.randn(4, 256, device="cuda")
    plain.cuda()
    before = torch.cuda.memory_allocated()
    expected = train(plain, x, plain)
    held = torch.cuda.memory_allocated() - before
    losses, gradients, _ = train(model, x, aot(model))
    assert losses == pytest.approx(expected[0], rel=1e-4)
    for ours, theirs in zip(gradients, expected[1], strict=True):
        assert ours.device == CPU
        torch.testing.assert_close(ours, theirs.cpu(), rtol=1e-3, atol=1e-5)
    assert torch.cuda.memory_allocated() - before < held + 2**20
    model.to("cuda")
    assert all(p.is_pinned() for p in model.parameters())
    host_weights.restore(model)
    assert all(p.is_cuda for p in model.parameters())

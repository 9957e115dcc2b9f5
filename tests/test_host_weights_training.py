"""Training with weights in host memory: the same numbers, however the model is run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fxremat
from fxremat.runtime.host_memory import is_host
from fxremat.training import host_weights
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
from tests.small import Convolutions, Stack, seeded, train

# --- the same training --------------------------------------------------------------------


def same_training(way: str, accumulate: int = 1, **options: bool) -> Any:
    """The model, trained in a way with all weights in host memory; as it is without that."""
    plain, model = language(**options), moved(language(**options))
    expected = training(plain, loss_of(plain), accumulate=accumulate)
    assert equal(training(model, WAYS[way](model), accumulate=accumulate), expected)
    return model


CASES = [*((way, False) for way in WAYS), ("eager", True), ("model", True)]


@pytest.mark.parametrize(("way", "checkpointed"), CASES)
def test_training_is_the_same(way: str, checkpointed: bool) -> None:
    model = same_training(way, checkpointed=checkpointed)
    assert in_host_memory(model) == [name for name, _ in model.named_parameters()]
    assert gradients_elsewhere(model) == []
    if way != "eager":
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
        assert not counters["recompiles"]


@pytest.mark.parametrize("way", ["eager", "model"])
def test_weights_read_twice_add_their_gradients(way: str) -> None:
    model = same_training(way, tied=True, twice=True)
    assert model.head.weight is model.embedding.weight
    assert "embedding.weight" in in_host_memory(model)


def test_accumulated_gradients_stay_in_host_memory() -> None:
    assert gradients_elsewhere(same_training("model", accumulate=2)) == []


def test_frozen_weights_get_no_gradient() -> None:
    model = moved(language())
    training(model, loss_of(model), steps=1)
    assert is_host(model.frozen.weight)
    assert model.frozen.weight.grad is None
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

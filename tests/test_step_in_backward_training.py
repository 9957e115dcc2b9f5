"""Optimizers that step inside of the backward: the same training, beside it, in less memory."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxremat
from benchmarks import copying
from benchmarks.copying import copy_trace
from tests import stepping
from tests.accumulating import LOSSES, squares
from tests.graphs import Net
from tests.host_weights import equal, moved
from tests.small import Stack, Tied, seeded
from tests.stepping import (
    OPTIMIZERS,
    RATE,
    STEP_OPTIONS,
    Loss,
    Slow,
    adamw,
    compiled_model,
    eager,
    layers_and_input,
    same_training,
    trained,
)

_fresh = stepping.fresh

# --- the same training --------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_by_parameter(name: str) -> None:
    early = same_training(layers_and_input, make_optimizer=OPTIMIZERS[name], plain_loss_of=eager)
    assert len(early) == 80


@cache
def full_peak(*size: int) -> int:
    model, x = layers_and_input(*size)
    return fxremat.explain(model, x, options=STEP_OPTIONS).store_all_peak_bytes


def test_through_inductor() -> None:
    """With room for all; less than that is below."""
    budget = f"{full_peak()}B"
    early = same_training(
        layers_and_input,
        lambda m: cast("Loss", compiled_model(m, "inductor", memory_budget=budget)),
    )
    assert len(early) == 80


SPEEDS = [(3e6, 1e9), (1e9, 3e6), (1e7, 1e7)]


@pytest.mark.parametrize(
    ("executor", "depth", "percent"),
    [("aot_eager", 4, 33), pytest.param("inductor", 2, 60, marks=pytest.mark.slow)],
)
def test_whatever_the_copies_take(executor: str, depth: int, percent: int) -> None:
    """Weights are fetched twice, and wait for copies of gradients, and the other way."""
    is_eager = executor == "aot_eager"
    budget = f"{full_peak(depth) * percent // 100}B"
    plain, ours = layers_and_input(depth), layers_and_input(depth)
    optimizer = adamw(list(moved(plain[0]).parameters()))
    fxremat.step_in_backward(moved(ours[0]), adamw)
    options = {"executor": executor, "memory_budget": budget, "variants": "none"}
    call = compiled_model(ours[0], **options)
    reference = plain[0] if is_eager else compiled_model(plain[0], **options)
    for speeds in SPEEDS:
        expected = trained(plain, lambda _: reference, optimizer)
        with copying.set_copy_speed(*speeds), copy_trace() as records:
            found = trained(ours, lambda _: call, None)
        assert equal(found, expected)
        assert sum(record.what == "step" for record in records) == 10 * 2 * depth
    assert {row.times for row in fxremat.reports()[-1].moved} == {1, 2}


def test_steps_that_are_slower_than_the_backward() -> None:
    assert same_training(
        layers_and_input, make_optimizer=lambda p: Slow(p, lr=0.1), plain_loss_of=eager
    )


def test_large_parameters_and_two_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        same_training(
            lambda: layers_and_input(2, 517),
            make_optimizer=OPTIMIZERS["AdamW"],
            plain_loss_of=eager,
        )
    finally:
        torch.set_num_threads(threads)


def test_eager_models_and_parameters_that_are_not_on_the_host() -> None:
    assert same_training(layers_and_input, lambda m: m) == []
    early = same_training(layers_and_input, plain_loss_of=eager, weights="layers.[01].weight")
    assert len(early) == 20


def test_tied_weights() -> None:
    def make() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return Tied(), torch.arange(64) % 32

    assert len(same_training(make)) == 30


def test_graph_breaks() -> None:
    early = same_training(lambda: seeded(lambda: Stack(broken=True), 4, 32))
    assert len(early) == 10 * 24


# --- whole gradients ----------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_what_else_reads_the_weights_is_waited_for(name: str) -> None:
    def loss_of(model: nn.Module) -> Loss:
        call = compiled_model(model)
        return lambda x: LOSSES[name](model, call, x)

    assert same_training(layers_and_input, loss_of) == []


def test_a_loss_outside_of_the_graph() -> None:
    def loss_of(model: nn.Module) -> Loss:
        call = compiled_model(model)
        return lambda x: call(x).square()

    assert len(same_training(layers_and_input, loss_of)) == 80


@pytest.mark.parametrize("swapped", [False, True])
def test_two_losses_of_one_backward(swapped: bool) -> None:
    results = []
    for early in (False, True):
        model, x = layers_and_input()
        call = compiled_model(moved(model))
        optimizer = None if early else adamw(list(model.parameters()))
        if early:
            fxremat.step_in_backward(model, adamw)
        for _ in range(3):
            losses = (squares(model), call(x)) if swapped else (call(x), squares(model))
            torch.autograd.backward(losses[::-1])
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        results.append([p.detach() for p in model.parameters()])
    assert equal(*results)


def test_gradients_that_are_asked_for_are_no_steps() -> None:
    model, x = layers_and_input()
    before = [p.detach().clone() for p in model.parameters()]
    call = compiled_model(moved(model))
    expected = torch.autograd.grad(call(x), list(model.parameters()))
    optimizer = fxremat.step_in_backward(model, adamw)
    with copy_trace() as records:
        found = torch.autograd.grad(call(x), list(model.parameters()))
        assert equal(list(found), list(expected))
        assert equal([p.detach() for p in model.parameters()], before)
        parameters = list(model.parameters())
        call(x).backward(inputs=parameters[:1])
    assert [one.nbytes for one in records if one.what == "step"] == [parameters[0].nbytes]
    changed = [not torch.equal(p, old) for p, old in zip(parameters, before, strict=True)]
    assert changed == [True] + 7 * [False]
    optimizer.remove()
    call(x).backward()
    assert all(p.grad is not None for p in parameters)


def test_a_gradient_that_is_there_already_is_added() -> None:
    model, x = layers_and_input()
    call = compiled_model(moved(model))
    call(x).backward()
    weight = model.get_parameter("layers.1.weight")
    gradient, before = cast("Tensor", weight.grad).clone(), weight.detach().clone()
    fxremat.step_in_backward(model, lambda p: torch.optim.SGD(p, lr=0.5))
    call(x).backward()
    assert torch.equal(weight, before - 0.5 * (2 * gradient))


def test_hooks_see_gradients() -> None:
    """A hook on one weight: its step waits. A hook in the graph that changes gradients: refused."""
    model, x = layers_and_input()
    call = compiled_model(moved(model))
    seen: list[Tensor] = []
    weight: Any = model.get_parameter("layers.2.weight")
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    fxremat.step_in_backward(model, adamw)
    with copy_trace() as records:
        call(x).backward()
    assert seen[0].abs().sum() > 0
    assert sum(one.what == "step" for one in records) == 7
    loss = call(x)
    node: Any = loss.grad_fn
    node.register_hook(lambda inputs, _: tuple(g if g is None else 2 * g for g in inputs))
    with pytest.raises(RuntimeError, match="a hook has changed a gradient"):
        loss.backward()


def test_a_second_backward_does_not_read_weights_that_have_changed() -> None:
    model, x = layers_and_input()
    fxremat.step_in_backward(moved(model), OPTIMIZERS["SGD"])
    loss = compiled_model(model)(x)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_that_share_memory() -> None:
    """Of two in the same memory one is fetched after the gradient of the other has arrived."""

    def shared() -> Net:
        first, last = (nn.Linear(16, 16, bias=False) for _ in range(2))
        return Net(
            lambda net, x: F.gelu(net.last(F.gelu(net.first(x)))).square().mean(),
            first=first,
            last=last,
        )

    def make() -> tuple[nn.Module, Tensor]:
        model, x = seeded(shared, 4, 16)
        moved(model)
        model.last.weight.data = model.first.weight.data  # type: ignore[union-attr]
        return model, x

    plain, ours = make(), make()
    fxremat.step_in_backward(ours[0], lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer = torch.optim.SGD(plain[0].parameters(), lr=0.1)
    with copy_trace() as records:
        found = trained(ours, compiled_model, None)
    assert [one for one in records if one.what == "step"] == []
    torch.testing.assert_close(found, trained(plain, compiled_model, optimizer))


# --- parameters of all kinds --------------------------------------------------------------


class Mixed(nn.Module):
    """A sparse embedding, frozen weights, and weights that only some inputs need."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16, sparse=True)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.skip = False

    def forward(self, index: Tensor) -> Tensor:
        x = self.frozen(self.embedding(index))
        for layer in self.layers[: 2 if self.skip else 3]:
            x = x + torch.tanh(layer(x))
        return cast("Tensor", x.square().mean())


def test_sparse_frozen_and_unused_parameters() -> None:
    def make() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return Mixed(), torch.arange(8)

    def loss_of(model: nn.Module) -> Loss:
        inner = cast("Any", model)
        whole = compiled_model(inner)

        def loss(index: Tensor) -> Tensor:
            inner.skip = not inner.skip
            return cast("Tensor", whole(index))

        return loss

    assert same_training(make, loss_of, lambda p: torch.optim.SGD(p, lr=0.1))


def test_a_frozen_parameter_that_thaws() -> None:
    model, x = layers_and_input()
    weight = model.get_parameter("layers.0.weight").requires_grad_(False)
    fxremat.step_in_backward(moved(model), adamw)
    before = weight.detach().clone()
    compiled_model(model)(x).backward()
    assert torch.equal(weight, before)
    weight.requires_grad_(True)
    torch._dynamo.reset()  # torch 2.11 does not see that a parameter thaws
    compiled_model(model)(x).backward()
    assert not torch.equal(weight, before)
    assert weight.grad is None


# --- beside the backward, and in less memory ----------------------------------------------


def test_steps_end_before_the_backward_does() -> None:
    model, x = layers_and_input(8, 128)
    fxremat.step_in_backward(moved(model), adamw)
    call = compiled_model(model)
    call(x).backward()
    loss = call(x)
    with copying.set_copy_speed(5e6, RATE), copy_trace() as records:
        loss.backward()
    steps = [one for one in records if one.what == "step"]
    waits = [one for one in records if one.what == "wait_host"]
    assert len(steps) == len(waits) == 16
    beside = [one for one in steps if one.end_s < waits[-1].end_s]
    assert len(beside) >= 12


@pytest.mark.parametrize(
    ("executor", "early"),
    [
        ("aot_eager", True),
        pytest.param("aot_eager", False, marks=pytest.mark.slow),
        pytest.param("inductor", True, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_never_on_the_host_together(executor: str, early: bool) -> None:
    """All at once if they step after it; else those that the plan has on their way, and a few."""
    model, x = layers_and_input(12, 256)
    budget = full_peak(12, 256) // 4
    moved(model)
    gradients = sum(p.nbytes for p in model.parameters())
    if early:
        fxremat.step_in_backward(model, adamw)
    call = compiled_model(model, executor, memory_budget=f"{budget}B", variants="none")
    with copying.set_copy_speed(RATE, RATE):
        call(x).backward()
        model.zero_grad()
        loss = call(x)
        held = copying.host_bytes().now_bytes
        copying.reset_host_peak()
        loss.backward()
    found = copying.host_bytes()
    assert (found.now_bytes == held) == early
    assert (found.peak_bytes - held < gradients * 2 / 3) == early

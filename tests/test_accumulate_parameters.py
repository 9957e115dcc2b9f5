"""Gradients that are added inside of the backward, for parameters and grads of all kinds."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

import fxremat
from tests import accumulating
from tests.accumulating import (
    LAYERS,
    Early,
    accumulated,
    check_same,
    compiled,
    gradients,
    layers,
    same,
    with_input,
)
from tests.small import seeded

early = accumulating.early
_fresh = accumulating.fresh


# --- grads -------------------------------------------------------------------------------


def test_dtypes(early: Early) -> None:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        model, (x,) = LAYERS()
        return model.to(torch.bfloat16), (x.to(torch.bfloat16),)

    check_same(made)
    assert len(early) == 2 * 6


def test_grads_of_other_dtypes_and_layouts(early: Early) -> None:
    model, x = layers()
    model.layers[0].weight.grad = torch.zeros(16, 16).t()
    model.layers[2].weight.grad = torch.zeros(32, 32)[::2, ::2]
    fxremat.accumulate_in_backward(model)
    compiled(model)(x).backward()
    assert len(early) == 2
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain(x).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_grads_that_share_memory(early: Early) -> None:
    """Parts of one tensor are as good as tensors of their own; what overlaps is not."""

    def parts(model: Any) -> None:
        flat, used = torch.zeros(sum(p.numel() for p in model.parameters())), 0
        for parameter in model.parameters():
            parameter.grad = flat[used : used + parameter.numel()].view_as(parameter)
            used += parameter.numel()

    check_same(LAYERS, prepare=parts)
    assert len(early) == 3 * 6
    early.clear()

    def one(model: Any) -> None:
        model.layers[0].weight.grad = model.layers[2].weight.grad = torch.zeros(16, 16)
        model.layers[1].weight.grad = model.layers[1].weight.detach()

    model, x = layers()
    fxremat.accumulate_in_backward(model)
    one(model)
    compiled(model)(x).backward()
    assert not {id(p) for p in early} & {id(layer.weight) for layer in model.layers}


class Gated(nn.Module):
    """Another tensor is read between the gradients of ``b`` and ``a``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return cast("Tensor", self.b(torch.tanh(self.a(x) * gate)).square().mean())


def test_a_grad_that_the_graph_reads(early: Early) -> None:
    def gated(opt_in: bool) -> tuple[Any, list[Tensor | None]]:
        torch._dynamo.reset()
        model: Any
        model, x = seeded(Gated, 16, 16)
        handle = fxremat.accumulate_in_backward(model) if opt_in else None
        call = compiled(model)
        call(x, torch.ones(16, 16)).backward()
        for _ in range(2):
            call(x, model.b.weight.grad).backward()
        if handle is not None:
            handle.remove()
        return model, gradients(model)

    expected = gated(False)[1]
    model, found = gated(True)
    assert same(found, expected)
    assert [p is model.a.weight for p in early] == [True, True]


def test_a_gradient_that_is_a_copy(early: Early) -> None:
    """Inductor drops copies: the original, read later, must not be given up in its place."""

    class Copied(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
            return x + bias

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            own = gradient.sin()
            return own, own.clone()

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.bias = nn.Linear(16, 16), nn.Parameter(torch.zeros(4, 16))

        def forward(self, x: Tensor) -> Tensor:
            copied: Any = Copied.apply
            return cast("Tensor", copied(torch.tanh(self.layer(x)), self.bias))

    check_same(with_input(Shifted, 4, 16))
    assert {tuple(p.shape) for p in early} == {(16, 16), (16,)}


# --- parameters --------------------------------------------------------------------------


def test_sparse_and_unused_parameters(early: Early) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, 16, sparse=True)
            self.layer, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, index: Tensor) -> Tensor:
            return torch.tanh(self.layer(self.embedding(index)))

    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        return Mixed(), (torch.arange(8),)

    results = []
    for name in ("no", "yes"):
        found = accumulated(made(), name)
        results.append([g.to_dense() if g is not None else None for g in found])
    assert same(*results)
    assert early


def test_parameters_that_freeze_and_thaw(early: Early) -> None:
    model, x = layers()
    fxremat.accumulate_in_backward(model)
    call, weight = compiled(model), model.layers[1].weight
    call(x).backward()
    weight.requires_grad_(False)
    before = weight.grad.clone()
    call(x).backward()
    assert torch.equal(weight.grad, before)
    weight.requires_grad_(True)
    torch._dynamo.reset()  # torch 2.11 does not see that a parameter thaws
    call(x).backward()
    assert torch.equal(weight.grad, 2 * before)


def test_parameters_in_host_memory(early: Early) -> None:
    def host(model: Any) -> None:
        fxremat.offload(model, weights="layers.[01].weight", device="cpu")

    check_same(LAYERS, prepare=host)
    assert len(early) == 2 * 4


def test_an_optimizer_that_steps_in_the_backward(early: Early) -> None:
    model, x = layers()
    fxremat.accumulate_in_backward(model)
    plain = copy.deepcopy(model)
    fxremat.step_in_backward(model, lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    call, other = compiled(model), compiled(plain)
    for _ in range(2):
        call(x).backward()
        other(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same(list(model.parameters()), list(plain.parameters()))
    assert not early

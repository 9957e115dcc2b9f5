"""Gradients that are added inside of the backward: the same sums, to the bit, in less memory.

For parameters and grads of all kinds; backwards of all kinds are in test_accumulate_backwards.
"""

from __future__ import annotations

import copy
import gc
import weakref
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxremat
from fxremat.memory.measured_peak import measure_peak
from fxremat.runtime import accumulation
from tests import accumulating, end_to_end, nets
from tests.accumulating import (
    EAGER,
    LAYERS,
    Early,
    accumulated,
    check_same,
    compiled,
    gradients,
    layers,
    opted_in,
    same,
    with_input,
)
from tests.graphs import Net
from tests.small import Layers, seeded

early = accumulating.early
_fresh = accumulating.fresh

EXECUTORS = ["aot_eager", "inductor"]
NETS = ["tied", "input gradient", "frozen", "autocast", "attention dropout", "count", "odd results"]


@pytest.mark.parametrize("name", NETS)
def test_any_net(name: str, early: Early) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check_same(lambda: nets.make(name))
    assert early


def small() -> Net:
    """A tied weight, and dropout."""

    def forward(net: Any, index: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(net.layer(net.embedding(index))), 0.5, net.training)
        return F.linear(hidden, net.embedding.weight)

    return Net(forward, embedding=nn.Embedding(32, 16), layer=nn.Linear(16, 16))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_whatever_runs_the_graphs(executor: str, early: Early) -> None:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        return small(), (torch.randperm(32),)  # rows of an embedding are added in any order

    check_same(made, lambda model: compiled(model, executor))
    assert len(early) == 2 * 3


def test_zeroed_and_scaled_gradients(early: Early) -> None:
    results = []
    for opt_in in (False, True):
        torch._dynamo.reset()
        model, x = layers()
        if opt_in:
            fxremat.accumulate_in_backward(model)
        call, optimizer = compiled(model), torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(6):
            (call(x) * 1024).backward()
            if number % 2:
                for parameter in model.parameters():
                    parameter.grad /= 1024
                optimizer.step()
                optimizer.zero_grad(set_to_none=number == 1)
        results.append([p.detach() for p in model.parameters()])
    assert same(*results)
    # With zeros in place the first gradient is added, too.
    assert len(early) == (1 + 1 + 2) * 6


def test_negative_zeros_stay() -> None:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        model, (x,) = LAYERS()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, -0.0)
        return model, (x,)

    check_same(made, backward=lambda loss: (loss * -0.0).backward())


# --- in less memory -----------------------------------------------------------------------


@cache
def peaks(
    opt_in: bool, executor: str, budget: int | None = None, hooked: bool = False
) -> tuple[list[int], Any]:
    """Measured bytes of three micro-batches, and the report; all is compiled before."""
    torch._dynamo.reset()
    model, x = seeded(lambda: Layers(4, 128), 4, 128)
    handle = fxremat.accumulate_in_backward(model) if opt_in else None
    parameters: list[Any] = list(model.parameters())
    for parameter in parameters if hooked else []:
        parameter.register_hook(lambda gradient: None)
    options = {} if budget is None else {"memory_budget": f"{budget}B"}
    call = compiled(model, executor, **options)
    call(x).backward()
    model.zero_grad()
    found = [measure_peak(lambda: call(x).backward(), held=(model, x)).peak_bytes for _ in range(3)]
    if handle is not None:
        handle.remove()
    return found, fxremat.reports()[-1]


def test_the_peak_falls_by_the_gradients() -> None:
    bytes_of_grads = sum(p.nbytes for p in Layers(4, 128).parameters())
    before, plain = peaks(False, "aot_eager")
    after, report = peaks(True, "aot_eager")
    assert max(before) - max(after) >= 0.8 * 3 / 4 * bytes_of_grads
    assert max(before) > plain.predicted_peak_bytes  # each grad should be in the reserve
    assert max(after) <= report.predicted_peak_bytes
    assert report.held_bytes == bytes_of_grads


@cache
def least() -> int:
    """The least budget that can be met without Inductor, each grad included."""
    model, x = seeded(lambda: Layers(4, 128), 4, 128)
    handle = fxremat.accumulate_in_backward(model)
    nbytes = end_to_end.least(model, (x,), **EAGER)
    handle.remove()
    return nbytes


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_budget_is_obeyed_in_every_micro_batch(executor: str) -> None:
    budget = least()
    found, report = peaks(True, executor, budget)
    assert max(found) <= report.predicted_peak_bytes <= budget
    assert found[0] < found[1] == found[2] >= 0.99 * report.predicted_peak_bytes


def test_what_autograd_has_to_add_counts_as_a_result() -> None:
    """A hook that is there when the graph is compiled: the plan has both, and is obeyed."""

    found, hooked = peaks(True, "aot_eager", hooked=True)
    _, plain = peaks(True, "aot_eager")
    assert max(found) <= hooked.predicted_peak_bytes
    bytes_of_grads = sum(p.nbytes for p in Layers(4, 128).parameters())
    more = hooked.predicted_peak_bytes - plain.predicted_peak_bytes
    assert more >= 0.8 * 3 / 4 * bytes_of_grads


def head() -> Net:
    """Many classes."""
    parts = {"body": nn.Linear(16, 16), "head": nn.Linear(16, 512)}
    return Net(
        lambda net, x: F.cross_entropy(net.head(torch.tanh(net.body(x))), torch.arange(64)), **parts
    )


def test_other_forms_of_ops(early: Early) -> None:
    """A loss in chunks of rows: gradients come out of loops, or are made in the forward."""
    model, x = seeded(head, 64, 16)
    least = end_to_end.least(model, (x,), **EAGER | {"variants": "all"})
    bytes_of_grads = sum(p.nbytes for p in model.parameters())

    def loss_of(model: Any) -> Any:
        return compiled(model, variants="all", memory_budget=f"{least + bytes_of_grads}B")

    check_same(with_input(head, 64, 16), loss_of, "planned")
    assert fxremat.reports()[-1].variants
    assert early


# --- grads --------------------------------------------------------------------------------


def test_grads_of_other_dtypes_and_layouts(early: Early) -> None:
    model, x, call = opted_in()
    model.layers[0].weight.grad = torch.zeros(16, 16).t()
    model.layers[2].weight.grad = torch.zeros(32, 32)[::2, ::2]
    call(x).backward()
    assert len(early) == 2
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain(x).backward()
    assert same(gradients(model), gradients(plain))


def test_grads_that_share_memory(early: Early) -> None:
    model, x, call = opted_in()
    model.layers[0].weight.grad = model.layers[2].weight.grad = torch.zeros(16, 16)
    model.layers[1].weight.grad = model.layers[1].weight.detach()
    call(x).backward()
    assert not {id(p) for p in early} & {id(layer.weight) for layer in model.layers}


def gated_layers() -> Net:
    """Another tensor is read between the gradients of ``b`` and ``a``."""
    parts = {name: nn.Linear(16, 16, bias=False) for name in "ab"}
    return Net(lambda net, x, gate: net.b(torch.tanh(net.a(x) * gate)).square().mean(), **parts)


def test_a_grad_that_the_graph_reads(early: Early) -> None:
    def gated(opt_in: bool) -> tuple[Any, list[Tensor | None]]:
        torch._dynamo.reset()
        model: Any
        model, x = seeded(gated_layers, 16, 16)
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

    def shifted() -> Net:
        copied: Any = Copied.apply
        parts = {"layer": nn.Linear(16, 16), "bias": nn.Parameter(torch.zeros(4, 16))}
        return Net(lambda net, x: copied(torch.tanh(net.layer(x)), net.bias), **parts)

    check_same(with_input(shifted, 4, 16))
    assert {tuple(p.shape) for p in early} == {(16, 16), (16,)}


# --- parameters ---------------------------------------------------------------------------


def test_sparse_and_unused_parameters(early: Early) -> None:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        parts: dict[str, Any] = {"embedding": nn.Embedding(32, 16, sparse=True)}
        parts |= {name: nn.Linear(16, 16) for name in ("layer", "unused")}
        model = Net(lambda net, index: torch.tanh(net.layer(net.embedding(index))), **parts)
        return model, (torch.arange(8),)

    found = (accumulated(made(), early) for early in ("no", "yes"))
    assert same(*([None if g is None else g.to_dense() for g in each] for each in found))
    assert early


def test_parameters_that_freeze_and_thaw(early: Early) -> None:
    """Those that are frozen from the beginning on have no grad to count."""
    model, x = layers()
    model.layers[0].requires_grad_(False)
    fxremat.accumulate_in_backward(model)
    call, weight = compiled(model), model.layers[1].weight
    call(x).backward()
    wanted = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert fxremat.reports()[-1].held_bytes == wanted
    weight.requires_grad_(False)
    before = weight.grad.clone()
    call(x).backward()
    assert torch.equal(weight.grad, before)
    weight.requires_grad_(True)
    torch._dynamo.reset()  # torch 2.11 does not see that a parameter thaws
    call(x).backward()
    assert torch.equal(weight.grad, 2 * before)


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


# --- the end ------------------------------------------------------------------------------


def test_removed(early: Early) -> None:
    model, x = layers()
    handles = [fxremat.accumulate_in_backward(model) for _ in range(2)]
    call = compiled(model)
    handles[0].remove()
    handles[0].remove()
    for _ in range(2):
        call(x).backward()
    assert len(early) == 6
    handles[1].remove()
    call(x).backward()
    assert len(early) == 6
    assert not any(p in accumulation._ASKED for p in model.parameters())


def test_models_go_away() -> None:
    model, x, call = opted_in()
    for _ in range(2):
        call(x).backward()
    alive = [weakref.ref(p) for p in model.parameters()]
    asked = len(list(accumulation._ASKED))
    del model, call
    torch._dynamo.reset()
    gc.collect()
    assert [r() for r in alive if r() is not None] == []
    assert len(list(accumulation._ASKED)) == asked - 6


def test_models_without_parameters_are_refused() -> None:
    with pytest.raises(fxremat.InvalidOption, match="without parameters"):
        fxremat.accumulate_in_backward(nn.ReLU())

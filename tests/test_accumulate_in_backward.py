"""Gradients that are added inside of the backward: the same sums, to the bit, in less memory."""

from __future__ import annotations

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
from tests import accumulating, nets
from tests.accumulating import (
    EAGER,
    LAYERS,
    Early,
    check_same,
    compiled,
    layers,
    same,
    with_input,
)
from tests.small import Convolutions, Layers, seeded

early = accumulating.early
_fresh = accumulating.fresh

EXECUTORS = ["aot_eager", "inductor"]

# --- the same sums -----------------------------------------------------------------------

NETS = ["tied", "input gradient", "frozen", "autocast", "attention dropout", "count"]


@pytest.mark.parametrize("name", NETS)
def test_any_net(name: str, early: Early) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check_same(lambda: nets.make(name))
    assert early


class Small(nn.Module):
    """A tied weight, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(32, 16), nn.Linear(16, 16)

    def forward(self, index: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(self.layer(self.embedding(index))), 0.5, self.training)
        return F.linear(hidden, self.embedding.weight)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_whatever_runs_the_graphs(executor: str, early: Early) -> None:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        return Small(), (torch.randperm(32),)  # rows of an embedding are added in any order

    check_same(made, lambda model: compiled(model, executor))
    assert len(early) == 2 * 3


def test_convolutions_and_channels_last(early: Early) -> None:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        model, x = seeded(Convolutions, 2, 3, 8, 8)
        turned: Any = model
        return turned.to(memory_format=torch.channels_last), (x,)

    check_same(made)
    assert len(early) == 2 * 12


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


# --- in less memory ----------------------------------------------------------------------


@cache
def peaks(opt_in: bool, executor: str, budget: int | None = None) -> tuple[list[int], Any]:
    """Measured bytes of three micro-batches, and the report; all is compiled before."""
    torch._dynamo.reset()
    model, x = seeded(lambda: Layers(4, 128), 4, 128)
    handle = fxremat.accumulate_in_backward(model) if opt_in else None
    options = {} if budget is None else {"memory_budget": f"{budget}B"}
    call = compiled(model, executor, **options)
    call(x).backward()
    model.zero_grad()
    found = [measure_peak(lambda: call(x).backward(), held=(model, x)).peak_bytes for _ in range(3)]
    if handle is not None:
        handle.remove()
    return found, fxremat.reports()[-1]


def test_the_peak_falls_by_the_gradients() -> None:
    gradients = sum(p.nbytes for p in Layers(4, 128).parameters())
    before, plain = peaks(False, "aot_eager")
    after, report = peaks(True, "aot_eager")
    assert max(before) - max(after) >= 0.8 * 3 / 4 * gradients
    assert max(before) > plain.predicted_peak_bytes  # each grad should be in the reserve
    assert max(after) <= report.predicted_peak_bytes
    assert report.held_bytes == gradients


@cache
def least() -> int:
    """The least budget that can be met without Inductor, each grad included."""
    model, x = seeded(lambda: Layers(4, 128), 4, 128)
    handle = fxremat.accumulate_in_backward(model)
    with pytest.raises(fxremat.InfeasibleBudget) as caught:
        fxremat.explain(model, x, memory_budget="1000B", options=EAGER)
    handle.remove()
    assert caught.value.minimum_bytes is not None
    return caught.value.minimum_bytes


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_budget_is_obeyed_in_every_micro_batch(executor: str) -> None:
    budget = least()
    found, report = peaks(True, executor, budget)
    assert max(found) <= report.predicted_peak_bytes <= budget
    assert found[0] < found[1] == found[2] >= 0.99 * report.predicted_peak_bytes


def test_what_autograd_has_to_add_counts_as_a_result() -> None:
    """A hook that is there when the graph is compiled: the plan has both, and is obeyed."""

    def predicted(hooked: bool) -> int:
        torch._dynamo.reset()
        model, x = seeded(lambda: Layers(4, 64), 4, 64)
        handle = fxremat.accumulate_in_backward(model)
        parameters: list[Any] = list(model.parameters())
        for parameter in parameters if hooked else []:
            parameter.register_hook(lambda gradient: None)
        call = compiled(model)
        call(x).backward()
        peak = measure_peak(lambda: call(x).backward(), held=(model, x)).peak_bytes
        handle.remove()
        assert peak <= fxremat.reports()[-1].predicted_peak_bytes
        return fxremat.reports()[-1].predicted_peak_bytes

    gradients = sum(p.nbytes for p in Layers(4, 64).parameters())
    assert predicted(True) - predicted(False) >= 0.8 * 3 / 4 * gradients


def test_frozen_parameters_have_no_grad_to_count() -> None:
    model, x = layers()
    model.layers[0].requires_grad_(False)
    fxremat.accumulate_in_backward(model)
    compiled(model)(x).backward()
    wanted = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert fxremat.reports()[-1].held_bytes == wanted


class Head(nn.Module):
    """Many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 512)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(x))), torch.arange(64))


def test_other_forms_of_ops(early: Early) -> None:
    """A loss in chunks of rows: gradients come out of loops, or are made in the forward."""
    model, x = seeded(Head, 64, 16)
    options = {**EAGER, "variants": "all"}
    with pytest.raises(fxremat.InfeasibleBudget) as caught:
        fxremat.explain(model, x, memory_budget="1000B", options=options)
    least = caught.value.minimum_bytes
    assert least is not None
    bytes_of_grads = sum(p.nbytes for p in model.parameters())

    def loss_of(model: Any) -> Any:
        return compiled(model, variants="all", memory_budget=f"{least + bytes_of_grads}B")

    check_same(with_input(Head, 64, 16), loss_of, "planned")
    assert fxremat.reports()[-1].variants
    assert early


# --- the end -----------------------------------------------------------------------------


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
    model, x = layers()
    fxremat.accumulate_in_backward(model)
    call = compiled(model)
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

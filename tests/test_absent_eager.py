"""Eager code on a CUDA device that is not here: autograd, optimizers, and what is seen of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from fxremat.compat.absent.eager import without_device
from fxremat.compat.absent.pretending import CUDA
from fxremat.compat.tensors import is_fake

ATEN = torch.ops.aten


@contextmanager
def _inside(emptied: Callable[[], None] = lambda: None) -> Iterator[list[Any]]:
    """Yields the ops that are seen."""
    ops: list[Any] = []

    def seen(op: Any, args: Any, kwargs: Any, result: Any) -> None:
        ops.append(op)

    with without_device(seen, emptied):
        yield ops


def test_autograd_runs_through_modules_and_functions_of_the_user() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    with _inside():
        model = nn.Linear(3, 4).to("cuda")
        loss = Double.apply(model(torch.ones(2, 3, device="cuda"))).sum()  # type: ignore[no-untyped-call]
        loss.backward()
        gradient = model.weight.grad
        assert gradient is not None
        assert is_fake(gradient)
        assert gradient.device == model.weight.device == loss.device == CUDA
        assert model.weight.is_cuda
        model.weight.grad = None
        assert model.to(torch.bfloat16).weight.device == CUDA


@pytest.mark.parametrize("gradients", [True, False])
def test_tensors_move_where_they_are_not_and_are_not_copied_where_they_are(gradients: bool) -> None:
    with _inside() as ops, torch.set_grad_enabled(gradients):
        here, there = torch.ones(3), torch.ones(3, device="cuda")
        ops.clear()
        assert there.to("cuda") is there
        assert there.to(there) is there
        assert there.cuda() is there
        assert not ops
        assert here.to("cuda").device == here.cuda().device == here.to(there).device == CUDA
        assert there.cpu().device == there.to("cpu").device == torch.device("cpu")
        assert there.to(torch.float16).device == there.to("cuda", torch.float16).device == CUDA
        ops.clear()
        assert there.to("cuda", copy=True) is not there
        assert ops == [ATEN._to_copy.default]


def test_a_decomposed_op_is_seen_once() -> None:
    with _inside() as ops:
        x = [torch.ones(3, device="cuda") for _ in range(2)]
        ops.clear()
        torch._foreach_addcdiv_(x, x, x, 0.5)
        x[0].softmax(-1)
    assert ops == [ATEN._foreach_addcdiv_.Scalar, ATEN._softmax.default]


@pytest.mark.parametrize(("asked", "op"), [({}, ATEN._foreach_sqrt.default),
                                           ({"fused": True}, ATEN._fused_adamw_.default),
                                           ({"foreach": False}, ATEN.sqrt.default)])  # fmt: skip
def test_optimizers_choose_as_on_the_device(asked: dict[str, bool], op: Any) -> None:
    with _inside() as ops:
        weight = nn.Parameter(torch.ones(3, device="cuda"))
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], **asked).step()  # type: ignore[arg-type]
    chosen = {ATEN._foreach_sqrt.default, ATEN._fused_adamw_.default, ATEN.sqrt.default}
    assert chosen & {*ops} == {op}


def test_numbers_of_the_device_are_0_and_counts_of_the_host_are_1() -> None:
    with _inside():
        assert torch.ones((), device="cuda").item() == 0.0
        assert torch.zeros(()).item() == 1.0
        assert not torch.ones((), device="cuda").isnan()
        assert torch.ones((), dtype=torch.int64, device="cuda").item() == 0


def test_torch_cuda_answers_and_is_as_before_at_the_end() -> None:
    emptied: list[None] = []
    before = torch.cuda.is_available()
    with _inside(lambda: emptied.append(None)):
        assert torch.cuda.is_available()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    assert emptied == [None]
    assert torch.cuda.is_available() == before
    assert torch.ones(2).to("cpu").sum().item() == 2

"""A program over rows that computes cross-entropy and its gradients, and what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fxremat.runtime.chunks.operator import ROWS
from fxremat.runtime.chunks.program import Instruction, Program, Ref, RowCount, dump

FEATURES, CLASSES = 8, 300
SIZES = [(64, 16, 4), (64, 64, 64), (50, 16, 5), (7, 3, 2), (0, 4, 4)]
"""Rows, of a chunk, and of a tile: one that divides another, and not; and none."""


def one(op: str, *args: Any, row_shape: Sequence[int] = (CLASSES,), kind: Any = "row",
        dtype: torch.dtype = torch.float32, **kwargs: Any) -> Instruction:  # fmt: skip
    """An instruction; whole numbers that are values are written as `Ref`."""
    return Instruction(op, args, kwargs, kind, tuple(row_shape), dtype)


def program(dtype: torch.dtype = torch.float32, device: str | None = None) -> str:
    """Cross-entropy and its gradients for x (0), labels (1), w.T (2) and w (3)."""
    where = {} if device is None else {"device": torch.device(device)}
    low = dtype != torch.float32
    logits = 5 if low else 4
    steps = [one("aten.mm.default", Ref(0), Ref(2), dtype=dtype)]
    if low:
        steps.append(one("prims.convert_element_type.default", Ref(4), torch.float32))
    n = logits
    steps += [
        one("aten.amax.default", Ref(n), [1], True, row_shape=(1,)),  # n + 1
        one("aten.sub.Tensor", Ref(n), Ref(n + 1)),
        one("aten.exp.default", Ref(n + 2)),
        one("aten.sum.dim_IntList", Ref(n + 3), [1], True, row_shape=(1,)),
        one("aten.log.default", Ref(n + 4), row_shape=(1,)),
        one("aten.sub.Tensor", Ref(n + 2), Ref(n + 5)),  # n + 6
        one("aten.gather.default", Ref(n + 6), 1, Ref(1), row_shape=(1,)),
        one("aten.exp.default", Ref(n + 6)),
        one(
            "aten.full.default", [RowCount(), 1], -1.0, row_shape=(1,), dtype=torch.float32, **where
        ),
        one("aten.scatter_add.default", Ref(n + 8), 1, Ref(1), Ref(n + 9)),  # n + 10
    ]
    n += 10
    if low:
        steps.append(one("prims.convert_element_type.default", Ref(n), dtype, dtype=dtype))
        n += 1
    steps += [
        one("aten.mm.default", Ref(n), Ref(3), row_shape=(FEATURES,), dtype=dtype),
        one("aten.permute.default", Ref(n), [1, 0], kind="last", dtype=dtype),
        one("aten.mm.default", Ref(n + 2), Ref(0), kind="sum",
            row_shape=(CLASSES, FEATURES), dtype=dtype),
        one("aten.sum.dim_IntList", Ref(logits + 10), [0], kind="sum"),
    ]  # fmt: skip
    return dump(Program(2, 2, tuple(steps), (logits + 7, n + 1, n + 3, n + 4)))


def inputs(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """x, labels, w."""
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(count, FEATURES, generator=dice).to(dtype)
    y = torch.randint(0, CLASSES, (count, 1), generator=dice)
    return x, y, torch.randn(CLASSES, FEATURES, generator=dice).to(dtype)


def run(
    given: Sequence[torch.Tensor], chunk: int, tile: int, *, fused: bool = False
) -> list[torch.Tensor]:
    """A call of the operator."""
    x, y, w = given
    found: list[torch.Tensor] = ROWS([x, y], [w.t(), w], program(x.dtype), chunk, tile, fused)
    return found


def expected(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """The same by autograd, in float64."""
    x, w = x.double().requires_grad_(), w.double().requires_grad_()
    bias = torch.zeros(CLASSES, dtype=torch.float64, requires_grad=True)
    log = F.log_softmax(x @ w.t() + bias, 1).gather(1, y)
    return [log, *torch.autograd.grad(-log.sum(), (x, w, bias))]

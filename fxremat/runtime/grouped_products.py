"""The products of experts in transformers, with a backward that can be traced.

Where torch has no kernel for matmuls of groups of rows, each with the matrix of an expert, as for
weights in 32 bits in compiled code, transformers calls an operator of its own. The backward that
comes with it reads how many rows each expert has been given, which only numbers can say: tracing
ends there, and with it the graph, in each layer. Here it calls two operators instead: the gradient
of the rows is again such a product, and that of the matrices is `grouped_outer`.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fxremat.runtime.kernels import define

_MODULE = "transformers.integrations.moe"
_NAME = "grouped_mm_fallback"
_ARGUMENTS = ["input", "weight", "offs"]


def _outer_like(one: Tensor, other: Tensor, offs: Tensor) -> Tensor:
    return one.new_empty(len(offs), one.shape[1], other.shape[1])


@define("(Tensor one, Tensor other, Tensor offs) -> Tensor", _outer_like)
def grouped_outer(one: Tensor, other: Tensor, offs: Tensor) -> Tensor:
    """``one.T @ other`` of each group of rows, which end at ``offs``: a matrix for each group."""
    result = torch.zeros_like(_outer_like(one, other, offs))
    start = 0
    for product, end in zip(result, offs.tolist(), strict=True):
        torch.mm(one[start:end].T, other[start:end], out=product)
        start = end
    return result


def trace_experts() -> None:
    """Let graphs go on behind products of experts, if transformers has its operator for them."""
    product = getattr(torch.ops.transformers, _NAME, None) if _MODULE in sys.modules else None
    arguments = [] if product is None else product.default._schema.arguments
    if [each.name for each in arguments] == _ARGUMENTS:
        _register(product)


@cache
def _register(product: Any) -> None:
    def setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, offs = ctx.saved_tensors
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            of_rows = product(gradient, weight.transpose(-2, -1), offs)
        if ctx.needs_input_grad[1] and weight.stride(-1) == 1:
            of_weight = grouped_outer(rows, gradient, offs)
        elif ctx.needs_input_grad[1]:  # it is laid out as the weight is
            of_weight = grouped_outer(gradient, rows, offs).transpose(-2, -1)
        return of_rows, of_weight, None

    torch.library.register_autograd(f"transformers::{_NAME}", backward, setup_context=setup)

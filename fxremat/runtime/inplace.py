"""The operators that add a product to a tensor that is there, and the in-place forms of others.

    addmm_into(acc, a, b)        acc += a @ b
    baddbmm_into(acc, a, b)      the same for batches

``acc`` may have any shape with as many elements: the product has theirs, in the same order. Memory
is taken for no result; where a pass of the compiler has laid ``acc`` out otherwise, for a while.

`IN_PLACE` says of a call which other call writes the same result over its first argument.
"""

from __future__ import annotations

from typing import Any

import torch

from fxremat.compat.configuration import OpOverload
from fxremat.runtime.kernels import HOLDS_STRIDES, no_result, register

_SCHEMA = "(Tensor(a!) acc, Tensor a, Tensor b) -> ()"


def _addmm_into(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    _add(acc, (a.size(0), b.size(1)), torch.addmm, a, b)


def _baddbmm_into(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    _add(acc, (a.size(0), a.size(1), b.size(2)), torch.baddbmm, a, b)


def _add(acc: torch.Tensor, shape: Any, op: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    if acc.is_contiguous():
        into = acc.view(shape)
        op(into, a, b, out=into)
    else:
        acc.copy_(op(acc.reshape(shape), a, b).view(acc.shape))


addmm_into = register("addmm_into", _SCHEMA, _addmm_into, no_result, HOLDS_STRIDES)
"""``addmm_into(acc, a, b)``: add the matrix product of a and b to acc."""

baddbmm_into = register("baddbmm_into", _SCHEMA, _baddbmm_into, no_result, HOLDS_STRIDES)
"""``baddbmm_into(acc, a, b)``: add the products of two batches of matrices to acc."""

IN_PLACE: dict[OpOverload, OpOverload] = {
    torch.ops.aten.addmm.default: addmm_into,
    torch.ops.aten.baddbmm.default: baddbmm_into,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
}
"""Call -> the call with the same arguments that writes its result over the first of them."""

"""Floating-point operations of a call of the operator ``rows``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.flop_counter import flop_registry

from fxremat.runtime.chunks.buffers import CONVOLUTION, CONVOLUTIONS, MATMULS
from fxremat.runtime.chunks.program import operator_of, parse, with_values


def _shape(given: Any) -> Sequence[int]:
    """The shape of a tensor, or the shape itself."""
    return tuple(getattr(given, "shape", given))


def flops(rows: Sequence[Any], whole: Sequence[Any], program: str, *_: Any, **__: Any) -> int:
    """Of matmuls and convolutions: a multiplication and an addition for each term."""
    parsed, total = parse(program), int(_shape(rows[0])[0])

    def shape(number: int) -> Sequence[int]:
        one = parsed.instruction(number)
        if number < parsed.num_rows:
            return _shape(rows[number])
        if one is None:
            return _shape(whole[number - parsed.num_rows])
        return {"row": (total, *one.row_shape), "last": (*one.row_shape, total)}.get(
            one.kind, one.row_shape
        )

    found = 0
    for one in parsed.loop:
        if one.op in MATMULS:
            left = one.args[-2]
            results = one.numel * (1 if one.kind == "sum" else total)
            found += 2 * results * int(shape(left.number)[-1])
        elif one.op in CONVOLUTIONS:
            args = with_values(one.args, shape, total)
            made = (total, *one.row_shape) if one.op == CONVOLUTION else (None, one.row_shape, None)
            found += int(flop_registry[operator_of(one.op).overloadpacket](*args, out_val=made))
    return found

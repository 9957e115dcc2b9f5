"""A call of the operator ``rows``: its arguments, and how they cut the rows into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from fxremat.runtime.chunks.buffers import (
    CONVOLUTION,
    CONVOLUTIONS,
    MATMULS,
    Layout,
    layout,
    places_of_images,
)
from fxremat.runtime.chunks.fused_kernels import Kernel, Shape, is_worth_fusing, kernels_of
from fxremat.runtime.chunks.program import Program, operator_of, parse, with_values

Tensors = Sequence[torch.Tensor]
Fused = Sequence[Kernel | None]
"""The kernel of each stage, None where it runs operator by operator."""


def even(total: int, most: int) -> int:
    """The size of the pieces, where ``total`` rows are cut into as few as can be of ``most``."""
    count = ceil(total / max(1, most))
    return ceil(total / count) if count else 0


def pieces(total: int, size: int) -> list[tuple[int, int]]:
    """``total`` rows in pieces of ``size``; the last may be smaller."""
    return [(a, min(a + size, total)) for a in range(0, total, size)] if size else []


@dataclass(frozen=True)
class RowsCall:
    """The arguments of the operator, in its order; the tensors may be fake."""

    rows: Tensors
    whole: Tensors
    text: str
    chunk_rows: int
    tile_rows: int
    fused: bool = False
    channels_last: bool = False

    @property
    def program(self) -> Program:
        return parse(self.text)

    @property
    def plan(self) -> Layout:
        return layout(self.text)

    def format_of(self, result: int) -> torch.memory_format:
        """How the result at this place lies in memory."""
        last = self.channels_last and result in places_of_images(self.text)
        return torch.channels_last if last else torch.contiguous_format

    @property
    def total(self) -> int:
        return int(self.rows[0].shape[0])

    @property
    def chunk(self) -> int:
        """Rows of a chunk; the last may have fewer.

        On a GPU it has what is left over, and all others as many as were chosen: memory of whole
        chunks is aligned as kernels expect it.
        """
        if self.rows[0].device.type != "cpu":
            return min(self.total, self.chunk_rows)
        return even(self.total, self.chunk_rows)

    @property
    def tile(self) -> int:
        """Rows of a tile; the last of a chunk may have fewer."""
        return even(self.chunk, self.tile_rows)

    @cached_property
    def kernels(self) -> Fused:
        stages = self.plan.stages
        if not self.fused or not any(map(is_worth_fusing, stages)):
            return (None,) * len(stages)
        shapes = [Shape.of(row).dense() for row in self.rows]
        return kernels_of(self.text, (*shapes, *map(Shape.of, self.whole)), self.tile)


# --- operations of a call ---------------------------------------------------------------------


def _shape(given: Any) -> Sequence[int]:
    return tuple(getattr(given, "shape", given))


def flops(rows: Sequence[Any], whole: Sequence[Any], program: str, *_: Any, **__: Any) -> int:
    """Operations of matmuls and convolutions: a multiplication and an addition for each term."""
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

"""A call of the operator ``rows``: its arguments, and which rows are computed in which pieces.

Rows that the program says are ignored need not be.

    labels    -100   7  -100  -100   3   ...
    order        1   4   ...                        the rows that count
    chunk     rows 1, 4, ... of each row input, gathered
    results   in front, as they are computed; at the end each goes to its row

A call takes the same memory for any number of ignored rows: where the rows that count are, and a
chunk of each row input, have room from the start. Results are spread, last row first, in memory
that the loop has given back. The last tile is filled up with a row like an ignored one, which adds
nothing. All rows are computed where none counts, where leaving some out would save no tile, and
while a CUDA graph is being recorded. On a GPU the host has to wait for the labels, so only a long
call looks for ignored rows (`LEAST_FLOPS`). See docs/design/ignored_rows.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from fxremat.compat.tensors import is_fake
from fxremat.core.constants import LEAST_FLOPS
from fxremat.runtime.chunks.buffers import (
    CONVOLUTION,
    CONVOLUTIONS,
    MATMULS,
    Layout,
    layout,
    places_of_images,
)
from fxremat.runtime.chunks.fused_kernels import Kernel, Shape, is_worth_fusing, kernels_of
from fxremat.runtime.chunks.program import Number, Program, operator_of, parse, with_values


def even(total: int, most: int) -> int:
    """The size of the pieces, where ``total`` rows are cut into as few as can be of ``most``."""
    count = ceil(total / max(1, most))
    return ceil(total / count) if count else 0


@dataclass(frozen=True)
class RowsCall:
    """The arguments of the operator, in its order; the tensors may be fake."""

    rows: Sequence[torch.Tensor]
    whole: Sequence[torch.Tensor]
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

    def new_result(self, place: int) -> torch.Tensor:
        """Memory for the result at this place."""
        one = self.program[self.program.results[place]]
        shape = one.row_shape if one.kind == "sum" else (self.total, *one.row_shape)
        last = self.channels_last and place in places_of_images(self.text)
        form = torch.channels_last if last else torch.contiguous_format
        return torch.empty(shape, dtype=one.dtype, device=self.rows[0].device, memory_format=form)

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
    def kernels(self) -> Sequence[Kernel | None]:
        """The kernel of each stage, None where it runs operator by operator."""
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


# --- rows that are left out -------------------------------------------------------------------


def leaves_out(call: RowsCall) -> bool:
    if call.program.ignored is None:
        return False
    is_cpu = call.rows[0].device.type == "cpu"
    return is_cpu or flops(call.rows, call.whole, call.text) >= LEAST_FLOPS


def bytes_to_leave_out(call: RowsCall, slots: int) -> int:
    """Bytes beside those of a call that looks for no rows, whose chunks take ``slots`` bytes.

    They are the same for any number of ignored rows.
    """
    if not leaves_out(call):
        return 0
    program, total = call.program, call.total
    read = [call.rows[number] for number in _numbers_read(program)]
    rows = [row.shape[1:].numel() * row.dtype.itemsize for row in read]
    results = [program[n] for n in program.results if n >= program.first]
    spread = [one.nbytes for one in results if one.kind != "sum"]
    compared = total if call.rows[0].device.type == "cpu" else 0
    # before the loop labels are compared, and behind it at least a row is held
    loop = slots + call.chunk * sum(rows)
    return total * torch.int64.itemsize + max(loop, compared, *spread) - slots


def rows_to_run(count: int, chunk: int, tile: int) -> int:
    """``count`` rows in chunks, the last of which is filled up with whole tiles."""
    chunks, rest = divmod(count, chunk)
    return chunks * chunk + min(chunk, ceil(rest / tile) * tile)


def _numbers_read(program: Program) -> list[int]:
    return sorted({n for one in program.loop for n in one.reads if n < program.num_rows})


class CountedRows:
    """Of one call that `leaves_out` rows: which rows run, and the inputs of a chunk of them.

    ``rows`` are the row inputs, dense. ``total`` is how many rows run. ``are_all`` says that these
    are all there are, each in its place.
    """

    def __init__(self, call: RowsCall, rows: Sequence[torch.Tensor]) -> None:
        ignored = call.program.ignored
        assert ignored is not None
        self.program, self.ignored, self.rows = call.program, ignored, rows
        labels = rows[ignored.label].view(-1)
        self.order = labels.new_empty(call.total, dtype=torch.int64)
        self.places = _places(labels, ignored.number, self.order)
        count = call.total if self.places is None else len(self.places)
        run = rows_to_run(count, call.chunk, call.tile) if count else 0
        self.are_all = count == 0 or run >= call.total
        self.count, self.total = count, call.total if self.are_all else run
        self.gathered = {
            number: torch.empty((call.chunk, *rows[number].shape[1:]), dtype=rows[number].dtype,
                                device=rows[number].device)
            for number in _numbers_read(call.program)
        }  # fmt: skip

    def gather(self, start: int, end: int) -> None:
        """Take the inputs of rows ``start`` to ``end`` of those that run."""
        if self.are_all:
            return
        order = self.order[start : min(end, self.count)]
        own, size = len(order), end - start
        for number, made in self.gathered.items():
            torch.index_select(self.rows[number], 0, order, out=made[:own])
            if own < size:
                known = self.ignored.inputs[number]
                made[own:size].copy_(made[own - 1 : own])
                if known is not None:
                    made[own:size].fill_(known)

    @property
    def nbytes(self) -> int:
        return sum(made.nbytes for made in self.gathered.values())

    def spread(self, result: torch.Tensor, number: Number, room: int) -> None:
        """Bring rows that lie in front to their places, ``number`` everywhere else.

        ``room`` is how many bytes that may take; it takes a row at least.
        """
        if self.are_all:
            return
        assert self.places is not None
        step = max(1, room // (prod(result.shape[1:]) * result.itemsize))
        end = len(result)
        for a in range((self.count - 1) // step * step, -1, -step):
            # a row never goes forward, so rows in front of these are still where they were
            b = min(a + step, self.count)
            held, place = result[a:b].clone(), int(self.places[a])
            result[place:end].fill_(number)
            result.index_copy_(0, self.order[a:b], held)
            end = place
        result[:end].fill_(number)


def _places(labels: torch.Tensor, number: Number, order: torch.Tensor) -> torch.Tensor | None:
    """The rows of another label, for the host, also in front of ``order``; None if unknown."""
    if is_fake(labels) or (labels.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    if labels.device.type != "cpu":
        places = (labels.cpu() != number).nonzero().view(-1)
        order[: len(places)].copy_(places)
        return places
    places = order.view(-1, 1).resize_(0, 1)  # torch gives it as many rows as there are
    return torch.nonzero(labels != number, out=places).view(-1)

"""The operator ``rows``: a region of a graph, computed for a few rows at a time.

    rows(Tensor[] rows, Tensor[] whole, str program, int chunk_rows, int tile_rows,
         bool fused=False, bool channels_last=False) -> Tensor[]

``rows`` are tensors with the N rows in front. ``whole`` are those that each chunk reads as a whole.
``program`` says what is computed (`program`), `buffers` where that is kept, and `call` which
rows are left out. Results that have rows are written chunk by chunk into their place; sums of
low precision are added up in float32. With ``channels_last``, results that come straight from a
convolution of images have the channels last in memory.

What stands between two matmuls or convolutions runs operator by operator. With ``fused`` it runs as
one kernel (`fused_kernels`), but for the last rows of a chunk if they are fewer than a tile.

The operator is pure. Beside its results a call takes the bytes that are laid out before the first
chunk, and those of convolutions and of operators that cannot write into given memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from fxremat.compat.tensors import is_fake, storage_key
from fxremat.runtime.chunks.buffers import (
    CONVOLUTIONS,
    COPIES,
    IN_PLACE,
    MATMULS,
    STATISTICS,
    VARIANCE,
    VIEWS,
    accumulates_in,
    adds_straight,
    out_form,
)
from fxremat.runtime.chunks.call import CountedRows, RowsCall, flops, leaves_out
from fxremat.runtime.chunks.costs import inside, workspace
from fxremat.runtime.chunks.fused_kernels import Kernel, Memory
from fxremat.runtime.chunks.program import Instruction, Ref, overload, with_values
from fxremat.runtime.kernels import define, pieces

_ATEN = torch.ops.aten


class _RowSum:
    """A sum over all rows, while it is being added up: in float32 or better."""

    def __init__(self, one: Instruction, result: torch.Tensor, is_fused: bool) -> None:
        self.one, self.result, wide = one, result, accumulates_in(one.dtype)
        self.total = result if wide == one.dtype else torch.empty_like(result, dtype=wide)
        self.is_empty = not is_fused
        if is_fused:
            self.total.zero_()  # a kernel only adds

    def add(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        total, op = self.total, self.one.op
        if adds_straight(self.one, total.device.type):
            self._add_product(*args)
        else:
            if op not in MATMULS | CONVOLUTIONS:
                kwargs = {**kwargs, "dtype": total.dtype}
            made = overload(op)(*args, **kwargs)
            if self.is_empty:
                total.copy_(made)
            else:
                total.add_(made.to(total.dtype))
        self.is_empty = False

    def _add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        total, times = self.total, float(not self.is_empty)
        if total is self.result:
            torch.addmm(total, left, right, beta=times, out=total)
        elif not is_fake(total):  # torch 2.11 has no shapes for this one
            _ATEN.addmm.dtype_out(total, left, right, total.dtype, beta=times, out=total)

    def finish(self, _: Instruction) -> torch.Tensor:
        """The sum, zero where there were no rows."""
        if self.is_empty:
            return self.result.zero_()
        return self.result if self.total is self.result else self.result.copy_(self.total)


class _Execution:
    """One call: inputs, results, slots; and what is known of the chunk being computed."""

    def __init__(self, call: RowsCall) -> None:
        self.arguments = call
        self.program, self.plan, self.kernels = call.program, call.plan, call.kernels
        self.total, self.chunk_rows, self.tile_rows = call.total, call.chunk, call.tile
        # a compiler may have given them other strides
        self.rows = [row.contiguous() for row in call.rows]
        self.device = call.rows[0].device
        self.values = dict(enumerate(call.whole, self.program.num_rows))
        fused = {
            number
            for stage, kernel in zip(self.plan.stages, self.kernels, strict=True)
            if kernel is not None
            for number in stage.values
        }
        self.results: dict[int, torch.Tensor] = {}
        self.sums: dict[int, _RowSum | RunningStatistics] = {}
        self.statistics: dict[str, RunningStatistics] = {}
        for place, number in enumerate(self.program.results):
            one = self.program[number]
            if one.op in STATISTICS:
                made = RunningStatistics(one, number, self.device)
                self.sums[number] = self.statistics.setdefault(repr(one.args), made)
            elif one.kind == "sum":
                self.sums[number] = _RowSum(one, call.new_result(place), number in fused)
            else:
                self.results[number] = call.new_result(place)
        self.memory: dict[int, torch.Tensor] = {}
        self.counted: CountedRows | None = None

    def slots(self, rows: int, of_chunk: bool) -> dict[int, torch.Tensor]:
        """New memory for the slots of a chunk, or for those of a tile."""
        return {
            position: torch.empty(rows * slot.numel, dtype=slot.dtype, device=self.device)
            for position, slot in enumerate(self.plan.slots)
            if slot.of_chunk == of_chunk
        }

    def run(self) -> list[torch.Tensor]:
        chunk, tile, total = self.chunk_rows, self.tile_rows, self.total
        if leaves_out(self.arguments):
            self.counted = CountedRows(self.arguments, self.rows)
            total = self.counted.total
        self.memory = self.slots(chunk, of_chunk=True)
        room = sum(slot.nbytes for slot in self.memory.values())
        if not any(self.kernels):
            self.memory |= self.slots(tile, of_chunk=False)
        for start, end in pieces(total, chunk):
            if self.counted is not None:
                self.counted.gather(start, end)
            self.run_chunk(_Piece(self, start, start, end), tile)
        self.memory.clear()
        if self.counted is not None:
            self.spread(self.counted, room)
        done = {number: one.finish(self.program[number]) for number, one in self.sums.items()}
        return [done[n] if n in done else self.results[n] for n in self.program.results]

    def spread(self, counted: CountedRows, room: int) -> None:
        """Bring the results of rows to their places, in the room that the loop no longer needs."""
        room += counted.nbytes
        counted.gathered.clear()
        for number, known in zip(self.program.results, counted.ignored.results, strict=True):
            if number in self.results:
                counted.spread(self.results[number], known, room)

    def run_chunk(self, chunk: _Piece, tile: int) -> None:
        for stage, kernel in zip(self.plan.stages, self.kernels, strict=True):
            if stage.of_chunk:
                chunk.compute(stage.values)
                continue
            for a, b in pieces(chunk.count, tile):
                part = _Piece(self, chunk.start, chunk.a + a, chunk.a + b)
                part.compute_tile(stage.values, kernel if b - a == tile else None)
                del part  # and its memory


class _Piece:
    """Rows a to b of a chunk that begins at ``start``, and the values of these rows."""

    def __init__(self, run: _Execution, start: int, a: int, b: int) -> None:
        self.run, self.start, self.a, self.b = run, start, a, b
        self.count = b - a
        self.seen: dict[int, torch.Tensor] = {}
        self.own: dict[int, torch.Tensor] = {}

    def compute(self, values: Sequence[int]) -> None:
        for number in values:
            one = self.run.program[number]
            if one.kind == "sum":
                args = with_values(one.args, self.value, self.count)
                total = self.run.sums[number]
                if isinstance(total, _RowSum):
                    total.add(args, dict(one.kwargs))
                elif total.asked_by == number:
                    total.add(args[0])
            else:
                self.write(number, one)

    def compute_tile(self, values: Sequence[int], kernel: Kernel | None) -> None:
        """By a kernel, or else operator by operator."""
        if kernel is not None:
            kernel.run([self.memory(one) for one in kernel.memory])
            return
        if any(self.run.kernels):
            self.own = self.run.slots(self.count, of_chunk=False)
        self.compute(values)

    def memory(self, wanted: Memory) -> torch.Tensor:
        if wanted.kind == "value":
            return self.value(wanted.number)
        if wanted.kind == "sum":
            total = self.run.sums[wanted.number]
            assert isinstance(total, _RowSum), "no kernel adds to statistics"
            return total.total
        return self.rows_of_slot(wanted.number, (-1,))

    def rows_of_slot(self, slot: int, row_shape: Sequence[int]) -> torch.Tensor:
        numel, of_chunk = self.run.plan.slots[slot].numel, self.run.plan.slots[slot].of_chunk
        begin = self.a - self.start if of_chunk else 0
        given = self.own if slot in self.own else self.run.memory
        return given[slot].narrow(0, begin * numel, self.count * numel).view(self.count, *row_shape)

    def value(self, number: int) -> torch.Tensor:
        """These rows of a value, or a value that has none."""
        run = self.run
        if number in run.values:
            return run.values[number]
        if number not in self.seen:
            self.seen[number] = self.look(number)
        return self.seen[number]

    def look(self, number: int) -> torch.Tensor:
        run = self.run
        if number < run.program.num_rows:
            if run.counted is None or run.counted.are_all:
                return run.rows[number][self.a : self.b]
            return run.counted.gathered[number][self.a - self.start : self.b - self.start]
        if number in run.results:
            return run.results[number][self.a : self.b]
        one = run.program[number]
        if one.op in VIEWS:
            looked: torch.Tensor = one.run(self.value, self.count)
            return looked
        return self.rows_of_slot(run.plan.slot_of[number], one.row_shape)

    def write(self, number: int, one: Instruction) -> None:
        out = self.value(number)
        if one.op in COPIES or one.op in IN_PLACE:
            assert isinstance(one.args[0], Ref)
            given = self.value(one.args[0].number)
            if not _is_same(given, out):
                out.copy_(given)
            if one.op in IN_PLACE:
                args = with_values(one.args[1:], self.value, self.count)
                IN_PLACE[one.op](out, *args, **one.kwargs)
        elif (form := out_form(one.op)) is not None:
            args, named = one.arguments(self.value, self.count)
            form(*args, **named, out=out)
        else:
            out.copy_(one.run(self.value, self.count))


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether rows of one shape are the same memory, if it exists; read as the same type."""
    begins = one.storage_offset() == other.storage_offset() and one.dtype == other.dtype
    return begins and storage_key(one) == storage_key(other)


def _fake(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
    call = RowsCall(*args, **kwargs)
    return [call.new_result(place) for place in range(len(call.program.results))]


@define(
    "(Tensor[] rows, Tensor[] whole, str program, int chunk_rows, int tile_rows,"
    " bool fused=False, bool channels_last=False) -> Tensor[]",
    _fake,
    workspace=workspace,
    flops=flops,
    inside=inside,
)
def _rows(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
    return _Execution(RowsCall(*args, **kwargs)).run()


ROWS = _rows


# --- mean and variance ------------------------------------------------------------------------


class RunningStatistics:
    """Mean and variance along some dimensions, the rows among them; biased until `variance`.

    The instruction that they are made for, ``asked_by``, has them take chunks in.
    """

    def __init__(self, one: Instruction, number: int, device: torch.device) -> None:
        _, self.dims = one.args
        self.asked_by = number
        self.count = 0
        self.mean = torch.zeros(one.row_shape, dtype=one.dtype, device=device)
        self.squares = torch.zeros_like(self.mean)

    def add(self, given: torch.Tensor) -> None:
        """Take a chunk in; it takes memory of the chunk's size meanwhile."""
        count = prod(given.shape[dim] for dim in self.dims)
        mean = given.sum(self.dims, keepdim=True).div_(count)
        around = given - mean
        squares = around.square_().sum(self.dims)
        change = mean.view_as(self.mean).sub_(self.mean)
        total = self.count + count
        self.mean.add_(change, alpha=count / total)
        self.squares.add_(squares).add_(change.square_(), alpha=self.count * count / total)
        self.count = total

    def finish(self, one: Instruction) -> torch.Tensor:
        """What an instruction wants of the two."""
        return self.variance(one.kwargs["correction"]) if one.op == VARIANCE else self.mean

    def variance(self, correction: float) -> torch.Tensor:
        """The variance; ``correction`` is what is taken off the number of elements."""
        return self.squares.div(max(0.0, self.count - correction))

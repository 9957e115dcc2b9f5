"""What a call of the operator ``rows`` takes: bytes of scratch memory, calls, and moves."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from fxremat.core.constants import CACHE_SPEED
from fxremat.runtime.chunks.buffers import (
    CONVOLUTIONS,
    MATMULS,
    REDUCTIONS,
    STATISTICS,
    Stage,
    accumulates_in,
    of_total,
    while_adding,
)
from fxremat.runtime.chunks.call import RowsCall, bytes_to_leave_out
from fxremat.runtime.chunks.fused_kernels import CACHE_LINE_BYTES, is_worth_fusing, read, written
from fxremat.runtime.chunks.program import Instruction, Kind, Program, operator_of, with_values
from fxremat.runtime.kernels import Inside, LibraryCall, Measure, pieces


def workspace(*args: Any, measure: Measure, by_inductor: bool = False, **kwargs: Any) -> int:
    """Slots, sums in the making, temporaries, and rows in order.

    And what it takes to leave ignored rows out, however many there are.

    What a convolution of a chunk takes is measured. Of a call that will run fused
    ``by_inductor``, on a GPU, each kernel is taken to have a few numbers a row of its own, as
    nothing is known of its code. (On a CPU, tiles are too small for that to matter.)
    """
    call = RowsCall(*args, **kwargs)
    if by_inductor and not call.fused and call.rows[0].device.type != "cpu":
        few = call.tile * CACHE_LINE_BYTES
        kernels = [few if is_worth_fusing(stage) else None for stage in call.plan.stages]
    else:
        kernels = [None if kernel is None else kernel.scratch for kernel in call.kernels]
    copied = [row for row in call.rows if not row.is_contiguous()]
    slots = call.plan.slot_bytes(call.chunk, of_chunk=True)
    return (
        sum(row.numel() * row.dtype.itemsize for row in copied)
        + slots
        + bytes_to_leave_out(call, slots)
        + _scratch(call, kernels, measure)
    )


def _other_tile(call: RowsCall) -> int:
    """Rows of the largest tile that is smaller than the rest: 0 if all are alike."""
    chunks = pieces(call.total, call.chunk)
    sizes = {b - a for c, d in chunks for a, b in pieces(d - c, call.tile)}
    return max(sizes - {call.tile}, default=0)


def _operands(call: RowsCall, one: Instruction, rows: int) -> tuple[Any, ...]:
    """The arguments of an instruction for so many rows: tensors like those it gets."""
    program = call.program

    def value(number: int) -> torch.Tensor:
        made = program.instruction(number)
        if made is not None:
            front = (rows,) if made.kind in ("row", "last") else ()
            tensor = call.rows[0].new_empty((*front, *made.row_shape), dtype=made.dtype)
            return tensor.movedim(0, -1) if made.kind == "last" else tensor
        if number >= program.num_rows:
            return call.whole[number - program.num_rows]
        given = call.rows[number]
        return given.new_empty((rows, *given.shape[1:]))

    return tuple(with_values(one.args, value, rows))


def _on_chunk(call: RowsCall, one: Instruction, rows: int, measure: Measure) -> int:
    """Bytes that one instruction takes of ``rows`` rows, beside what has a slot."""
    if one.op in STATISTICS:
        (given,) = one.reads
        return rows * _size(call, given, "row") + 4 * one.nbytes
    added = while_adding(one, call.rows[0].device.type) if one.kind == "sum" else 0
    if one.op not in CONVOLUTIONS:
        return added
    results = one.nbytes * (1 if one.kind == "sum" else rows)
    return max(added, results + measure(operator_of(one.op), _operands(call, one, rows), {}))


def _on_chunks(call: RowsCall, values: Sequence[int], measure: Measure) -> int:
    """Bytes that the worst of some instructions takes while it runs, of the worst chunk."""
    counts = {b - a for a, b in pieces(call.total, call.chunk)}
    found = [_on_chunk(call, call.program[n], rows, measure) for n in values for rows in counts]
    return max(found, default=0)


def _reducing(call: RowsCall, values: Sequence[int], measure: Measure) -> int:
    """Bytes that torch's own kernel takes for the worst reduction of a tile: on a GPU, some do."""
    ones = [one for n in values if (one := call.program[n]).op in REDUCTIONS]
    taken = (measure(operator_of(one.op), _operands(call, one, call.tile), {}) for one in ones)
    return max(taken, default=0)


def _scratch(call: RowsCall, kernels: Sequence[int | None], measure: Measure) -> int:
    """Bytes of sums in the making, and of what exists for as long as a chunk is computed.

    ``kernels`` are the bytes that the kernel of each stage allocates, None where it runs operator
    by operator.
    """
    program, plan, tile = call.program, call.plan, call.tile
    any_fused = any(one is not None for one in kernels)
    other, device = _other_tile(call), call.rows[0].device.type
    held, aside = plan.slot_bytes(tile, of_chunk=False), plan.set_aside(tile)
    sums, taken = 0, 0 if any_fused else aside
    for stage, kernel in zip(plan.stages, kernels, strict=True):
        adding = [one for n in stage.values if (one := program[n]).kind == "sum"]
        sums += sum(map(of_total, adding))
        partial = max((while_adding(one, device) for one in adding if tile), default=0)
        if kernel is not None:
            rest = plan.set_aside(other) + partial if other else 0
            taken = max(taken, kernel, rest)
        elif stage.of_chunk:
            slots = 0 if any_fused else held
            taken = max(taken, slots + _on_chunks(call, stage.values, measure))
        else:
            reduced = _reducing(call, stage.values, measure) if device == "cuda" else 0
            taken = max(taken, aside, held + max(reduced, partial))
    return sums + taken


def inside(*args: Any, on_cpu: bool, by_inductor: bool = False, **kwargs: Any) -> Inside:
    """The instructions of every chunk and tile; what a tile moves stays in the cache.

    Tiles are for CPUs: elsewhere the same graph would have none. A CPU packs the operands of a
    matmul before it begins, but adds to a sum beside computing; a GPU reads and writes the sum. A
    fused stage is one call, and moves what it reads from memory and writes there.
    """
    call = RowsCall(*args, **kwargs)
    parsed, plan = call.program, call.plan
    total, chunk, tile = call.total, call.chunk, call.tile if on_cpu else call.chunk
    chunks = len(pieces(total, chunk))
    tiles = chunks * len(pieces(chunk, tile))
    found = Inside(0, 0)
    for stage in plan.stages:
        if by_inductor and is_worth_fusing(stage):
            touched = (*read(parsed, stage), *written(parsed, stage))
            moved = sum(_size(call, number, "row") for number in touched) * total
            found += Inside(tiles, moved, functions=_functions(parsed, stage, total))
            continue
        times, rows_each = (chunks, chunk) if stage.of_chunk else (tiles, tile)
        speed = CACHE_SPEED if rows_each < chunk else 1
        found += Inside(0, 0, functions=_functions(parsed, stage, total))
        for number in stage.values:
            one = parsed[number]
            elements = one.numel * (1 if one.kind == "sum" else total)
            found += Inside(times, 2 * elements * one.dtype.itemsize // speed)
            if one.op in MATMULS | CONVOLUTIONS:
                again = sum(_size(call, n, "whole") for n in one.reads)
                if one.kind == "sum" and not on_cpu:
                    again += 2 * elements * accumulates_in(one.dtype).itemsize
                made = LibraryCall(operator_of(one.op), _operands(call, one, rows_each), times)
                found += Inside(0, 0, (chunks - 1) * again, (made,))
    return found


def _functions(program: Program, stage: Stage, total: int) -> tuple[tuple[str, int], ...]:
    """What a stage computes of single elements, in all its chunks together."""
    return tuple(
        (operator_of(one.op).overloadpacket.__name__, one.numel * total)
        for one in (program[number] for number in stage.values)
        if one.kind == "row"
    )


def _size(call: RowsCall, number: int, kind: Kind) -> int:
    """Bytes of a value of this kind, or of one row of it; 0 for values of other kinds."""
    program = call.program
    one = program.instruction(number)
    if one is not None:
        return one.nbytes if one.kind == kind else 0
    if number < program.num_rows:
        given = call.rows[number]
        return prod(given.shape[1:]) * given.dtype.itemsize if kind == "row" else 0
    return call.whole[number - program.num_rows].nbytes if kind == "whole" else 0

"""The operator ``rows``: a region of a graph, computed for a few rows at a time.

    rows(Tensor[] rows, Tensor[] whole, str program, int chunk_rows, int tile_rows,
         bool fused=False) -> Tensor[]

``rows`` are tensors with the rows in front, N of them; ``whole`` are those that each chunk reads
as they are. ``program`` (see `row_program`) says what is computed, `row_plan` where it is kept.
Results that have rows are written chunk by chunk into their place; sums over the rows are added
up, those of low precision in float32.

What lies between two matmuls runs operator by operator, or, ``fused``, as one kernel (see
`row_kernels`); then some rows at the end, fewer than a tile, do not.

It is pure: what it writes into is its own. The bytes that a call takes beside its results are what
`row_plan` lays out, before the first chunk, and what loose values add to that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, prod
from typing import Any

import torch

from fxremat.runtime import kernels
from fxremat.runtime.row_kernels import (
    Kernel,
    Memory,
    Shape,
    is_worth_fusing,
    kernels_of,
    read,
    set_aside,
    written,
)
from fxremat.runtime.row_plan import (
    COPIES,
    IN_PLACE,
    MATMULS,
    VIEWS,
    Layout,
    accumulates_in,
    bases,
    extra_of_sum,
    layout,
    of_total,
    out_form,
)
from fxremat.runtime.row_program import Instruction, Program, Ref, overload, parse, with_values

Tensors = Sequence[torch.Tensor]
Fused = Sequence[Kernel | None]
"""Of each stage its kernel, None where it runs operator by operator."""

CACHE_SPEED = 4
"""How many times faster than memory a cache is taken to be, for the time of a call."""


def even(total: int, most: int) -> int:
    """The size of the pieces, where ``total`` rows are cut into as few as can be of ``most``."""
    count = ceil(total / max(1, most))
    return ceil(total / count) if count else 0


def pieces(total: int, size: int) -> list[tuple[int, int]]:
    """``total`` rows in pieces of ``size``; the last may be smaller."""
    return [(a, min(a + size, total)) for a in range(0, total, size)] if size else []


def _sizes(total: int, chunk_rows: int, tile_rows: int) -> tuple[int, int]:
    """Rows of a chunk and of a tile."""
    chunk = even(total, chunk_rows)
    return chunk, even(chunk, tile_rows)


class _Sum:
    """A sum over all rows, while it is being added up."""

    def __init__(self, one: Instruction, device: torch.device, is_fused: bool) -> None:
        self.one, self.wide = one, accumulates_in(one.dtype)
        self.result = torch.empty(one.rest, dtype=one.dtype, device=device)
        self.is_wide = self.wide == one.dtype
        self.total = self.result if self.is_wide else self._new(self.wide)
        self.partial: torch.Tensor | None = None
        self.cast: torch.Tensor | None = None
        self.is_fused, self.is_empty = is_fused, not is_fused
        if is_fused:
            self.total.zero_()  # a kernel only adds
        else:
            self._make_room()

    def _make_room(self) -> None:
        """For what some of the rows add up to; beside a kernel only while it is needed."""
        if self.one.op not in MATMULS:
            self.partial = self._new(self.wide)
        elif not self.is_wide:
            self.partial, self.cast = self._new(self.one.dtype), self._new(self.wide)

    def _new(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self.one.rest, dtype=dtype, device=self.result.device)

    def add(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Add what the instruction makes of some of the rows."""
        straight = self.one.op in MATMULS and self.is_wide
        if self.is_fused:
            self._make_room()
        if straight and not self.is_empty:
            self.total.addmm_(*args)
            return
        is_first = self.is_empty and self.total.dtype == self.made_in
        target, form = self.total if is_first else self.partial, out_form(self.one.op)
        assert form is not None
        assert target is not None
        form(*args, **kwargs, out=target)
        self._take(target)
        if self.is_fused:
            self.partial = None

    @property
    def made_in(self) -> torch.dtype:
        """The type of the instruction's own result."""
        return self.one.dtype if self.one.op in MATMULS else accumulates_in(self.one.dtype)

    def _take(self, made: torch.Tensor) -> None:
        if made is not self.total:
            if self.is_empty:
                self.total.copy_(made)
            else:
                self.total.add_(made if self.cast is None else self.cast.copy_(made))
        self.is_empty = False

    def finish(self) -> torch.Tensor:
        """The sum, zero where there were no rows."""
        if self.is_empty:
            return self.result.zero_()
        return self.result if self.is_wide else self.result.copy_(self.total)


class _Run:
    """One call: inputs, results, slots; and what is known of the chunk being computed."""

    def __init__(
        self, program: Program, plan: Layout, rows: Tensors, whole: Tensors, kernels_: Fused
    ) -> None:
        self.program, self.plan = program, plan
        self.rows, self.total = rows, rows[0].shape[0]
        self.device = rows[0].device
        self.kernels = kernels_
        self.values: dict[int, torch.Tensor] = dict(enumerate(whole, program.num_rows))
        for number, one in enumerate(program.setup, program.first):
            self.values[number] = self.call(one, self.values.__getitem__, 0)
        fused = {
            number
            for stage, kernel in zip(plan.stages, kernels_, strict=True)
            if kernel is not None
            for number in stage.values
        }
        self.results: dict[int, torch.Tensor] = {}
        self.sums: dict[int, _Sum] = {}
        for number in program.results:
            self._make_result(number, number in fused)
        self.memory: dict[int, torch.Tensor] = {}

    def _make_result(self, number: int, is_fused: bool) -> None:
        one = self.instruction(number)
        if one.kind == "sum":
            self.sums[number] = _Sum(one, self.device, is_fused)
        else:
            shape = (self.total, *one.rest)
            self.results[number] = torch.empty(shape, dtype=one.dtype, device=self.device)

    def slots(self, rows: int, of_chunk: bool) -> dict[int, torch.Tensor]:
        """New memory for the slots of a chunk, or for those of a tile."""
        return {
            position: torch.empty(rows * slot.numel, dtype=slot.dtype, device=self.device)
            for position, slot in enumerate(self.plan.slots)
            if slot.of_chunk == of_chunk
        }

    def instruction(self, number: int) -> Instruction:
        one = self.program.instruction(number)
        assert one is not None, "inputs are not computed"
        return one

    @staticmethod
    def call(one: Instruction, value: Callable[[int], Any], rows: int, **more: Any) -> Any:
        """What the instruction's operator gives."""
        args = with_values(one.args, value, rows)
        named = {key: with_values(arg, value, rows) for key, arg in one.kwargs.items()}
        return overload(one.op)(*args, **named, **more)

    def run(self, chunk: int, tile: int) -> list[torch.Tensor]:
        """All chunks, one after the other."""
        self.memory = self.slots(chunk, of_chunk=True)
        if not any(self.kernels):
            self.memory |= self.slots(tile, of_chunk=False)
        for start, end in pieces(self.total, chunk):
            self.run_chunk(_Piece(self, start, start, end), tile)
        self.memory.clear()
        done = {number: one.finish() for number, one in self.sums.items()}
        return [done[n] if n in done else self.results[n] for n in self.program.results]

    def run_chunk(self, chunk: _Piece, tile: int) -> None:
        for stage, kernel in zip(self.plan.stages, self.kernels, strict=True):
            if stage.of_chunk:
                chunk.compute(stage.values)
                continue
            for a, b in pieces(chunk.count, tile):
                is_all = b - a == chunk.count
                part = chunk if is_all else _Piece(self, chunk.start, chunk.a + a, chunk.a + b)
                if kernel is not None and b - a == tile:
                    kernel.compiled()([part.memory(one) for one in kernel.memory])
                else:
                    part.compute_tile(stage.values)


class _Piece:
    """Rows a to b of a chunk that begins at ``start``, and the values of these rows."""

    def __init__(self, run: _Run, start: int, a: int, b: int) -> None:
        self.run, self.start, self.a, self.b = run, start, a, b
        self.count = b - a
        self.seen: dict[int, torch.Tensor] = {}
        self.own: dict[int, torch.Tensor] = {}

    def compute(self, values: Sequence[int]) -> None:
        for number in values:
            one = self.run.instruction(number)
            if one.kind == "sum":
                args = with_values(one.args, self.value, self.count)
                self.run.sums[number].add(args, dict(one.kwargs))
            else:
                self.write(number, one)
            for dead in self.run.plan.dies.get(number, ()):
                self.seen.pop(dead, None)

    def compute_tile(self, values: Sequence[int]) -> None:
        """Operator by operator, where no kernel does it; the memory is there for as long."""
        if any(self.run.kernels):
            self.own = self.run.slots(self.count, of_chunk=False)
        self.compute(values)
        if self.own:
            self.own = {}
            self.seen = {n: t for n, t in self.seen.items() if not self.is_of_tile(n)}

    def is_of_tile(self, number: int) -> bool:
        """Whether what was looked at lies in a slot of the tile."""
        plan = self.run.plan
        slots = [plan.slot_of.get(base) for base in bases(self.run.program, number)]
        return any(slot is not None and not plan.slots[slot].of_chunk for slot in slots)

    def memory(self, wanted: Memory) -> torch.Tensor:
        """What a kernel reads or writes."""
        if wanted.kind == "value":
            return self.value(wanted.number)
        if wanted.kind == "sum":
            return self.run.sums[wanted.number].total
        return self.rows_of_slot(wanted.number, wanted.rest)

    def rows_of_slot(self, slot: int, rest: Sequence[int]) -> torch.Tensor:
        numel, of_chunk = self.run.plan.slots[slot].numel, self.run.plan.slots[slot].of_chunk
        begin = self.a - self.start if of_chunk else 0
        given = self.own if slot in self.own else self.run.memory
        return given[slot].narrow(0, begin * numel, self.count * numel).view(self.count, *rest)

    def value(self, number: int) -> torch.Tensor:
        """These rows of a value, or a value that has none."""
        run = self.run
        if number in run.values:
            return run.values[number]
        found = self.seen.get(number)
        if found is None:
            found = self.seen[number] = self.look(number)
        return found

    def look(self, number: int) -> torch.Tensor:
        run = self.run
        if number < run.program.num_rows:
            return run.rows[number][self.a : self.b]
        if number in run.results:
            return run.results[number][self.a : self.b]
        one = run.instruction(number)
        if one.op in VIEWS:
            looked: torch.Tensor = run.call(one, self.value, self.count)
            return looked
        return self.rows_of_slot(run.plan.slot_of[number], one.rest)

    def write(self, number: int, one: Instruction) -> None:
        """Compute a value where it belongs."""
        if number in self.run.plan.loose:
            made = self.run.call(one, self.value, self.count)
            if number in self.run.plan.slot_of or number in self.run.results:
                self.value(number).copy_(made)
            else:
                self.seen[number] = made
            return
        out = self.value(number)
        if one.op in COPIES or one.op in IN_PLACE:
            assert isinstance(one.args[0], Ref)
            given = self.value(one.args[0].number)
            if given.data_ptr() != out.data_ptr() or given.dtype != out.dtype:
                out.copy_(given)
            if one.op in IN_PLACE:
                args = with_values(one.args[1:], self.value, self.count)
                IN_PLACE[one.op](out, *args, **one.kwargs)
            return
        form = out_form(one.op)
        assert form is not None
        args = with_values(one.args, self.value, self.count)
        named = {key: with_values(arg, self.value, self.count) for key, arg in one.kwargs.items()}
        form(*args, **named, out=out)


def _kernels(
    rows: Tensors, whole: Tensors, program: str, chunk_rows: int, tile_rows: int, fused: bool
) -> Fused:
    """Of each stage its kernel, None where it has none."""
    stages = layout(program).stages
    if not fused or not any(map(is_worth_fusing, stages)):
        return (None,) * len(stages)
    _, tile = _sizes(int(rows[0].shape[0]), chunk_rows, tile_rows)
    shapes = [Shape.of(row).dense() for row in rows] + [Shape.of(one) for one in whole]
    return kernels_of(program, tuple(shapes), tile)


def _rows(
    rows: Tensors,
    whole: Tensors,
    program: str,
    chunk_rows: int,
    tile_rows: int,
    fused: bool = False,
) -> list[torch.Tensor]:
    sizes = _sizes(rows[0].shape[0], chunk_rows, tile_rows)
    found = _kernels(rows, whole, program, chunk_rows, tile_rows, fused)
    rows = [row.contiguous() for row in rows]  # a compiler may have given them other strides
    return _Run(parse(program), layout(program), rows, whole, found).run(*sizes)


def compile_kernels(*args: Any, **kwargs: Any) -> None:
    """Compile what a call with these arguments, of fake tensors, will run."""
    for kernel in _kernels(*args, **kwargs):
        if kernel is not None:
            kernel.compiled()


def _fake(
    rows: Tensors,
    whole: Tensors,
    program: str,
    chunk_rows: int,
    tile_rows: int,
    fused: bool = False,
) -> list[torch.Tensor]:
    parsed, made = parse(program), []
    for number in parsed.results:
        one = parsed.instruction(number)
        assert one is not None
        shape = one.rest if one.kind == "sum" else (rows[0].shape[0], *one.rest)
        made.append(rows[0].new_empty(shape, dtype=one.dtype))
    return made


def _workspace(
    rows: Tensors,
    whole: Tensors,
    program: str,
    chunk_rows: int,
    tile_rows: int,
    fused: bool = False,
) -> int:
    """Slots, sums in the making, what is made before the loop, loose values, and rows in order."""
    parsed, plan = parse(program), layout(program)
    chunk, tile = _sizes(int(rows[0].shape[0]), chunk_rows, tile_rows)
    found = _kernels(rows, whole, program, chunk_rows, tile_rows, fused)
    before = [one for one in parsed.setup if one.op not in VIEWS]
    copied = [row for row in rows if not row.is_contiguous()]
    return (
        sum(row.numel() * row.dtype.itemsize for row in copied)
        + sum(one.numel * one.dtype.itemsize for one in before)
        + sum(slot.nbytes(chunk, tile) for slot in plan.slots if slot.of_chunk)
        + _scratch(parsed, plan, found, _cut(int(rows[0].shape[0]), chunk, tile))
    )


def _cut(total: int, chunk: int, tile: int) -> tuple[int, int]:
    """Rows of a tile, and of the largest that is smaller than that: 0 if all are alike."""
    sizes = {b - a for c, d in pieces(total, chunk) for a, b in pieces(d - c, tile)}
    return tile, max(sizes - {tile}, default=0)


def _scratch(program: Program, plan: Layout, found: Fused, cut: tuple[int, int]) -> int:
    """Bytes of sums in the making, and of what exists for as long as a tile is computed."""
    tile, other = cut
    sums, taken = 0, 0 if any(found) else set_aside(plan, tile)
    for stage, kernel in zip(plan.stages, found, strict=True):
        adding = [one for n in stage.values if (one := program.instruction(n)) is not None]
        adding = [one for one in adding if one.kind == "sum"]
        if kernel is None:
            sums += sum(map(extra_of_sum, adding))
            taken = max(taken, 0 if stage.of_chunk else set_aside(plan, tile))
        else:
            sums += sum(map(of_total, adding))
            partial = max((extra_of_sum(one) - of_total(one) for one in adding), default=0)
            rest = set_aside(plan, other) + partial if other else 0
            taken = max(taken, kernel.scratch_bytes, rest)
    return sums + taken


def _shape(given: Any) -> Sequence[int]:
    """The shape of a tensor, or the shape itself."""
    return tuple(getattr(given, "shape", given))


def _flops(rows: Sequence[Any], whole: Sequence[Any], program: str, *_: Any, **__: Any) -> int:
    """Of the matmuls: a multiplication and an addition for each term."""
    parsed, total = parse(program), int(_shape(rows[0])[0])

    def shape(number: int) -> Sequence[int]:
        one = parsed.instruction(number)
        if number < parsed.num_rows:
            return _shape(rows[number])
        if one is None:
            return _shape(whole[number - parsed.num_rows])
        return {"row": (total, *one.rest), "last": (*one.rest, total)}.get(one.kind, one.rest)

    found = 0
    for one in parsed.loop:
        if one.op in MATMULS:
            left = one.args[-2]
            results = one.numel * (1 if one.kind == "sum" else total)
            found += 2 * results * int(shape(left.number)[-1])
    return found


def _inside(
    rows: Tensors,
    whole: Tensors,
    program: str,
    chunk_rows: int,
    tile_rows: int,
    fused: bool = False,
    *,
    on_cpu: bool,
    by_inductor: bool = False,
) -> kernels.Inside:
    """The instructions of every chunk and tile; what a tile moves stays in the cache.

    Tiles are for CPUs: elsewhere the same graph would have none. A CPU packs the operands of a
    matmul before it begins, but adds to a sum beside computing; a GPU reads and writes the sum. A
    fused stage is one call, and moves what it reads from memory and writes there.
    """
    tile_rows = tile_rows if on_cpu else chunk_rows
    parsed, plan = parse(program), layout(program)
    total = int(rows[0].shape[0])
    chunk, tile = _sizes(total, chunk_rows, tile_rows)
    chunks = len(pieces(total, chunk))
    tiles = chunks * len(pieces(chunk, tile))
    found = kernels.Inside(0, 0)
    for stage in plan.stages:
        if by_inductor and is_worth_fusing(stage):
            touched = (*read(parsed, stage), *written(parsed, stage))
            moved = sum(_row_bytes(parsed, rows, number) for number in touched) * total
            found += kernels.Inside(tiles, moved)
            continue
        in_cache = not stage.of_chunk and tile < chunk
        for number in stage.values:
            one = parsed.instruction(number)
            assert one is not None, "an input is not computed"
            elements = one.numel * (1 if one.kind == "sum" else total)
            moved = 2 * elements * one.dtype.itemsize // (CACHE_SPEED if in_cache else 1)
            found += kernels.Inside(chunks if stage.of_chunk else tiles, moved)
            if one.op in MATMULS:
                again = sum(_whole_bytes(parsed, whole, n) for n in one.reads)
                again += (
                    2 * elements * one.dtype.itemsize if one.kind == "sum" and not on_cpu else 0
                )
                found += kernels.Inside(0, 0, (chunks - 1) * again)
    return found


def _row_bytes(program: Program, rows: Tensors, number: int) -> int:
    """Bytes of one row of a value; 0 for values that all rows share."""
    one = program.instruction(number)
    if one is None:
        is_row = number < program.num_rows
        return prod(rows[number].shape[1:]) * rows[number].dtype.itemsize if is_row else 0
    return one.numel * one.dtype.itemsize if one.kind == "row" else 0


def _whole_bytes(program: Program, whole: Tensors, number: int) -> int:
    """Bytes of a value that is the same for all rows; 0 for others."""
    one = program.instruction(number)
    if one is not None:
        return one.numel * one.dtype.itemsize if one.kind == "whole" else 0
    return whole[number - program.num_rows].nbytes if number >= program.num_rows else 0


ROWS = kernels.define(
    "rows",
    "(Tensor[] rows, Tensor[] whole, str program, int chunk_rows, int tile_rows,"
    " bool fused=False) -> Tensor[]",
    _rows,
    _fake,
    workspace=_workspace,
    flops=_flops,
    inside=_inside,
)

__all__ = ["ROWS", "compile_kernels", "even", "pieces"]

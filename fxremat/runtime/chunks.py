"""The operator ``rows``: a region of a graph, computed for a few rows at a time.

    rows(Tensor[] rows, Tensor[] whole, str program, int chunk_rows, int tile_rows) -> Tensor[]

``rows`` are tensors with the rows in front, N of them; ``whole`` are those that each chunk reads
as they are. ``program`` (see `row_program`) says what is computed, `row_plan` where it is kept.
Results that have rows are written chunk by chunk into their place; sums over the rows are added
up, those of low precision in float32.

It is pure: what it writes into is its own. The bytes that a call takes beside its results are what
`row_plan` lays out, before the first chunk, and what loose values add to that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import torch

from fxremat.runtime import kernels
from fxremat.runtime.row_plan import (
    COPIES,
    IN_PLACE,
    MATMULS,
    VIEWS,
    Layout,
    accumulates_in,
    extra_of_sum,
    layout,
    out_form,
)
from fxremat.runtime.row_program import Instruction, Program, Ref, overload, parse, with_values

Tensors = Sequence[torch.Tensor]

CACHE_SPEED = 4
"""How many times faster than memory a cache is taken to be, for the time of a call."""


def pieces(total: int, most: int) -> list[tuple[int, int]]:
    """``total`` rows in pieces of ``most`` at most, as even as can be."""
    count = ceil(total / max(1, most))
    cuts = [total * i // count for i in range(count + 1)] if count else [0]
    return list(itertools.pairwise(cuts))


def _largest(total: int, most: int) -> int:
    return max((b - a for a, b in pieces(total, most)), default=0)


def _sizes(total: int, chunk_rows: int, tile_rows: int) -> tuple[int, int]:
    """Rows of the largest chunk and of the largest tile."""
    chunk = _largest(total, chunk_rows)
    chunks = {b - a for a, b in pieces(total, chunk_rows)}
    return chunk, max((_largest(one, tile_rows) for one in chunks), default=0)


class _Sum:
    """A sum over all rows, while it is being added up."""

    def __init__(self, one: Instruction, device: torch.device) -> None:
        self.one, wide = one, accumulates_in(one.dtype)
        self.result = torch.empty(one.rest, dtype=one.dtype, device=device)
        self.is_wide = wide == one.dtype
        self.total = self.result if self.is_wide else self._new(wide)
        self.partial = self.cast = None
        if one.op not in MATMULS:
            self.partial = self._new(wide)
        elif not self.is_wide:
            self.partial, self.cast = self._new(one.dtype), self._new(wide)
        self.is_empty = True

    def _new(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self.one.rest, dtype=dtype, device=self.result.device)

    def add(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Add what the instruction makes of some of the rows."""
        straight = self.one.op in MATMULS and self.is_wide
        if straight and not self.is_empty:
            self.total.addmm_(*args)
            return
        is_first = self.is_empty and self.total.dtype == self.made_in
        target, form = self.total if is_first else self.partial, out_form(self.one.op)
        assert form is not None
        assert target is not None
        form(*args, **kwargs, out=target)
        self._take(target)

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
        self, program: Program, plan: Layout, rows: Tensors, whole: Tensors, sizes: tuple[int, int]
    ) -> None:
        self.program, self.plan = program, plan
        self.rows, self.total = rows, rows[0].shape[0]
        self.device = rows[0].device
        self.values: dict[int, torch.Tensor] = dict(enumerate(whole, program.num_rows))
        for number, one in enumerate(program.setup, program.first):
            self.values[number] = self.call(one, self.values.__getitem__, 0)
        self.results: dict[int, torch.Tensor] = {}
        self.sums: dict[int, _Sum] = {}
        for number in program.results:
            self._make_result(number)
        self.memory = [
            torch.empty(sizes[not s.of_chunk] * s.numel, dtype=s.dtype, device=self.device)
            for s in plan.slots
        ]

    def _make_result(self, number: int) -> None:
        one = self.instruction(number)
        if one.kind == "sum":
            self.sums[number] = _Sum(one, self.device)
        else:
            shape = (self.total, *one.rest)
            self.results[number] = torch.empty(shape, dtype=one.dtype, device=self.device)

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

    def run(self, chunk_rows: int, tile_rows: int) -> list[torch.Tensor]:
        """All chunks, one after the other."""
        for chunk in pieces(self.total, chunk_rows):
            for stage in self.plan.stages:
                if stage.of_chunk:
                    _Piece(self, chunk, chunk).compute(stage.values)
                else:
                    for a, b in pieces(chunk[1] - chunk[0], tile_rows):
                        _Piece(self, chunk, (chunk[0] + a, chunk[0] + b)).compute(stage.values)
        self.memory.clear()
        done = {number: one.finish() for number, one in self.sums.items()}
        return [done[n] if n in done else self.results[n] for n in self.program.results]


class _Piece:
    """Some rows of a chunk, all of it or a tile, and the values of these rows."""

    def __init__(self, run: _Run, chunk: tuple[int, int], part: tuple[int, int]) -> None:
        self.run_, self.chunk, self.part = run, chunk, part
        self.count = part[1] - part[0]
        self.seen: dict[int, torch.Tensor] = {}

    def compute(self, values: Sequence[int]) -> None:
        for number in values:
            one = self.run_.instruction(number)
            if one.kind == "sum":
                args = with_values(one.args, self.value, self.count)
                self.run_.sums[number].add(args, dict(one.kwargs))
            else:
                self.write(number, one)
            for dead in self.run_.plan.dies.get(number, ()):
                self.seen.pop(dead, None)

    def value(self, number: int) -> torch.Tensor:
        """These rows of a value, or a value that has none."""
        run = self.run_
        if number in run.values:
            return run.values[number]
        found = self.seen.get(number)
        if found is None:
            found = self.seen[number] = self.look(number)
        return found

    def look(self, number: int) -> torch.Tensor:
        run, (a, b) = self.run_, self.part
        if number < run.program.num_rows:
            return run.rows[number][a:b]
        if number in run.results:
            return run.results[number][a:b]
        one = run.instruction(number)
        if one.op in VIEWS:
            looked: torch.Tensor = run.call(one, self.value, self.count)
            return looked
        slot = run.plan.slot_of[number]
        begin = a - self.chunk[0] if run.plan.slots[slot].of_chunk else 0
        memory = run.memory[slot].narrow(0, begin * one.numel, self.count * one.numel)
        return memory.view(self.count, *one.rest)

    def write(self, number: int, one: Instruction) -> None:
        """Compute a value where it belongs."""
        if number in self.run_.plan.loose:
            made = self.run_.call(one, self.value, self.count)
            if number in self.run_.plan.slot_of or number in self.run_.results:
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


def _rows(
    rows: Tensors, whole: Tensors, program: str, chunk_rows: int, tile_rows: int
) -> list[torch.Tensor]:
    sizes = _sizes(rows[0].shape[0], chunk_rows, tile_rows)
    rows = [row.contiguous() for row in rows]  # a compiler may have given them other strides
    return _Run(parse(program), layout(program), rows, whole, sizes).run(chunk_rows, tile_rows)


def _fake(
    rows: Tensors, whole: Tensors, program: str, chunk_rows: int, tile_rows: int
) -> list[torch.Tensor]:
    parsed, made = parse(program), []
    for number in parsed.results:
        one = parsed.instruction(number)
        assert one is not None
        shape = one.rest if one.kind == "sum" else (rows[0].shape[0], *one.rest)
        made.append(rows[0].new_empty(shape, dtype=one.dtype))
    return made


def _workspace(rows: Tensors, whole: Tensors, program: str, chunk_rows: int, tile_rows: int) -> int:
    """Slots, sums in the making, what is made before the loop, loose values, and rows in order."""
    parsed, plan = parse(program), layout(program)
    chunk, tile = _sizes(int(rows[0].shape[0]), chunk_rows, tile_rows)
    before = [one for one in parsed.setup if one.op not in VIEWS]
    sums = [one for one in parsed.loop if one.kind == "sum"]
    copied = [row for row in rows if not row.is_contiguous()]
    return (
        sum(row.numel() * row.dtype.itemsize for row in copied)
        + sum(one.numel * one.dtype.itemsize for one in before)
        + sum(slot.nbytes(chunk, tile) for slot in plan.slots)
        + sum(extra_of_sum(one) for one in sums)
        + plan.most_loose(tile)
    )


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
    rows: Tensors, whole: Tensors, program: str, chunk_rows: int, tile_rows: int, *, on_cpu: bool
) -> kernels.Inside:
    """The instructions of every chunk and tile; what a tile moves stays in the cache.

    Tiles are for CPUs: elsewhere the same graph would have none. A CPU packs the operands of a
    matmul before it begins, but adds to a sum beside computing; a GPU reads and writes the sum.
    """
    tile_rows = tile_rows if on_cpu else chunk_rows
    parsed, plan = parse(program), layout(program)
    total = int(rows[0].shape[0])
    chunks = ceil(total / max(1, chunk_rows))
    tiles = chunks * ceil(min(total, chunk_rows) / max(1, tile_rows))
    calls = moved = again = 0
    for stage in plan.stages:
        in_cache = not stage.of_chunk and tile_rows < chunk_rows
        for number in stage.values:
            one = parsed.instruction(number)
            if one is not None and one.op in MATMULS:
                again += (chunks - 1) * sum(_whole_bytes(parsed, whole, n) for n in one.reads)
            if one is not None and one.op in MATMULS and one.kind == "sum" and not on_cpu:
                again += (chunks - 1) * 2 * one.numel * one.dtype.itemsize
            if one is not None and one.op not in VIEWS:
                calls += chunks if stage.of_chunk else tiles
                elements = one.numel * (1 if one.kind == "sum" else total)
                moved += 2 * elements * one.dtype.itemsize // (CACHE_SPEED if in_cache else 1)
    return kernels.Inside(calls, moved, again)


def _whole_bytes(program: Program, whole: Tensors, number: int) -> int:
    """Bytes of a value that is the same for all rows; 0 for others."""
    one = program.instruction(number)
    if one is not None:
        return one.numel * one.dtype.itemsize if one.kind == "whole" else 0
    return whole[number - program.num_rows].nbytes if number >= program.num_rows else 0


ROWS = kernels.define(
    "rows",
    "(Tensor[] rows, Tensor[] whole, str program, int chunk_rows, int tile_rows) -> Tensor[]",
    _rows,
    _fake,
    workspace=_workspace,
    flops=_flops,
    inside=_inside,
)

__all__ = ["ROWS", "pieces"]

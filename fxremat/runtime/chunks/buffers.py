"""Where the values of a program over rows are kept while a chunk of rows is computed.

Matmuls and convolutions run on a chunk of rows at once: they need many rows to be fast. Everything
between two of them runs on a *tile* of it, few enough rows to stay in cache, from the first
instruction to the last. So only what goes into or comes out of these is as large as a chunk; all
else is as large as a tile.

    stage 0 (chunk)   logits = mm(x, w)
    stage 1 (tiles)   max, exp, sum, ... d_logits      tiles of a few rows
    stage 2 (chunk)   dx = mm(d_logits, w')            dw += mm(d_logits', x)

A *slot* is memory that values share whose lives do not overlap; all slots are allocated before the
first chunk. Rows are independent: two values may share a slot if they never have the same row in it
at one time. A value may take over the slot of an operand that is read for the last time by the very
instruction that computes it, if that goes element by element. An operator that cannot write into
given memory makes a new tensor, which is copied there at once. That is all the memory there is, so
the bytes of a call follow from the program, but for the scratch memory of convolutions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from fxremat.runtime.chunks.program import Instruction, Program, overload, parse

_ATEN = torch.ops.aten

MATMULS = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default",
                     "aten.baddbmm.default"})  # fmt: skip
CONVOLUTION = "aten.convolution.default"
GRADIENT_OF_WEIGHT = "aten.convolution_backward.default#1"
CONVOLUTIONS = frozenset({CONVOLUTION, GRADIENT_OF_WEIGHT})
"""They return new tensors, and how much scratch memory they take is known by measuring only."""
VARIANCE, MEAN = "aten.var_mean.correction#0", "aten.var_mean.correction#1"
STATISTICS = frozenset({VARIANCE, MEAN})
REDUCTIONS = frozenset({"aten.sum.dim_IntList", "aten.amax.default", "aten.amin.default"})
ON_CHUNKS = MATMULS | CONVOLUTIONS | STATISTICS
VIEWS = frozenset(
    {
        "aten.view.default", "aten.permute.default", "aten.expand.default", "aten.slice.Tensor",
        "aten.select.int", "aten.unsqueeze.default",
    }
)  # fmt: skip
COPIES = frozenset({"prims.convert_element_type.default", "aten.clone.default"})
# Operators that have a form that writes into its first operand.
IN_PLACE = {
    "aten.scatter.src": _ATEN.scatter_.src,
    "aten.scatter.value": _ATEN.scatter_.value,
    "aten.scatter_add.default": _ATEN.scatter_add_.default,
}
_ELEMENTWISE = frozenset(
    {
        "add", "sub", "mul", "div", "neg", "abs", "exp", "exp2", "expm1", "log", "log1p", "log2",
        "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "erf", "erfc", "sin", "cos", "pow",
        "maximum", "minimum", "clamp", "eq", "ne", "lt", "le", "gt", "ge", "where", "logical_and",
        "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor",
        "square", "gelu", "silu", "sign", "sigmoid_backward", "tanh_backward",
        "threshold_backward", "gelu_backward", "silu_backward", "atan2", "clamp_min", "clamp_max",
        "floor", "ceil", "round", "trunc", "remainder", "fmod", "softplus", "leaky_relu", "fma",
    }
)  # fmt: skip
_REDUCING = frozenset(
    {
        "sum", "amax", "amin", "gather", "argmax", "argmin", "_softmax", "_log_softmax",
        "_softmax_backward_data",
    }
)  # fmt: skip


@functools.cache
def out_form(op: str) -> Any | None:
    """The overload of ``op`` that writes into ``out`` and allocates nothing; None without one."""
    if op == "prims.fma.default":
        return lambda left, right, added, out: torch.addcmul(added, left, right, out=out)
    if op.split(".")[1] not in _ELEMENTWISE | _REDUCING and op not in MATMULS:
        return None
    functional = overload(op)
    packet = functional.overloadpacket
    wanted = [(a.name, str(a.type)) for a in functional._schema.arguments]
    for name in packet.overloads():
        schema = getattr(packet, name)._schema
        given = [a for a in schema.arguments if not a.is_out]
        outs = [a.name for a in schema.arguments if a.is_out]
        if len(outs) == 1 and [(a.name, str(a.type)) for a in given] == wanted:
            form, into = getattr(packet, name), outs[0]
            return lambda *args, out, **kwargs: form(*args, **kwargs, **{into: out})
    return None


def is_elementwise(op: str) -> bool:
    """Whether the operator may write over an operand of the result's shape."""
    return op.split(".")[1] in _ELEMENTWISE and out_form(op) is not None


@dataclass
class Slot:
    """Memory for ``values`` of ``numel`` elements a row, of a whole chunk or of a tile."""

    numel: int
    dtype: torch.dtype
    of_chunk: bool
    values: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Stage:
    """Values computed one after the other: on the chunk (`ON_CHUNKS`), or tile by tile."""

    of_chunk: bool
    values: tuple[int, ...]


def is_view(program: Program, number: int) -> bool:
    one = program.instruction(number)
    return one is not None and one.op in VIEWS


def bases(program: Program, number: int) -> list[int]:
    """The values whose memory is read where ``number`` is read."""
    one = program.instruction(number)
    if one is None or one.op not in VIEWS:
        return [number]
    return [base for read in one.reads for base in bases(program, read)]


def stages(program: Program) -> tuple[Stage, ...]:
    """What runs on chunks as early as it can, and what lies between as few stages of tiles."""
    numbers = range(program.first, program.first + len(program.loop))
    left = [n for n in numbers if not is_view(program, n)]
    needs = {n: {b for r in program[n].reads for b in bases(program, r)} for n in left}
    missing, found, of_chunk = set(left), [], True
    while left:
        ready: list[int] = []
        for number in left:
            fits = (program[number].op in ON_CHUNKS) is of_chunk
            if fits and not (needs[number] & missing):
                ready.append(number)
                missing.discard(number)
        if ready:
            found.append(Stage(of_chunk, tuple(ready)))
            left = [n for n in left if n in missing]
        of_chunk = not of_chunk
    return tuple(found)


@dataclass(frozen=True)
class Layout:
    """Stages, and of each value of the loop that is no result its slot."""

    stages: tuple[Stage, ...]
    slots: tuple[Slot, ...]
    slot_of: dict[int, int]
    temporary: frozenset[tuple[int, int]]
    """Bytes that instructions on tiles make on the way, for each row, and for their numbers."""

    def slot_bytes(self, rows: int, *, of_chunk: bool) -> int:
        """Bytes of the slots of a chunk, or of a tile, of so many rows."""
        return rows * sum(slot.nbytes for slot in self.slots if slot.of_chunk == of_chunk)

    def set_aside(self, tile: int) -> int:
        """Bytes that a fused stage has no use for: those on tiles, at the worst instruction."""
        bytes_at = (tile * each + fixed for each, fixed in self.temporary)
        return self.slot_bytes(tile, of_chunk=False) + (max(bytes_at, default=0) if tile else 0)


class _Assigner:
    """Gives slots to values, those that outlive their stage first."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.stages = stages(program)
        self.order = [n for stage in self.stages for n in stage.values]
        self.time = {n: t for t, n in enumerate(self.order)}
        self.stage_of = {n: s for s, stage in enumerate(self.stages) for n in stage.values}
        self.readers: dict[int, list[int]] = {n: [] for n in self.order}
        for number in self.order:
            for base in {b for r in program[number].reads for b in bases(program, r)}:
                if base in self.readers:
                    self.readers[base].append(number)
        self.slots: list[Slot] = []
        self.slot_of: dict[int, int] = {}

    def life(self, number: int) -> tuple[int, int]:
        """From where it is computed to the last that reads it."""
        start = self.time[number]
        return start, max((self.time[r] for r in self.readers[number]), default=start)

    def outlives(self, number: int) -> bool:
        """Whether a whole chunk of the value has to exist."""
        stage = self.stage_of[number]
        return self.stages[stage].of_chunk or any(
            self.stage_of[r] != stage for r in self.readers[number]
        )

    def may_follow(self, held: int, number: int) -> bool:
        """Whether a value may be written over the one that it is the last to read."""
        one = self.program[number]
        if self.program[held].row_shape != one.row_shape:
            return False
        if one.op in IN_PLACE:
            return one.reads[0] == held and one.reads.count(held) == 1
        looked = {base for n in one.reads if n != held for base in bases(self.program, n)}
        return held in one.reads and held not in looked and is_elementwise(one.op)

    def is_free(self, slot: Slot, number: int) -> bool:
        """Whether nothing else is in the slot during the life of a value."""
        start, end = self.life(number)
        lives = ((held, *self.life(held)) for held in slot.values)
        return all(
            end < begin
            or start > last
            or (start == last and start != begin and self.may_follow(held, number))
            for held, begin, last in lives
        )

    def assign(self, number: int) -> None:
        one, outlives = self.program[number], self.outlives(number)
        fitting = (
            place
            for place, slot in enumerate(self.slots)
            if (slot.numel, slot.dtype) == (one.numel, one.dtype)
            and (slot.of_chunk or not outlives)
            and self.is_free(slot, number)
        )
        place = next(fitting, len(self.slots))
        if place == len(self.slots):
            self.slots.append(Slot(one.numel, one.dtype, outlives))
        self.slots[place].values.append(number)
        self.slot_of[number] = place

    def layout(self) -> Layout:
        results, program = set(self.program.results), self.program
        wanted = [n for n in self.order if program[n].kind != "sum" and n not in results]
        for number in sorted(wanted, key=lambda n: (not self.outlives(n), self.time[n])):
            self.assign(number)
        on_tiles = [program[n] for stage in self.stages if not stage.of_chunk for n in stage.values]
        temporary = (
            (0 if writes_into(one) else one.nbytes, bytes_for_numbers(program, one))
            for one in on_tiles
        )
        return Layout(self.stages, tuple(self.slots), self.slot_of, frozenset(temporary))


def writes_into(one: Instruction) -> bool:
    """Whether an instruction makes no tensor of its own: sums have room of theirs."""
    into = one.op in COPIES or one.op in IN_PLACE or out_form(one.op) is not None
    return into or one.kind == "sum"


_WITH_TENSORS = {f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div")}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_WITH_NUMBERS = {f"aten.{name}.Scalar" for name in (*_COMPARISONS, "remainder", "fmod")}


def bytes_for_numbers(program: Program, one: Instruction) -> int:
    """Bytes of a number that stands beside a tensor: torch makes a tensor of it, and casts that."""
    if one.op in _WITH_NUMBERS:
        made = program.instruction(one.reads[0])
        dtype = torch.float32 if made is None else made.dtype
    elif one.op in _WITH_TENSORS and any(isinstance(a, (int, float)) for a in one.args[:2]):
        dtype = one.dtype
    else:
        return 0
    return 8 + (0 if dtype in (torch.float64, torch.int64) else dtype.itemsize)


@functools.lru_cache(maxsize=512)
def places_of_images(program_text: str) -> frozenset[int]:
    """The places of results that are images, that a convolution returns, and that nothing reads.

    These are copied from what the convolution made, so that they may lie in any order; a kernel
    that read them would be one for rows that lie densely.
    """
    found = parse(program_text)
    read = {base for one in found.loop for number in one.reads for base in bases(found, number)}
    return frozenset(
        place
        for place, number in enumerate(found.results)
        if number not in read
        and (one := found[number]).op == CONVOLUTION
        and len(one.row_shape) == 3
    )


@functools.lru_cache(maxsize=512)
def layout(program_text: str) -> Layout:
    return _Assigner(parse(program_text)).layout()


def accumulates_in(dtype: torch.dtype) -> torch.dtype:
    """The type that sums over rows are added up in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def adds_straight(one: Instruction, device: str) -> bool:
    """Whether a matmul adds to the sum so far by itself.

    In low precision cuBLAS alone does: it multiplies what has 16 bits, and adds in float32.
    """
    return one.op in MATMULS and (accumulates_in(one.dtype) == one.dtype or device == "cuda")


def of_total(one: Instruction) -> int:
    """Bytes of a sum so far, beside its result: something only where that is of low precision.

    Statistics are a mean and a sum of squares.
    """
    wide = accumulates_in(one.dtype)
    if one.op in STATISTICS:
        return 2 * one.nbytes
    return 0 if wide == one.dtype else one.numel * wide.itemsize


def while_adding(one: Instruction, device: str) -> int:
    """Bytes that a sum takes while some rows are added to it, on a device of this type.

    That is what they add up to; in low precision, the same in the type of the sum as well.
    """
    if one.op in STATISTICS or adds_straight(one, device):
        return 0
    in_low_precision = one.nbytes if one.op in MATMULS | CONVOLUTIONS else 0
    wide = accumulates_in(one.dtype)
    is_wide = bool(in_low_precision) and wide == one.dtype
    return in_low_precision + (0 if is_wide else one.numel * wide.itemsize)

"""Rows that are zero but for one element, written as that element.

The gradient of picking one element of each row is, after decomposition, a comparison of all
positions with the index, a choice between two numbers, and a product: four passes over [N, V] for
one number a row. Such a value is a *one-hot row*: an index and an element for each row.

    eq(index, iota); where(.., -1, 0); mul(.., g); sum       before (low precision: and converted)
    p = -g at the index; the sum is p                         after
    sub(mul(e, s), ..)  ->  scatter_add(mul(e, s), index, p)

What is computed stays the same, element by element: zeros are neither multiplied nor added. (Zero
times infinity does not become NaN; an infinite gradient stays so in the element itself.) An index
outside of the row has no element: then a 0 is added at some place inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxremat.passes.nodes import first_operand, packet_name, shape_of
from fxremat.runtime.chunks.program import Instruction, Program, Ref


@dataclass(frozen=True)
class OneHotRow:
    """The element of each row that may differ from zero: values [rows, 1] of the program.

    ``element`` is a number while it is the same for all rows.
    """

    index: int
    element: int | float
    is_number: bool


def constant_of(node: fx.Node) -> float | str | None:
    """The number that a tensor is filled with; "iota" for positions 0, 1, 2, ... in one row."""
    name = packet_name(node)
    if name in ("view", "expand", "unsqueeze", "reshape"):
        source = first_operand(node)
        constants = constant_of(source)
        shape, own = shape_of(node), shape_of(source)
        if constants == "iota" and (shape is None or own is None or shape[-1:] != own[-1:]):
            return None
        return constants
    if name in ("full", "scalar_tensor"):
        value = node.args[1 if name == "full" else 0]
        return float(value) if isinstance(value, (int, float)) else None
    if name == "iota":
        given = (node.kwargs.get("start"), node.kwargs.get("step"))
        return "iota" if given == (0, 1) else None
    return None


class _Simplifier:
    """Walks a program once; new instructions go where the old ones are."""

    def __init__(
        self,
        program: Program,
        row_shapes: Sequence[tuple[int, ...]],
        constants: Mapping[int, float | str],
    ) -> None:
        self.program, self.row_shapes, self.constants = program, row_shapes, constants
        self.loop: list[Instruction] = []
        self.renamed: dict[int, int] = {}
        self.compared_indices: dict[int, Ref] = {}
        self.one_hot_rows: dict[int, OneHotRow] = {}
        self.placed_elements: dict[int, tuple[int, int]] = {}

    def row_shape(self, number: int) -> tuple[int, ...]:
        if number < self.program.first:
            return self.row_shapes[number]
        if number < self.program.start:
            return self.program.setup[number - self.program.first].row_shape
        return self.loop[number - self.program.start].row_shape

    def is_one_a_row(self, number: int) -> bool:
        has_rows = number < self.program.num_rows or number >= self.program.start
        return has_rows and self.row_shape(number) == (1,)

    def made_by(self, number: int) -> Instruction | None:
        number -= self.program.start
        return self.loop[number] if number >= 0 else None

    def add(self, op: str, *args: Any, like: Instruction, row_shape: tuple[int, ...] = (1,),
            dtype: torch.dtype | None = None) -> int:  # fmt: skip
        dtype = like.dtype if dtype is None else dtype
        self.loop.append(Instruction(op, args, {}, "row", row_shape, dtype))
        return self.program.start + len(self.loop) - 1

    def run(self) -> Program:
        for position, one in enumerate(self.program.loop):
            one = one.renumbered(lambda n: self.renamed.get(n, n))
            number = self.program.start + position
            replacement = self.replacement(one)
            self.loop.append(one)
            mine = self.program.start + len(self.loop) - 1
            self.renamed[number] = mine if replacement is None else replacement
            if replacement is None:
                self.remember(mine, one)
        results = tuple(self.renamed.get(n, n) for n in self.program.results)
        return _without_dead(replace(self.program, loop=tuple(self.loop), results=results))

    # What is a point.

    def remember(self, number: int, one: Instruction) -> None:
        """Remember an instruction that compares with positions or makes a point."""
        if one.kind != "row":
            return
        if one.op == "aten.eq.Tensor":
            self.remember_comparison(number, one)
        elif one.op == "aten.where.self":
            condition, true, false = (a.number for a in one.args)
            if condition in self.compared_indices and self.constants.get(false) == 0.0:
                element = self.constants.get(true)
                if isinstance(element, float):
                    self.one_hot_rows[number] = OneHotRow(
                        self.compared_indices[condition].number, element, True
                    )
        elif one.op == "aten.mul.Tensor":
            self.remember_product(number, one)
        elif one.op == "prims.convert_element_type.default":
            self.remember_conversion(number, one)

    def remember_comparison(self, number: int, one: Instruction) -> None:
        pair = [a.number for a in one.args if isinstance(a, Ref)]
        if len(pair) != 2:
            return
        for index, positions in (pair, pair[::-1]):
            made = self.made_by(index)
            if made is not None and made.op == "aten.expand.default":
                index = made.args[0].number
            if self.constants.get(positions) != "iota" or not self.is_one_a_row(index):
                continue
            if len(one.row_shape) == 1 and self.row_shape(positions)[-1:] == one.row_shape:
                self.compared_indices[number] = Ref(index)

    def remember_product(self, number: int, one: Instruction) -> None:
        pair = [a.number for a in one.args if isinstance(a, Ref)]
        for one_hot, factor in (pair, pair[::-1]) if len(pair) == 2 else ():
            if (
                one_hot not in self.one_hot_rows
                or factor in self.one_hot_rows
                or not self.is_one_a_row(factor)
            ):
                continue
            found = self.one_hot_rows[one_hot]
            element = found.element if found.is_number else Ref(int(found.element))
            made = self.add("aten.mul.Tensor", Ref(factor), element, like=one)
            # The instruction itself is in front of what was added; its number stays.
            self.one_hot_rows[number] = OneHotRow(found.index, made, False)
            return

    def remember_conversion(self, number: int, one: Instruction) -> None:
        """Zeros stay zeros in another type."""
        (source,) = one.reads
        found = self.one_hot_rows.get(source)
        if found is None:
            return
        if not found.is_number:
            made = self.add(one.op, Ref(int(found.element)), *one.args[1:], like=one)
            self.one_hot_rows[number] = OneHotRow(found.index, made, False)
        elif torch.tensor(found.element, dtype=one.dtype).item() == found.element:
            self.one_hot_rows[number] = found

    # What reads a point.

    def replacement(self, one: Instruction) -> int | None:
        """The value that may be read in place of what the instruction gives."""
        numbers = [a.number for a in one.args if isinstance(a, Ref)]
        if one.kwargs or not any(self.is_element(n) for n in numbers):
            return None
        if one.op == "aten.sum.dim_IntList" and one.kind == "row" and one.row_shape == (1,):
            return self.placed(self.one_hot_rows[numbers[0]], one)[1]
        if one.op in ("aten.add.Tensor", "aten.sub.Tensor") and len(numbers) == 2:
            return self.added(one, *numbers)
        return None

    def is_element(self, number: int) -> bool:
        return number in self.one_hot_rows and not self.one_hot_rows[number].is_number

    def placed(self, one_hot: OneHotRow, like: Instruction) -> tuple[int, int]:
        """The index, inside the row, and the element there: 0 for an index outside."""
        element = int(one_hot.element)
        if element not in self.placed_elements:
            width = self.width_of(one_hot)
            inside = self.add("aten.clamp.default", Ref(one_hot.index), 0, width - 1, like=like,
                              dtype=torch.int64)  # fmt: skip
            same = self.add("aten.eq.Tensor", Ref(inside), Ref(one_hot.index), like=like,
                            dtype=torch.bool)  # fmt: skip
            zero = self.add("aten.mul.Tensor", Ref(element), 0, like=like)
            kept = self.add("aten.where.self", Ref(same), Ref(element), Ref(zero), like=like)
            self.placed_elements[element] = inside, kept
        return self.placed_elements[element]

    def width_of(self, one_hot: OneHotRow) -> int:
        (hit,) = {self.row_shape(n) for n, p in self.one_hot_rows.items() if p == one_hot}
        return hit[0]

    def added(self, one: Instruction, left: int, right: int) -> int | None:
        """A point and a row that has all elements."""
        one_hot, dense = (left, right) if self.is_element(left) else (right, left)
        if dense in self.one_hot_rows or self.row_shape(dense) != one.row_shape:
            return None
        index, element = self.placed(self.one_hot_rows[one_hot], one)
        if one.op == "aten.sub.Tensor":
            if one_hot == left:
                dense = self.negated(dense, one)
            else:
                element = self.add("aten.neg.default", Ref(element), like=one)
        return self.add("aten.scatter_add.default", Ref(dense), 1, Ref(index), Ref(element),
                        like=one, row_shape=one.row_shape)  # fmt: skip

    def negated(self, number: int, like: Instruction) -> int:
        """Minus a value; of a product with one number a row, that number is negated instead."""
        made = self.made_by(number)
        if made is not None and made.op == "aten.mul.Tensor":
            for position, factor in enumerate(made.args):
                if isinstance(factor, Ref) and self.is_one_a_row(factor.number):
                    minus = Ref(self.add("aten.neg.default", factor, like=like))
                    args = tuple(minus if p == position else a for p, a in enumerate(made.args))
                    return self.add(made.op, *args, like=made, row_shape=made.row_shape)
        return self.add("aten.neg.default", Ref(number), like=like, row_shape=like.row_shape)


def _without_dead(program: Program) -> Program:
    """The program less the instructions that nobody reads."""
    start, wanted = program.start, set(program.results)
    for position in range(len(program.loop) - 1, -1, -1):
        if start + position in wanted:
            wanted |= set(program.loop[position].reads)
    kept = [p for p in range(len(program.loop)) if start + p in wanted]
    numbers = {start + old: start + new for new, old in enumerate(kept)}
    left = replace(program, loop=tuple(program.loop[p] for p in kept))
    return left.renumbered(lambda n: numbers.get(n, n), program.num_rows, program.num_whole)


def without_unused(program: Program) -> tuple[Program, list[int], list[int]]:
    """The program less inputs that nobody reads, and the positions of those that stay.

    Without any rows there would be no number of rows, so one row input stays.
    """
    read = {number for one in (*program.setup, *program.loop) for number in one.reads}
    rows = [n for n in range(program.num_rows) if n in read] or [0]
    whole = [n for n in range(program.num_rows, program.first) if n in read]
    later = range(program.first, program.start + len(program.loop))
    numbers = {old: new for new, old in enumerate([*rows, *whole, *later])}

    made = program.renumbered(numbers.__getitem__, len(rows), len(whole))
    return made, rows, [n - program.num_rows for n in whole]


def with_one_hot_rows(
    program: Program, rows: Sequence[tuple[int, ...]], whole: Sequence[fx.Node]
) -> Program:
    """The program with points where rows are zero but for one element.

    ``rows`` are the shapes of row inputs behind their rows, ``whole`` the nodes of whole inputs.
    """
    constants: dict[int, float | str] = {}
    shapes = list(rows)
    for number, node in enumerate(whole, program.num_rows):
        value = constant_of(node)
        if value is not None:
            constants[number] = value
        shapes.append(shape_of(node) or ())
    for number, one in enumerate(program.setup, program.first):
        (source,) = one.reads
        if source in constants:
            constants[number] = constants[source]
    return _Simplifier(program, shapes, constants).run()

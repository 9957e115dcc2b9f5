"""From a region to loops: one call of `fxremat_kernels::rows` for each level.

A loop computes what is read outside of the region, what later loops read of it, and nothing else.
It begins at the border and at narrow values of earlier loops, which it gets as rows. Big values of
earlier loops it computes again, a chunk at a time. So big values never exist as a whole, unless
they are read outside.

    level 0   x, w, labels -> losses [N], max [N, 1], log [N, 1]
    level 1   x, w, labels, max, log, gradient -> dx, dw        logits of a chunk again

**One-hot rows.** The gradient of picking one element of each row is, after decomposition, a
comparison of all positions with the index, a choice between two numbers, and a product: four passes
over [N, V] for one number a row. Such a value is kept as an index and an element for each row.

    eq(index, iota); where(.., -1, 0); mul(.., g); sum       before (low precision: and converted)
    p = -g at the index; the sum is p                         after
    sub(mul(e, s), ..)  ->  scatter_add(mul(e, s), index, p)

What is computed stays the same, element by element: zeros are neither multiplied nor added. (Zero
times infinity does not become NaN; an infinite gradient stays so in the element itself.) An index
outside of the row has no element: then a 0 is added at some place inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import fx

from fxremat.passes.joint_graph import reached
from fxremat.passes.nodes import Shape, dtype_of, first_operand, packet_name, shape_of
from fxremat.passes.variants.chunks.operators import VIEWS, Operand, Result, operands, row_shape_of
from fxremat.passes.variants.chunks.regions import Region
from fxremat.runtime.chunks.program import Instruction, Kind, Program, Ref, RowCount

BLOCK = 1 << 40
"""While a program is being written, whole inputs and so on are numbered from multiples of this."""
_ROWS, _WHOLE, _LOOP = range(3)


class Refused(Exception):
    """A region that cannot be written as loops."""


Input = tuple[fx.Node, Shape]
"""A node as an input of a loop, and the shape that is read: behind the rows, or of the whole."""


@dataclass(frozen=True)
class Loop:
    """A call to be: its inputs, and the nodes that its results stand for."""

    rows: tuple[Input, ...]
    whole: tuple[Input, ...]
    program: Program
    results: tuple[fx.Node, ...]


@dataclass(frozen=True)
class OneHotRow:
    """Rows of zeros but for one element: where, of how many, and what.

    ``index`` is a value [rows, 1] of the program. So is ``element``, or it is one number; it is
    True where rows tell which positions the index is equal to.
    """

    index: int
    width: int
    element: Ref | float | Literal[True]


Fact = float | str | OneHotRow
"""What is known of a value: the number that fills it; "iota" for 0, 1, 2, ... in one row."""


def constant_of(node: fx.Node) -> float | str | None:
    """The number that a tensor is filled with; "iota" for positions 0, 1, 2, ... in one row."""
    name = packet_name(node)
    if name in VIEWS:
        source = first_operand(node)
        shape, own, found = shape_of(node), shape_of(source), constant_of(source)
        keeps = shape is not None and own is not None and shape[-1:] == own[-1:]
        keeps = keeps and name in ("view", "expand", "unsqueeze", "reshape")
        return found if keeps or found != "iota" else None
    if name in ("full", "scalar_tensor"):
        value = node.args[1 if name == "full" else 0]
        return float(value) if isinstance(value, (int, float)) else None
    if name == "iota":
        given = (node.kwargs.get("start"), node.kwargs.get("step"))
        return "iota" if given == (0, 1) else None
    return None


class _ProgramWriter:
    """Writes the program of one loop; ``blocks`` are its row inputs, whole inputs, and calls."""

    def __init__(self, region: Region, stops: Callable[[fx.Node, Kind], bool]) -> None:
        self.region, self.stops = region, stops
        self.blocks: tuple[list[Any], ...] = ([], [], [])
        self.made: dict[tuple[fx.Node, Kind], int] = {}
        self.read: dict[Operand, int] = {}
        self.facts: dict[int, Fact] = {}
        self.placed_elements: dict[OneHotRow, tuple[int, int]] = {}

    def add(self, one: Input | Instruction, block: int = _LOOP) -> int:
        self.blocks[block].append(one)
        return block * BLOCK + len(self.blocks[block]) - 1

    def is_computed(self, operand: Operand) -> bool:
        node, kind = operand.node, operand.kind
        if self.region.kinds.get(node) == kind:
            return not self.stops(node, kind)
        made_of_nothing = kind == "row" and not node.all_input_nodes
        return made_of_nothing and self.region.calls(node, kind) is not None

    def write(self, results: list[fx.Node]) -> None:
        """Everything to compute for the results, in graph order."""

        def read(one: tuple[fx.Node, Kind]) -> list[tuple[fx.Node, Kind]]:
            given = operands(self.region.known_calls(*one))
            return [(o.node, o.kind) for o in given if self.is_computed(o)]

        wanted = ((node, self.region.kinds[node]) for node in results)
        for node, kind in sorted(reached(wanted, read)):
            parts: list[int] = []
            for call in self.region.known_calls(node, kind):
                parts.append(self.call(call.with_other(partial(self.argument, parts))))
            self.made[node, kind] = parts[-1]

    def argument(self, parts: list[int], one: Any) -> Any:
        if isinstance(one, Operand):
            if one not in self.read:
                self.read[one] = self.value(one)
            return Ref(self.read[one])
        return Ref(parts[one.position]) if isinstance(one, Result) else one

    def value(self, wanted: Operand) -> int:
        """What is computed here, seen in the wanted shape; else an input of that shape."""
        node, kind = wanted.node, wanted.kind
        number = self.made.get((node, kind))
        if number is None:
            return self.input(wanted)
        if kind == "last" or row_shape_of(node, self.region.rows) == wanted.row_shape:
            return number
        args = (Ref(self.as_dense(number)), (RowCount(), *wanted.row_shape))
        view = "aten.view.default"
        return self.add(Instruction(view, args, {}, "row", wanted.row_shape, dtype_of(node)))

    def as_dense(self, number: int) -> int:
        """The value itself if its memory is dense, else a copy."""
        one = self.blocks[_LOOP][number - _LOOP * BLOCK]
        if one.op not in ("aten.permute.default", "aten.expand.default", "aten.slice.Tensor",
                          "aten.select.int"):  # fmt: skip
            return number
        return self.add(
            replace(one, op="aten.clone.default", args=(Ref(number),), kwargs={}, kind="row")
        )

    def input(self, wanted: Operand) -> int:
        node, kind = wanted.node, wanted.kind
        is_look = self.region.is_view(node) and node in self.region.kinds
        if kind not in ("row", "whole") or is_look:
            raise Refused(f"{node} is no input of a loop")
        number = self.add((node, wanted.row_shape), _ROWS if kind == "row" else _WHOLE)
        constant = constant_of(node) if kind == "whole" else None
        if constant is not None:
            self.facts[number] = constant
        return number

    def as_loop(self, results: list[fx.Node]) -> Loop:
        """The loop, less what nobody reads; one row input stays: it has the number of rows."""
        self.write(results)
        made = [self.made[node, self.region.kinds[node]] for node in results]
        rows, whole, calls = self.blocks
        if not rows:
            raise Refused("a loop without rows")
        first = _LOOP * BLOCK
        read = reached(made, lambda n: calls[n - first].reads if n >= first else ())
        read |= {0} if min(read) >= BLOCK else set()
        numbers = {old: new for new, old in enumerate(sorted(read))}
        rows, whole, calls = (
            [one for place, one in enumerate(block) if start * BLOCK + place in read]
            for start, block in enumerate(self.blocks)
        )
        loop = tuple(one.renumbered(numbers.__getitem__) for one in calls)
        places = tuple(map(numbers.__getitem__, made))
        program = Program(len(rows), len(whole), loop, places)
        return Loop(tuple(rows), tuple(whole), program, tuple(results))

    # --- one-hot rows

    def call(self, one: Instruction) -> int:
        """Add a call, or find the value that may be read in place of what it gives."""
        found = None if one.kwargs else self.simplified(one)
        if isinstance(found, int):
            return found
        number = self.add(one)
        if found is not None:
            self.facts[number] = found
        return number

    def row_call(
        self, op: str, *args: Any, like: Instruction, row_shape: Shape = (1,),
        dtype: torch.dtype | None = None,
    ) -> int:  # fmt: skip
        return self.add(Instruction(op, args, {}, "row", row_shape, dtype or like.dtype))

    def shape(self, number: int) -> Shape:
        one = self.blocks[number // BLOCK][number % BLOCK]
        shape: Shape = one.row_shape if isinstance(one, Instruction) else one[1]
        return shape

    def is_one_a_row(self, number: int) -> bool:
        return number // BLOCK != _WHOLE and self.shape(number) == (1,)

    def simplified(self, one: Instruction) -> int | OneHotRow | None:
        """The value to read in place of what a call gives, or what is known of it."""
        numbers = [a.number for a in one.args if isinstance(a, Ref)]
        match one.op, [self.facts.get(n) for n in numbers]:
            case "aten.eq.Tensor", [_, "iota"]:
                return self.comparison(one, *numbers)
            case "aten.eq.Tensor", ["iota", _]:
                return self.comparison(one, *numbers[::-1])
            case "aten.where.self", [OneHotRow(element=True) as row, float(element), 0.0]:
                return replace(row, element=element)
            case "aten.mul.Tensor", [OneHotRow(element=Ref() | float()) as row, None | float()]:
                return self.multiplied(one, row, numbers[1])
            case "aten.mul.Tensor", [None | float(), OneHotRow(element=Ref() | float()) as row]:
                return self.multiplied(one, row, numbers[0])
            case "prims.convert_element_type.default", [OneHotRow(element=Ref()) as row]:
                made = self.row_call(one.op, row.element, *one.args[1:], like=one)
                return replace(row, element=Ref(made))
            case "prims.convert_element_type.default", [OneHotRow(element=float(number)) as row]:
                is_exact = torch.tensor(number, dtype=one.dtype).item() == number
                return row if is_exact else None
            case "aten.sum.dim_IntList", [OneHotRow(element=Ref()) as row]:
                is_row = one.kind == "row" and one.row_shape == (1,)
                return self.placed(row, one)[1] if is_row else None
            case "aten.add.Tensor" | "aten.sub.Tensor", [OneHotRow(element=Ref()) as row, other]:
                is_dense = not isinstance(other, OneHotRow)
                return self.added(one, row, numbers[1], is_first=True) if is_dense else None
            case "aten.add.Tensor" | "aten.sub.Tensor", [_, OneHotRow(element=Ref()) as row]:
                return self.added(one, row, numbers[0], is_first=False)
        return None

    def comparison(self, one: Instruction, index: int, positions: int) -> OneHotRow | None:
        made = self.blocks[index // BLOCK][index % BLOCK]
        if isinstance(made, Instruction) and made.op == "aten.expand.default":
            index = made.args[0].number
        is_whole = len(one.row_shape) == 1 and self.shape(positions)[-1:] == one.row_shape
        fits = is_whole and self.is_one_a_row(index)
        return OneHotRow(index, one.row_shape[0], True) if fits else None

    def multiplied(self, one: Instruction, row: OneHotRow, factor: int) -> OneHotRow | None:
        if not self.is_one_a_row(factor):
            return None
        made = self.row_call("aten.mul.Tensor", Ref(factor), row.element, like=one)
        return replace(row, element=Ref(made))

    def placed(self, row: OneHotRow, like: Instruction) -> tuple[int, int]:
        """The index, inside the row, and the element there: 0 for an index outside."""
        if row not in self.placed_elements:
            call, index = partial(self.row_call, like=like), Ref(row.index)
            inside = call("aten.clamp.default", index, 0, row.width - 1, dtype=torch.int64)
            same = call("aten.eq.Tensor", Ref(inside), index, dtype=torch.bool)
            zero = call("aten.mul.Tensor", row.element, 0)
            kept = call("aten.where.self", Ref(same), row.element, Ref(zero))
            self.placed_elements[row] = inside, kept
        return self.placed_elements[row]

    def added(self, one: Instruction, row: OneHotRow, dense: int, is_first: bool) -> int | None:
        """A one-hot row and one that has all elements."""
        if self.shape(dense) != one.row_shape:
            return None
        call, whole = partial(self.row_call, like=one), one.row_shape
        index, element = self.placed(row, one)
        if one.op == "aten.sub.Tensor" and is_first:
            dense = call("aten.neg.default", Ref(dense), row_shape=whole)
        elif one.op == "aten.sub.Tensor":
            element = call("aten.neg.default", Ref(element))
        args = Ref(dense), 1, Ref(index), Ref(element)
        return call("aten.scatter_add.default", *args, row_shape=whole)


def plan_loops(region: Region, level: Mapping[fx.Node, int]) -> list[Loop]:
    wanted: dict[int, set[fx.Node]] = {}
    for node in region.read_outside():
        wanted.setdefault(level[node], set()).add(node)
    depending_on_big, loops = region.depending_on_big(), []
    for now in range(max(level.values()), -1, -1):
        results = sorted(wanted.get(now, ()))
        if not results:
            continue

        def stops(node: fx.Node, kind: Kind, now: int = now) -> bool:
            narrow = not region.is_big(node) and not region.is_view(node)
            return level[node] < now and (kind == "sum" or (narrow and node in depending_on_big))

        loops.append(_ProgramWriter(region, stops).as_loop(results))
        for node, _ in (*loops[-1].rows, *loops[-1].whole):
            if node in region.kinds:
                wanted.setdefault(level[node], set()).add(node)
    return loops[::-1]

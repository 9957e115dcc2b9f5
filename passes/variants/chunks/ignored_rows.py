"""Rows of a loss that add nothing, because their label says so: shown, and told to the loops.

    ne(label, -100); where(ne, loss, 0); sum           before: each row through the head
    where(ne, g, 0); ...; d_logits; dx, dw             after:  where label is -100, none of it

Take a row and suppose that its label is the number that labels are compared with (or that its
mask is zero). What follows is worked out node by node (`row_numbers`): the gradient of its loss is
0, so is that of its logits, so are dx of the row and what it adds to dw. Loops may leave such rows
out if

* what they add to each sum is 0;
* what is read outside of the loops holds a known number in such a row.

The loss of a row is not known before a `where` or a mask has made it 0. So the region grows by what
lies between: narrow nodes of the forward that read one of its results, row by row. What only loops
read does not matter, as all loops of a region leave out the same rows; it is all of them, or none.

It is exact where the numbers of the row are finite. If they are not, a row that is left out adds
nothing, where torch may make NaN of zero times infinity.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import fx

from fxremat.compat.joint_graph import is_tangent
from fxremat.core.constants import MOST_NODES
from fxremat.passes.nodes import dtype_of, packet_name
from fxremat.passes.variants.chunks.calls import Operand, Result, row_shape_of
from fxremat.passes.variants.chunks.loops import Loop
from fxremat.passes.variants.chunks.one_hot_rows import constant_of
from fxremat.passes.variants.chunks.regions import Region, readers
from fxremat.passes.variants.chunks.row_numbers import Known, Value, is_zero, known, result_of
from fxremat.runtime.chunks.program import Ignored, Instruction, Kind, Number, Program, Ref


@dataclass(frozen=True)
class Label:
    """One number a row, outside of the region, and what it is in rows that may be ignored."""

    node: fx.Node
    number: Number


@dataclass(frozen=True)
class IgnoredRows:
    """A region of which some rows add nothing, and what is known in one of these."""

    region: Region
    row: _Row

    def told(self, loops: tuple[Loop, ...]) -> tuple[Loop, ...]:
        """All loops of the region, with the rows to leave out; none where it cannot be shown."""
        told = []
        outside = set(self.region.read_outside())
        for loop in loops:
            results = _results(self.row, loop, outside)
            if results is None:
                return ()
            told.append(_with_ignored(self.row, loop, results))
        return tuple(told)


def ignored_rows(region: Region, others: Set[fx.Node] = frozenset()) -> IgnoredRows | None:
    """What says of rows that they add nothing to the region; None where nothing can be shown.

    The region may grow, but not by ``others``, which are in other regions.
    """
    for label in _labels(region):
        row = _Row(region, label).follow()
        grown = _grown(region, row, others)
        if grown is not None and all(row.adds_nothing(n) for n in _sums(grown)):
            return IgnoredRows(grown, row)
    return None


def _sums(region: Region) -> list[fx.Node]:
    return [node for node, kind in region.kinds.items() if kind == "sum"]


def _grown(region: Region, row: _Row, others: Set[fx.Node]) -> Region | None:
    """The region with all that lies between its results and where they are known."""
    kinds = dict(region.kinds)
    todo = [n for n, kind in kinds.items() if kind == "row" and not row.is_known(n)]
    while todo:
        for reader in readers(todo.pop()):
            if reader in kinds:
                continue
            if reader in others or not _may_join(region, reader):
                return None
            kinds[reader] = "row"
            if not row.is_known(reader):
                todo.append(reader)
        if len(kinds) > MOST_NODES:
            return None
    return replace(region, kinds=kinds)


def _may_join(region: Region, node: fx.Node) -> bool:
    """Whether a node is a narrow one of the forward that goes row by row."""
    if node.op != "call_function" or not region.is_forward(node) or region.is_big(node):
        return False
    return region.calls(node, "row") is not None


# --- labels --------------------------------------------------------------------------------------


def _labels(region: Region) -> list[Label]:
    """What labels are compared with, then masks of 0, that do not depend on the region.

    Not what the step writes: the backward would read something else.
    """
    found: dict[Label, None] = {}
    nodes = [n for n in region.joint.module.graph.nodes if n.op == "call_function"]
    for node in nodes:
        if packet_name(node) in ("ne", "eq") and len(node.args) == 2:
            of, number = node.args
            if isinstance(of, fx.Node) and isinstance(number, int) and _is_one_a_row(region, of):
                found[Label(_source(region, of), number)] = None
    for node in nodes:
        masks = {"mul": node.args[:2], "where": node.args[:1]}.get(packet_name(node), ())
        for mask in masks:
            if isinstance(mask, fx.Node) and _is_one_a_row(region, mask):
                source = _source(region, mask)
                if source.op == "placeholder" and not is_tangent(source):
                    found[Label(source, known(0, dtype_of(source)).number)] = None
    kept = (label for label in found if label.node not in region.joint.mutated)
    return [label for label in kept if not _depends(region, label.node)]


def _is_one_a_row(region: Region, node: fx.Node) -> bool:
    shape = row_shape_of(node, region.rows)
    return shape is not None and prod(shape) == 1


def _source(region: Region, node: fx.Node) -> fx.Node:
    """What a node is another look at, row by row, or the same numbers in another type."""
    while region.is_view(node) or packet_name(node) == "convert_element_type":
        calls = region.calls(node, "row")
        read = {o for call in calls or () for o in call.args if isinstance(o, Operand)}
        if len(read) != 1:
            return node
        (operand,) = read
        if operand.kind != "row" or not _is_one_a_row(region, operand.node):
            return node
        node = operand.node
    return node


def _depends(region: Region, node: fx.Node) -> bool:
    """Whether a node is computed from what the region computes, or in it."""
    seen, stack = set[fx.Node](), [node]
    while stack:
        source = stack.pop()
        if source in region.kinds or is_tangent(source):
            return True
        if source not in seen:
            seen.add(source)
            stack += source.all_input_nodes
    return False


# --- what follows --------------------------------------------------------------------------------


@dataclass
class _Row:
    """What is known of the nodes of the graph in a row with this label."""

    region: Region
    label: Label
    values: dict[fx.Node, Value] = field(default_factory=dict)

    def value(self, node: fx.Node) -> Value:
        """Of a node that has rows."""
        return self.values.get(node) or _constant(node)

    def is_known(self, node: fx.Node) -> bool:
        """Whether all elements of the row are one number."""
        return self.value(node) is not None

    def result(self, node: fx.Node, kind: Kind) -> Value:
        """What follows for a node from its operands."""
        calls = self.region.calls(node, kind)
        parts: list[Value] = []
        for call in calls or ():
            args = _with_values(call.args, self, parts)
            parts.append(result_of(call.op, args, call.kwargs, call.dtype))
        return parts[-1] if parts else None

    def adds_nothing(self, node: fx.Node) -> bool:
        """Whether the row adds 0 to a sum over the rows."""
        return is_zero(self.result(node, "sum"))

    def follow(self) -> _Row:
        """Everything that is known because of the label."""
        self.values[self.label.node] = Known(self.label.number)
        node = self.label.node.next
        while node.op != "root":
            kind = self.region.kinds.get(node, "row")
            if kind != "sum" and any(i in self.values for i in node.all_input_nodes):
                found = self.result(node, kind)
                if found is not None:
                    self.values[node] = found
            node = node.next
        return self


def _constant(node: fx.Node) -> Value:
    """The number that a tensor is filled with, in all rows."""
    constant = constant_of(node)
    return known(constant, dtype_of(node)) if isinstance(constant, float) else None


def _with_values(thing: Any, row: _Row, parts: Sequence[Value]) -> Any:
    if isinstance(thing, Operand):
        # what all rows share is not that of one row, even if it has as many elements
        return _constant(thing.node) if thing.kind == "whole" else row.value(thing.node)
    if isinstance(thing, Result):
        return parts[thing.position]
    if isinstance(thing, (list, tuple)):
        return tuple(_with_values(part, row, parts) for part in thing)
    return thing


# --- loops ---------------------------------------------------------------------------------------


def _results(row: _Row, loop: Loop, outside: set[fx.Node]) -> list[Number] | None:
    """What the results of a loop are in the row; None if one is not known that is read outside."""
    program = loop.program
    values = [*map(row.value, loop.rows), *map(_constant, loop.whole)]
    for one in program.instructions:
        values.append(result_of(one.op, _of_values(one.args, values), one.kwargs, one.dtype))
    found: list[Number] = []
    for node, number in zip(loop.results, program.results, strict=True):
        value, made = values[number], program.instruction(number)
        is_sum = made is not None and made.kind == "sum"
        if (value is None and node in outside) or (is_sum and not is_zero(value)):
            return None
        found.append(0 if value is None else value.number)
    return found


def _of_values(thing: Any, values: Sequence[Value]) -> Any:
    if isinstance(thing, Ref):
        return values[thing.number]
    if isinstance(thing, (list, tuple)):
        return tuple(_of_values(part, values) for part in thing)
    return thing


def _with_ignored(row: _Row, loop: Loop, results: Sequence[Number]) -> Loop:
    node = row.label.node
    program, rows = loop.program, loop.rows
    if node not in rows:
        program, rows = _with_row_input(program), (*rows, node)
    values = [row.value(n) for n in rows]
    inputs = tuple(None if value is None else value.number for value in values)
    ignored = Ignored(rows.index(node), row.label.number, inputs, tuple(results))
    return replace(loop, rows=rows, program=replace(program, ignored=ignored))


def _with_row_input(program: Program) -> Program:
    """The program with one more row input, which nothing reads."""

    def named(thing: Any) -> Any:
        if isinstance(thing, Ref):
            return Ref(thing.number + (thing.number >= program.num_rows))
        return tuple(map(named, thing)) if isinstance(thing, (list, tuple)) else thing

    def renumbered(one: Instruction) -> Instruction:
        kwargs = {key: named(arg) for key, arg in one.kwargs.items()}
        return replace(one, args=named(one.args), kwargs=kwargs)

    setup, loop = tuple(map(renumbered, program.setup)), tuple(map(renumbered, program.loop))
    results = tuple(n + (n >= program.num_rows) for n in program.results)
    return Program(program.num_rows + 1, program.num_whole, setup, loop, results)

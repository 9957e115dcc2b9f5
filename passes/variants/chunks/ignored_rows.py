"""Rows of a loss that add nothing, because their label says so: shown, and told to the loops.

    ne(label, -100); where(ne, loss, 0); sum           before: each row through the head
    where(ne, g, 0); ...; d_logits; dx, dw             after:  where label is -100, none of it

Take a row and suppose that its label is the number that labels are compared with (or that its
mask is zero). What follows is worked out node by node (`row_numbers`): the gradient of its loss is
0, so is that of its logits, so are dx of the row and what it adds to dw. A loop may leave such rows
out if

* what they add to each of its sums is 0;
* each of its results that has rows holds a known number there, or does not matter there.

A result does not matter if whoever reads it outside of the loops gets, in such a row, the same from
a 0: a loss that a `where` replaces, or that is multiplied by a mask of 0. Loops that read it
leave the same rows out: it is all loops of a region, or none.

It is exact where the numbers of the row are finite. If they are not, a row that is left out adds
nothing, where torch may make NaN of zero times infinity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import fx

from fxremat import compat
from fxremat.passes.nodes import dtype_of, packet_name
from fxremat.passes.variants.chunks.calls import Operand, Result, row_shape_of
from fxremat.passes.variants.chunks.loops import Loop
from fxremat.passes.variants.chunks.one_hot_rows import constant_of
from fxremat.passes.variants.chunks.regions import Region
from fxremat.passes.variants.chunks.row_numbers import (
    ANY,
    FINITE,
    Known,
    Value,
    is_zero,
    known,
    result_of,
)
from fxremat.runtime.chunks.program import Ignored, Instruction, Number, Program, Ref

MOST_LABELS = 4
"""So many labels and masks of a region are tried."""


@dataclass(frozen=True)
class Label:
    """One number a row, outside of the region, and what it is in rows that may be ignored."""

    node: fx.Node
    number: Number


def without_ignored_rows(region: Region, loops: tuple[Loop, ...]) -> tuple[Loop, ...]:
    """The loops, told which rows to leave out; as they are where nothing can be shown."""
    for label in _labels(region):
        told = _told(region, loops, label)
        if told is not None:
            return told
    return loops


# --- labels --------------------------------------------------------------------------------------


def _labels(region: Region) -> list[Label]:
    """What labels are compared with, then masks of 0, that do not depend on the region."""
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
                if source.op == "placeholder" and not compat.is_tangent(source):
                    found[Label(source, known(0, dtype_of(source)).number)] = None
    outside = (label for label in found if not _depends(region, label.node))
    return [label for label, _ in zip(outside, range(MOST_LABELS), strict=False)]


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
        if source in region.kinds or compat.is_tangent(source):
            return True
        if source not in seen:
            seen.add(source)
            stack += source.all_input_nodes
    return False


# --- what follows --------------------------------------------------------------------------------


@dataclass
class _Row:
    """What is known of the nodes of the graph in a row with this label.

    ``assumed`` are nodes with what they hold there whatever they compute.
    """

    region: Region
    label: Label
    values: dict[fx.Node, Value] = field(default_factory=dict)

    def value(self, node: fx.Node) -> Value:
        """Numbers that the model computes are taken to be finite; constants are known."""
        if node in self.values:
            return self.values[node]
        constant = constant_of(node)
        return known(constant, dtype_of(node)) if isinstance(constant, float) else FINITE

    def result(self, node: fx.Node) -> Value | None:
        """What follows for a node from its operands; None for what does not go row by row."""
        calls = self.region.calls(node, self.region.kinds.get(node, "row"))
        if calls is None or calls[-1].kind == "sum":
            return None
        parts: list[Value] = []
        for call in calls:
            args = _with_values(call.args, self, parts)
            parts.append(result_of(call.op, args, call.dtype) if not call.kwargs else ANY)
        return parts[-1]

    def follow(self) -> _Row:
        """Everything that is known because of the label."""
        self.values[self.label.node] = Known(self.label.number)
        for node in _behind(self.region, [self.label.node]):
            if any(i in self.values for i in node.all_input_nodes):
                found = self.result(node)
                if isinstance(found, Known):
                    self.values[node] = found
        return self


def _with_values(thing: Any, row: _Row, parts: Sequence[Value]) -> Any:
    if isinstance(thing, Operand):
        return row.value(thing.node)
    if isinstance(thing, Result):
        return parts[thing.position]
    if isinstance(thing, (list, tuple)):
        return tuple(_with_values(part, row, parts) for part in thing)
    return thing


def _behind(region: Region, nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """The nodes of the graph behind the first of some."""
    first = min(nodes, key=region.position.__getitem__)
    node = first.next
    while node.op != "root":
        yield node
        node = node.next


def _do_not_matter(row: _Row, results: Sequence[fx.Node]) -> bool:
    """Whether a 0 in place of each result gives the same outside of the loops."""
    region, zeros = row.region, _Row(row.region, row.label, dict(row.values))
    open_ = set(results)
    zeros.values.update((node, known(0, dtype_of(node))) for node in results)
    for node in _behind(region, results) if results else ():
        if open_.isdisjoint(node.all_input_nodes):
            continue
        if node in region.kinds and not region.is_view(node):
            continue  # it is computed in loops, which leave the row out
        found, was = zeros.result(node), row.values.get(node)
        if found is None or (was is not None and found != was):
            return False
        if was is None:
            open_.add(node)
            zeros.values[node] = found
    return True


# --- loops ---------------------------------------------------------------------------------------


def _told(region: Region, loops: tuple[Loop, ...], label: Label) -> tuple[Loop, ...] | None:
    row = _Row(region, label).follow()
    told, unknown = [], list[fx.Node]()
    for loop in loops:
        found = _results(row, loop)
        if found is None:
            return None
        unknown += [n for n, value in zip(loop.results, found, strict=True) if value is None]
        told.append(_with_ignored(row, loop, [value or 0 for value in found]))
    return tuple(told) if _do_not_matter(row, unknown) else None


def _results(row: _Row, loop: Loop) -> list[Number | None] | None:
    """What the results of a loop are in the row; None if it adds to a sum."""
    program = loop.program
    values = [row.value(node) for node in (*loop.rows, *loop.whole)]
    for one in program.instructions:
        made_of = result_of(one.op, _of_values(one.args, values), one.dtype)
        values.append(made_of if isinstance(made_of, Known) else FINITE)
    found: list[Number | None] = []
    for number in program.results:
        made, value = program.instruction(number), values[number]
        if made is not None and made.kind == "sum" and not is_zero(value):
            return None
        found.append(value.number if isinstance(value, Known) else None)
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
    values: Mapping[fx.Node, Value] = {n: row.value(n) for n in rows}
    inputs = tuple(v.number if isinstance(v, Known) else None for v in values.values())
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

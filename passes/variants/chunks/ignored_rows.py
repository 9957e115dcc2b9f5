"""Rows of a loss that add nothing, because their label says so: shown, and left out by the loops.

    ne(label, -100); where(ne, loss, 0); sum           before: each row through the head
    where(ne, g, 0); ...; d_logits; dx, dw             after:  where label is -100, none of it

Suppose that the label of a row is the number that labels are compared with, or that its mask is
zero. What follows is worked out node by node. Loops may leave such rows out if these add 0 to each
sum, and if what is read outside of the loops holds a known number there. The region grows by narrow
nodes of the forward up to the `where` or the mask that makes the loss 0. All loops of a region
leave out the same rows. See docs/design/ignored_rows.md for what is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from math import isfinite, prod
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fxremat.compat.inductor.kernels import apart
from fxremat.compat.joint_graph import is_tangent
from fxremat.core.constants import MOST_NODES
from fxremat.passes.joint_graph import computed_from
from fxremat.passes.nodes import dtype_of, packet_name
from fxremat.passes.variants.chunks.loops import Loop, constant_of
from fxremat.passes.variants.chunks.operators import Operand, Result, row_shape_of
from fxremat.passes.variants.chunks.regions import Region, readers
from fxremat.runtime.chunks.buffers import COPIES, VIEWS
from fxremat.runtime.chunks.program import Ignored, Kind, Number, overload


@dataclass(frozen=True)
class Label:
    """One number a row, outside of the region, and what it is in rows that may be ignored."""

    node: fx.Node
    number: Number


def ignored_rows(region: Region, others: Set[fx.Node] = frozenset()) -> IgnoredRows | None:
    """What says of rows that they add nothing to the region; None where nothing can be shown.

    The region may grow, but not by ``others``, which are in other regions.
    """
    for label in _labels(region):
        row = IgnoredRows(region, label).follow()
        grown = _grown(region, row, others)
        if grown is not None:
            sums = [node for node, kind in grown.kinds.items() if kind == "sum"]
            if all(is_zero(row.result(node, "sum")) for node in sums):
                return replace(row, region=grown)
    return None


def _grown(region: Region, row: IgnoredRows, others: Set[fx.Node]) -> Region | None:
    """The region with all that lies between its results and where they are known."""
    kinds = dict(region.kinds)
    todo = [n for n, kind in kinds.items() if kind == "row" and row.value(n) is None]
    while todo:
        for reader in readers(todo.pop()):
            if reader in kinds:
                continue
            is_narrow = reader.op == "call_function" and not region.is_big(reader)
            if reader in others or not is_narrow or not region.is_forward(reader):
                return None
            if region.calls(reader, "row") is None:
                return None
            kinds[reader] = "row"
            if row.value(reader) is None:
                todo.append(reader)
        if len(kinds) > MOST_NODES:
            return None
    return replace(region, kinds=kinds)


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
    return [
        label for label in kept
        if not any(one in region.kinds or is_tangent(one) for one in computed_from([label.node]))
    ]  # fmt: skip


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


# --- what follows --------------------------------------------------------------------------------


@dataclass
class IgnoredRows:
    """A region of which the rows with this label add nothing, and what is known of its nodes there.

    ``region`` may grow once that has been worked out (`follow`).
    """

    region: Region
    label: Label
    values: dict[fx.Node, Value] = field(default_factory=dict)

    def value(self, node: fx.Node) -> Value:
        return self.values.get(node) or _constant(node)

    def result(self, node: fx.Node, kind: Kind) -> Value:
        parts: list[Value] = []

        def argument(one: Any) -> Any:
            if isinstance(one, Operand):
                # what all rows share is not that of one row, even if it has as many elements
                return _constant(one.node) if one.kind == "whole" else self.value(one.node)
            return parts[one.position] if isinstance(one, Result) else one

        for call in self.region.calls(node, kind) or ():
            args = map_aggregate(call.args, argument)
            parts.append(result_of(call.op, args, call.kwargs, call.dtype))
        return parts[-1] if parts else None

    def follow(self) -> IgnoredRows:
        """Everything that is known because of the label."""
        self.values[self.label.node] = Known(self.label.number)
        for node in self.region.joint.module.graph.nodes:
            kind = self.region.kinds.get(node, "row")
            if kind != "sum" and any(i in self.values for i in node.all_input_nodes):
                found = self.result(node, kind)
                if found is not None:
                    self.values[node] = found
        return self

    def leave_out(self, loop: Loop) -> Loop:
        """A loop of the region, leaving these rows out.

        Of a result that is not known here, nothing is read outside: the region has grown so far.
        """
        program, rows, label = loop.program, loop.rows, self.label.node
        known = (self.value(node) for node in loop.results)
        results = tuple(0 if value is None else value.number for value in known)
        if label not in dict(rows):  # one more row input, which nothing reads
            rows, first = (*rows, (label, row_shape_of(label, self.region.rows) or ())), len(rows)
            program = program.renumbered(lambda n: n + (n >= first), first + 1, program.num_whole)
        nodes = [node for node, _ in rows]
        values = map(self.value, nodes)
        inputs = tuple(None if value is None else value.number for value in values)
        ignored = Ignored(nodes.index(label), self.label.number, inputs, results)
        return replace(loop, rows=rows, program=replace(program, ignored=ignored))


def _constant(node: fx.Node) -> Value:
    """The number that a tensor is filled with, in all rows."""
    constant = constant_of(node)
    return known(constant, dtype_of(node)) if isinstance(constant, float) else None


# --- what is known of a row -------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """All elements of a row are this number."""

    number: Number


Value = Known | None
"""None: nothing is known."""


def known(number: Number, dtype: torch.dtype) -> Known:
    if dtype is torch.bool:
        return Known(bool(number))
    return Known(float(number) if dtype.is_floating_point else int(number))


def is_zero(value: Any) -> bool:
    return isinstance(value, Known) and value.number == 0


def result_of(
    op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> Value:
    """What is known of a result; ``args`` have a `Value` in place of each tensor.

    ``op`` is an operator as in programs over rows, ``dtype`` that of its result. What is named may
    change what an operator does, so then nothing is known.
    """
    if kwargs and _name(op) != "full":
        return None
    rule = _RULES.get(_name(op))
    found = None if rule is None else rule(*args)
    if found is not None:
        return known(found.number, dtype)
    is_of_elements = op in COPIES or torch.Tag.pointwise in overload(op).tags
    return _computed(op, args, dtype) if is_of_elements else None


def _name(op: str) -> str:
    return op.split(".")[1]


def _computed(op: str, args: tuple[Any, ...], dtype: torch.dtype) -> Value:
    """What torch makes of numbers; nothing where one is not known."""
    if any(one is None for one in args) or not any(isinstance(one, Known) for one in args):
        return None

    def tensor(one: Any) -> Any:
        if not isinstance(one, Known):
            return one
        is_float = isinstance(one.number, float) and dtype.is_floating_point
        return torch.tensor(one.number, dtype=dtype if is_float else None)

    with apart():
        return known(overload(op)(*map(tensor, args)).to(dtype).item(), dtype)


# --- operators -----------------------------------------------------------------------------------


def _value(given: Value | Number) -> Value:
    """What is known of a number that stands in an argument, or of a tensor."""
    return Known(given) if isinstance(given, (bool, int, float)) else given


def _product(left: Any, right: Any) -> Value:
    """Zero, if one is zero and nothing says that the other is infinite."""
    for one, other in ((left, _value(right)), (right, _value(left))):
        if is_zero(one) and (other is None or isfinite(other.number)):
            return Known(0)
    return None


def _choice(condition: Value, true: Value | Number, false: Value | Number) -> Value:
    if condition is None:
        return _value(true) if _value(true) == _value(false) else None
    return _value(true if condition.number else false)


def _written(into: Value, _: int, __: Value, source: Any) -> Value:
    """A number is known where what is written equals what is there."""
    value = _value(source)
    return into if into is not None and value is not None and into.number == value.number else None


_RULES: Mapping[str, Callable[..., Value]] = {
    **dict.fromkeys(
        (*map(_name, VIEWS), "clone", "amax", "amin", "mean", "gather"), lambda given, *_: given
    ),
    **dict.fromkeys(("mul", "mm", "bmm"), _product),
    **dict.fromkeys(("logical_and", "bitwise_and"),
        lambda left, right: next(filter(is_zero, (left, right)), None)),
    "where": _choice,
    "scatter": _written,
    "scatter_add": lambda into, dim, index, source: into if is_zero(source) else None,
    "full": lambda _, number: Known(number),
    **dict.fromkeys(
        (
            "sum", "_softmax_backward_data", "_log_softmax_backward_data", "tanh_backward",
            "sigmoid_backward", "gelu_backward", "silu_backward", "threshold_backward",
        ),
        lambda given, *_: given if is_zero(given) else None,
    ),
}  # fmt: skip
"""What follows by itself; of known numbers, torch says what an operator on elements gives."""

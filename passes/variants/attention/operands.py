"""Where a fused kernel's operands come from, and where its results go, with few copies.

Operands are read from the node farthest back that holds the same elements and can be seen as
[B, H, rows, width] with contiguous rows. A result stands in for the first node behind the old one
that has the kernel's order of memory; where there is none, for the last that it can be copied for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxremat.passes.joint_graph import JointGraph, root
from fxremat.passes.nodes import Shape, fake, shape_of
from fxremat.passes.variants.attention.layout import (
    Layout,
    Moves,
    is_move,
    moved,
    moved_freely,
    moves,
    seen_from,
    swapped,
    viewed,
    whole,
)
from fxremat.passes.variants.attention.match import Product

_ATEN = torch.ops.aten
Add = Callable[..., fx.Node]
At = Callable[[fx.Node], fx.Node]


def _move(add: Add, node: fx.Node, how: Moves) -> fx.Node:
    """The views of `moves`, those left out that change nothing."""
    split, order, shape = how
    if list(fake(node).shape) != split:
        node = add(_ATEN.view.default, node, split)
    if order != sorted(order):
        node = add(_ATEN.permute.default, node, order)
    return node if list(fake(node).shape) == shape else add(_ATEN.view.default, node, shape)


def _contiguous(add: Add, node: fx.Node) -> fx.Node:
    return add(_ATEN.clone.default, node, memory_format=torch.contiguous_format)


# --- operands ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """[B, H, rows, width] of a node of the graph."""

    node: fx.Node
    how: Moves
    is_copied: bool

    def insert(self, add: Add, at: At) -> fx.Node:
        """A view, or a copy of one."""
        found = _move(add, at(self.node), self.how)
        return _contiguous(add, found) if self.is_copied else found


def operand(joint: JointGraph, product: Product, shape: Shape) -> Operand | None:
    """The node farthest back that can be seen in this shape, its rows contiguous."""
    found: Operand | None = None
    for node, layout in reversed(seen_from(product.node)):
        wanted = viewed(swapped(layout) if product.is_swapped else layout, shape)
        how = None if wanted is None else moves(whole(shape_of(node) or ()), wanted, shape)
        tensor = None if how is None else moved_freely(fake(node), how)
        if how is None or tensor is None:
            continue
        found = Operand(node, how, is_copied=True)
        if tensor.stride(-1) == 1 and root(node) not in joint.mutated:
            return replace(found, is_copied=False)
    return found


# --- results -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What stands in for ``node``: views of what a kernel gives.

    After a copy if there is ``order``: that of the dimensions in the memory of ``node``.
    """

    node: fx.Node
    how: Moves
    order: tuple[int, ...] | None = None

    def insert(self, add: Add, given: fx.Node) -> fx.Node:
        """The same size and strides as the old node."""
        found = _move(add, given, self.how) if self.order is None else self._copy(add, given)
        old = fake(self.node)
        if fake(found).stride() == old.stride():
            return found
        return add(_ATEN.as_strided.default, found, list(old.shape), list(old.stride()))

    def _copy(self, add: Add, given: fx.Node) -> fx.Node:
        split, order, shape = self.how
        assert self.order is not None
        found = _move(add, given, (split, order, [split[place] for place in order]))
        found = _contiguous(add, found)
        if list(fake(found).shape) != shape:
            found = add(_ATEN.view.default, found, shape)
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return found if back == sorted(back) else add(_ATEN.permute.default, found, back)


def _fits(made: torch.Tensor, old: torch.Tensor) -> bool:
    """Whether strides agree where there is more than one element."""
    triples = zip(old.shape, made.stride(), old.stride(), strict=True)
    return all(size == 1 or one == other for size, one, other in triples)


def _largest_first(steps: Sequence[int]) -> list[int]:
    return sorted(range(len(steps)), key=lambda place: -steps[place])


def _behind(joint: JointGraph, product: Product, shape: Shape) -> Iterator[tuple[fx.Node, Layout]]:
    """A product and what it is moved to, with layouts over it."""
    node, layout = product.node, product.layout(shape)
    while True:
        yield node, layout
        reader = next(iter(node.users), None)
        if reader is None or len(node.users) > 1 or not is_move(reader):
            return
        further = moved(reader, layout)
        if further is None or joint.role[reader] is not joint.role[node]:
            return
        node, layout = reader, further


def result(joint: JointGraph, product: Product, made: torch.Tensor, batch: int) -> Result | None:
    """Where a kernel's tensor [B, H, rows, width] may stand in, best without a copy."""
    return _best(_behind(joint, product, (batch, *made.shape[2:])), made)


def result_here(product: Product, made: torch.Tensor, batch: int) -> Result | None:
    """How it stands in for the product itself."""
    return _best([(product.node, product.layout((batch, *made.shape[2:])))], made)


def _best(places: Iterable[tuple[fx.Node, Layout]], made: torch.Tensor) -> Result | None:
    shape = tuple(made.shape)
    copied: Result | None = None
    for node, layout in places:
        old = fake(node)
        how = moves(whole(shape), layout, old.shape)
        free = None if how is None else moved_freely(made, how)
        if how is not None and free is not None and _fits(free, old):
            return Result(node, how)
        order = tuple(_largest_first(old.stride()))
        how = moves(whole(shape), tuple(layout[d] for d in order), [old.shape[d] for d in order])
        if how is not None and _fits(torch.empty(how[2], device="meta"), old.permute(order)):
            copied = Result(node, how, order)
    return copied

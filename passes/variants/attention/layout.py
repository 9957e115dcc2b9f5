"""Where each element of a tensor comes from, followed through views, transposes and copies.

The layout of a tensor *over* another one gives for every dimension the pairs (size, step) that it
runs through, in positions of the other tensor's elements read in order (not in memory). A step of 0
repeats. So [B, T, H * D] seen as [B * H, T, D] is

    ((B, T * H * D), (H, D)), ((T, H * D),), ((D, 1),)

Two tensors are the same but for copies if they have the same layout over the same third one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from math import prod

import torch
from torch import fx

from fxremat.passes.joint_graph import JointGraph, root
from fxremat.passes.nodes import (
    Add,
    Lookup,
    Shape,
    dtype_of,
    fake,
    first_operand,
    known_shape,
    packet_name,
    shape_of,
)
from fxremat.passes.variants.saved_values import as_view, in_shape, permuted

Pairs = tuple[tuple[int, int], ...]
Layout = tuple[Pairs, ...]
Seen = tuple[fx.Node, Layout]
"""A node and a layout over it."""

_ATEN = torch.ops.aten


def merged(pairs: Sequence[tuple[int, int]]) -> Pairs:
    """The shortest form: sizes of 1 left out, neighbours that count on put together."""
    found: list[tuple[int, int]] = []
    for size, step in pairs:
        if size == 1:
            continue
        if found and found[-1][1] == size * step:
            found[-1] = (found[-1][0] * size, step)
        else:
            found.append((size, step))
    return tuple(found)


def whole(shape: Sequence[int]) -> Layout:
    return tuple(merged([(size, prod(shape[d + 1 :]))]) for d, size in enumerate(shape))


def swapped(layout: Layout) -> Layout:
    return (*layout[:-2], layout[-1], layout[-2])


def viewed(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """The layout in another shape; None where a dimension would be cut unevenly."""
    left = list(merged([pair for pairs in layout for pair in pairs]))
    found: list[Pairs] = []
    for size in reversed(shape):
        taken: list[tuple[int, int]] = []
        while size > 1:
            if not left:
                return None
            length, step = left.pop()
            part = min(size, length)
            if size % part or length % part:
                return None
            taken.insert(0, (part, step))
            size //= part
            if length > part:
                left.append((length // part, step * part))
        found.insert(0, merged(taken))
    return tuple(found) if not left else None


def _transpose(node: fx.Node, layout: Layout) -> Layout | None:
    if len(layout) < 2:
        return layout
    one, other = (node.args[1], node.args[2]) if len(node.args) == 3 else (0, -1)
    found = list(layout)
    found[one], found[other] = layout[other], layout[one]  # type: ignore[index]
    return tuple(found)


def expanded(layout: Layout, old: Shape, shape: Shape) -> Layout:
    """The layout of a tensor of shape ``old`` that is broadcast to another."""
    padded = ((),) * (len(shape) - len(old)) + layout
    sizes = (1,) * (len(shape) - len(old)) + old
    return tuple(
        pairs if size == wanted else ((wanted, 0),)
        for pairs, size, wanted in zip(padded, sizes, shape, strict=True)
    )


_MOVES: dict[str, Callable[[fx.Node, Layout], Layout | None]] = {
    **dict.fromkeys(
        ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"),
        lambda node, layout: viewed(layout, known_shape(node)),
    ),
    **dict.fromkeys(("clone", "alias", "detach", "contiguous"), lambda node, layout: layout),
    **dict.fromkeys(("transpose", "t"), _transpose),
    "permute": lambda node, layout: tuple(layout[d] for d in node.args[1]),  # type: ignore[union-attr, index]
    "expand": lambda node, layout: expanded(
        layout, known_shape(first_operand(node)), known_shape(node)
    ),
}


def is_move(node: fx.Node) -> bool:
    """Whether a node only moves its one operand, or copies it."""
    if packet_name(node) not in _MOVES or shape_of(node) is None:
        return False
    (given,) = node.all_input_nodes
    return shape_of(given) is not None and dtype_of(node) == dtype_of(given)


def moved(node: fx.Node, layout: Layout) -> Layout | None:
    """The layout of ``node`` if it only moves its operand, of this layout; None otherwise."""
    return _MOVES[packet_name(node)](node, layout) if is_move(node) else None


def seen_from(node: fx.Node) -> list[Seen]:
    """What ``node`` is a look at, or a copy of, with its layout over that: itself first."""
    chain = [node]
    while is_move(chain[-1]):
        chain.append(chain[-1].all_input_nodes[0])
    found: list[Seen] = []
    for length, base in enumerate(chain):
        shape = shape_of(base)
        layout: Layout | None = None if shape is None else whole(shape)
        for step in reversed(chain[:length]):
            layout = None if layout is None else moved(step, layout)
        if layout is None:
            break
        found.append((base, layout))
    return found


def origin(node: fx.Node) -> Seen:
    """The last of `seen_from`: equal for nodes that are equal but for copies."""
    found = seen_from(node)
    return found[-1] if found else (node, ())


# --- from one layout to another --------------------------------------------------------------

Moves = tuple[list[int], list[int], list[int]]
"""A view, the order of a permutation behind it, and the shape that follows."""


def _split(pairs: Pairs, cuts: Sequence[int]) -> list[int] | None:
    """The steps at which the pairs begin once cut, the largest first."""
    steps: list[int] = []
    for size, step in pairs:
        inside = [cut for cut in cuts if step <= cut <= step * size]
        if step == 0 or any(high % low for low, high in pairwise(inside)):
            return None
        steps += reversed(inside[:-1])
    return steps


def moves(given: Layout, wanted: Layout, shape: Sequence[int]) -> Moves | None:
    """How a tensor of layout ``given`` is brought to ``wanted``, of this shape.

    Both are over the same tensor and repeat nothing; None where that is not so.
    """
    pairs = [pair for pairs in (*given, *wanted) for pair in pairs]
    cuts = sorted({cut for size, step in pairs for cut in (step, step * size)})
    sizes = {low: high // low for low, high in pairwise(cuts) if low}
    have = [_split(pairs, cuts) for pairs in given]
    want = [_split(pairs, cuts) for pairs in wanted]
    if None in have or None in want:
        return None
    place = [step for steps in have for step in steps or []]
    order = [step for steps in want for step in steps or []]
    if sorted(place) != sorted(order) or len(set(place)) != len(place):
        return None
    return [sizes[s] for s in place], [place.index(s) for s in order], list(shape)


def moved_freely(tensor: torch.Tensor, how: Moves) -> torch.Tensor | None:
    """The tensor moved without a copy; None where there is no such view."""
    split, order, shape = how
    cut = as_view(tensor, split)
    return None if cut is None else as_view(cut.permute(order), shape)


# --- operands ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """A product [N, T, D], or with its last two dimensions exchanged."""

    node: fx.Node
    is_swapped: bool

    def layout(self, shape: Shape) -> Layout:
        """Over the [N, T, D] that it should be."""
        return swapped(whole(shape)) if self.is_swapped else whole(shape)


def _move(add: Add, node: fx.Node, how: Moves) -> fx.Node:
    """The views of `moves`, those left out that change nothing."""
    split, order, shape = how
    return in_shape(add, permuted(add, in_shape(add, node, split), order), shape)


def _contiguous(add: Add, node: fx.Node) -> fx.Node:
    return add(_ATEN.clone.default, node, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Operand:
    """[B, H, rows, width] of a node of the graph."""

    node: fx.Node
    how: Moves
    is_copied: bool

    def insert(self, add: Add, at: Lookup) -> fx.Node:
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
    """What stands in for ``node``: views of what a kernel gives, or of a copy of that.

    ``how`` brings it to the shape of ``node`` with its dimensions in the ``order`` of memory.
    """

    node: fx.Node
    how: Moves
    order: tuple[int, ...]
    is_copied: bool

    def insert(self, add: Add, given: fx.Node) -> fx.Node:
        """The same size and strides as the old node."""
        split, order, shape = self.how
        if self.is_copied:
            given = _move(add, given, (split, order, [split[place] for place in order]))
            found = in_shape(add, _contiguous(add, given), shape)
        else:
            found = _move(add, given, self.how)
        found = permuted(add, found, sorted(range(len(shape)), key=self.order.__getitem__))
        old = fake(self.node)
        if fake(found).stride() == old.stride():
            return found
        return add(_ATEN.as_strided.default, found, list(old.shape), list(old.stride()))


def _fits(made: torch.Tensor, old: torch.Tensor) -> bool:
    """Whether strides agree where there is more than one element."""
    triples = zip(old.shape, made.stride(), old.stride(), strict=True)
    return all(size == 1 or one == other for size, one, other in triples)


def _behind(joint: JointGraph, product: Product, shape: Shape) -> Iterator[tuple[fx.Node, Layout]]:
    """A product and what it is moved to, with layouts over it."""
    node, layout = product.node, product.layout(shape)
    yield node, layout
    while len(node.users) == 1:
        (reader,) = node.users
        further = moved(reader, layout)
        if further is None or joint.role[reader] is not joint.role[node]:
            return
        node, layout = reader, further
        yield node, layout


def result(
    joint: JointGraph, product: Product, made: torch.Tensor, batch: int, most: int | None = None
) -> Result | None:
    """Where a kernel's tensor [B, H, rows, width] may stand in, best without a copy.

    In place of the product or of what it is moved to, among so many nodes at ``most``.
    """
    shape = tuple(made.shape)
    copied: Result | None = None
    for node, layout in islice(_behind(joint, product, (batch, *shape[2:])), most):
        old = fake(node)
        order = tuple(sorted(range(old.dim()), key=old.stride().__getitem__, reverse=True))
        dense = old.permute(order)
        how = moves(whole(shape), tuple(layout[d] for d in order), dense.shape)
        if how is None:
            continue
        free = moved_freely(made, how)
        if free is not None and _fits(free, dense):
            return Result(node, how, order, is_copied=False)
        if _fits(torch.empty(how[2], device="meta"), dense):
            copied = Result(node, how, order, is_copied=True)
    return copied

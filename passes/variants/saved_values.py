"""What the backward reads of the forward's values, and where another form of it is put in.

A value is *saved* where a node of the backward reads it, directly, through views, or through
elementwise results that are computed again there. Its other form is written by an *encode* right
behind it, and read by a *decode* right before its first reader in the backward.

    x ── relu ── ...                  x ── encode ── (small)         forward
    x ── view ── mm   (backward)      (small) ── decode ── x' ── view' ── mm   (backward)

`Saved.insert` puts in both, and copies of the nodes between the value and its readers. The forward
is as it was: every reader of the forward comes before the decode, every one of the backward after
it, and values for which this is not so are not offered. Sizes have to be numbers, and memory dense
in some order of the dimensions, so that a stand-in has the strides of what it stands for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx

from fxremat.compat.sizes import size_bound
from fxremat.core.constants import LEAST_ELEMENTS
from fxremat.passes.joint_graph import (
    JointGraph,
    Role,
    is_fetch,
    is_mutating,
    is_put,
    is_tensor,
    is_view,
    reached,
)
from fxremat.passes.materialisation import is_fusable, materialise
from fxremat.passes.nodes import Add, copy_calls, fake
from fxremat.passes.variants.insertion import Rule, Site, StandIns, Target

Decode = Callable[[Add, Add, fx.Node], fx.Node]
"""Adds encode behind the value and decode before its readers, given what adds calls there, and
the value; returns the decoded."""

_ATEN = torch.ops.aten
_PRIMS = torch.ops.prims


# --- putting nodes in --------------------------------------------------------------------


def order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Dimensions from slowest to fastest; None where memory has gaps, or sizes are no numbers."""
    if not all(isinstance(s, int) for s in (*tensor.shape, *tensor.stride())):
        return None
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-tensor.stride()[d], d)))
    return order if tensor.permute(order).is_contiguous() else None


def has_order(node: fx.Node) -> bool:
    """Whether a node's memory can be read off and laid out again."""
    return is_tensor(node) and order_of(fake(node)) is not None


def as_view(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """A view of the tensor in this shape; None where it takes a copy."""
    try:
        return tensor.view(shape)
    except (RuntimeError, ValueError):
        return None


def in_shape(add: Add, node: fx.Node, shape: Sequence[int]) -> fx.Node:
    known = list(fake(node).shape) == list(shape)
    return node if known else add(_ATEN.view.default, node, list(shape))


def permuted(add: Add, node: fx.Node, order: Sequence[int]) -> fx.Node:
    is_same = list(order) == sorted(order)
    return node if is_same else add(_ATEN.permute.default, node, list(order))


def laid_out(add: Add, flat: fx.Node, like: torch.Tensor) -> fx.Node:
    """Elements in the order of memory, with as many more at the end, in the shape of ``like``."""
    order = order_of(like)
    assert order is not None
    if fake(flat).numel() != like.numel():
        flat = add(_ATEN.slice.Tensor, flat, 0, 0, like.numel())
    shaped = add(_ATEN.reshape.default, flat, [like.shape[d] for d in order])
    return permuted(add, shaped, [order.index(d) for d in range(len(order))])


def by_memory(add: Add, node: fx.Node) -> fx.Node:
    """The node with its dimensions in the order of memory, as it is when the graph is traced."""
    order = order_of(fake(node))
    assert order is not None
    return permuted(add, node, order)


def counting(add: Add, count: int, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    """0, 1, 2 ...: in a generated loop it takes no memory."""
    device = fake(like).device
    numbers = add(
        _PRIMS.iota.default, count, start=0, step=1, dtype=torch.int64, device=device,
        requires_grad=False,
    )  # fmt: skip
    return as_dtype(add, numbers, dtype)


def as_dtype(add: Add, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    if fake(node).dtype == dtype:
        return node
    return add(_PRIMS.convert_element_type.default, node, dtype)


# --- finding -----------------------------------------------------------------------------


def made_in_forward(joint: JointGraph, node: fx.Node) -> bool:
    """Whether the node is a result of the forward, and none of its inputs."""
    return joint.role[node] is Role.FORWARD and node.op == "call_function"


@dataclass(frozen=True)
class Saved:
    """A value, what lies between it and its readers in the backward, and the first of these.

    ``between`` are the nodes that are computed again from the stand-in, in the order of the graph;
    ``read`` are those of them that the backward reads, the value itself included if it does;
    ``readers`` are who reads these, in the order of the graph.
    """

    value: fx.Node
    between: tuple[fx.Node, ...]
    read: tuple[fx.Node, ...]
    readers: tuple[fx.Node, ...]

    def insert(self, into: Target, *, decode: Decode) -> StandIns:
        """Add ``decode`` and copies of what lies between; the stand-ins of what is read."""
        value = into(self.value)
        late = into.before(into(self.readers[0]), value)
        new = {value: decode(into.behind(value), late, value)}
        copy_calls(late, map(into, self.between), new)
        return {node: new[into(node)] for node in self.read}


@dataclass
class _Finder:
    """Collects, for each value, what the backward reads of it."""

    joint: JointGraph
    accepts: Callable[[fx.Node], bool]

    def __post_init__(self) -> None:
        self.rule = materialise(self.joint, fused=True)
        self.results = self.joint.result_roots()

    def is_inner(self, node: fx.Node) -> bool:
        """Whether a node of the forward is computed again by whoever reads it."""
        if is_view(node):
            return node.target is not operator.getitem
        return is_fusable(node) and not self.rule.is_value(node) and is_tensor(node)

    def origin(self, node: fx.Node) -> tuple[fx.Node | None, set[fx.Node]]:
        """The one large value that ``node`` is made from, and what lies between.

        Where there are several, or it has no other form, the node's own storage is taken for one:
        it can be written as well.
        """
        value, between = self.only_value(node, self.is_inner)
        alike = value is not None and fake(value).dtype == fake(node).dtype
        if value is None or (alike and not self.accepts(value)):
            value, between = self.only_value(node, is_view)
        behind = set() if value is None else {value}
        for one in sorted(between):
            if not behind.isdisjoint(one.all_input_nodes):
                behind.add(one)
        return value, behind - {value}

    def only_value(
        self, node: fx.Node, inner: Callable[[fx.Node], bool]
    ) -> tuple[fx.Node | None, set[fx.Node]]:
        """The one large value behind a node, None where there are more or none; what is between."""

        def sources(one: fx.Node) -> Sequence[fx.Node]:
            return one.all_input_nodes if one.op == "call_function" and inner(one) else ()

        found = reached([node], sources)
        between = {one for one in found if one.op == "call_function" and inner(one)}
        large = [v for v in found - between if v.op == "call_function" and is_large(v)]
        return large[0] if len(large) == 1 else None, between

    def is_early(self, node: fx.Node) -> bool:
        """Whether the node is of the forward, or a view that only passes a value of it on."""
        while is_view(node) and self.joint.role[node] is Role.LAZY:
            node = node.all_input_nodes[0]
        return made_in_forward(self.joint, node)

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """Nodes of the backward that read the node and do more than look into it."""
        return [u for u in node.users if u.op != "output" and not self.is_early(u)]

    def collect(self) -> list[Saved]:
        """Every saved value that is accepted, in the order of the graph."""
        read: dict[fx.Node, list[fx.Node]] = {}
        between: dict[fx.Node, set[fx.Node]] = {}
        for node in self.joint.module.graph.nodes:
            if not is_tensor(node) or not self.is_early(node) or not self.readers(node):
                continue
            value, inner = self.origin(node)
            if value is not None and self.is_offered(value):
                read.setdefault(value, []).append(node)
                between.setdefault(value, set()).update(inner)
        found = (self.saved(value, between[value], nodes) for value, nodes in read.items())
        return sorted((s for s in found if s), key=lambda s: s.value)

    def is_offered(self, value: fx.Node) -> bool:
        return (
            made_in_forward(self.joint, value)
            and self.accepts(value)
            and has_order(value)
            and value not in self.results
            and not (is_mutating(value) or is_fetch(value) or is_put(value))
        )

    def saved(self, value: fx.Node, between: set[fx.Node], read: list[fx.Node]) -> Saved | None:
        """The value with its readers; None where the forward still reads it behind the first."""
        nodes = tuple(sorted(between))
        readers = tuple(sorted({u for node in read for u in self.readers(node)}))
        early = [i for n in nodes for i in n.all_input_nodes] + [
            u for n in read for u in n.users if u not in readers and u not in between
        ]
        if any(one > readers[0] for one in (*early, *nodes)):
            return None
        return Saved(value, nodes, tuple(read), readers)


def is_large(node: fx.Node) -> bool:
    return is_tensor(node) and size_bound(fake(node).numel()) >= LEAST_ELEMENTS


def saved_values(joint: JointGraph, accepts: Callable[[fx.Node], bool]) -> list[Saved]:
    return _Finder(joint, accepts).collect()


def rule_of_form(
    name: str,
    line: str,
    decode: Decode,
    accepts: Callable[[fx.Node], bool],
    fits: Callable[[Saved], bool] = lambda saved: True,
    **kind: bool,
) -> Rule:
    """A rule, of this ``kind``, that offers one form of every saved value that it accepts."""

    def find(joint: JointGraph) -> Iterator[Site]:
        for saved in filter(fits, saved_values(joint, accepts)):
            insert = partial(saved.insert, decode=decode)
            yield Site(name, f"{name}:{saved.value.name}", insert, backward_only=True)

    return Rule(name, line, find, **kind)


def is_float(node: fx.Node) -> bool:
    """Whether a tensor holds floats of 16 bits or more."""
    value = fake(node)
    return value.is_floating_point() and value.dtype.itemsize >= 2

"""Operator variants that compute a region for a few rows at a time.

    x ── mm ── logits [N, V] ── ... ── loss          before: N rows of logits
    x ── rows(program) ── loss                       after: a chunk of logits

`regions` says what a region is, and why a chunk of it may be computed alone. Here each region gets
its rule, and is offered in several forms, each with a few sizes of chunks:

* *again*: one call for each loop; the backward computes a chunk of the forward again;
* *at once*: the forward computes the gradients too, up to the factor that the backward brings (see
  `early_gradients`); nothing is computed twice;
* *late*, for images: one call for each loop of the backward, which computes a chunk of the forward
  again; the forward stays as it is, and nothing of it is saved.

A loss leaves out the rows that add nothing to it (see `ignored_rows`). A result that is read
outside of the region gets the shape and the strides of the old node, and stands in for it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import fx

from fxremat.core.constants import CHUNK_PARTS, TILE_BYTES
from fxremat.passes.joint_graph import JointGraph, Role
from fxremat.passes.nodes import add_call, adder, dtype_of, known_shape, laid_out_like, packet_name
from fxremat.passes.variants.chunks.early_gradients import Factor, factor
from fxremat.passes.variants.chunks.ignored_rows import IgnoredRows, ignored_rows
from fxremat.passes.variants.chunks.loops import Loop, Refused, plan_loops
from fxremat.passes.variants.chunks.regions import Region, find_image_regions, find_regions, levels
from fxremat.passes.variants.insertion import Rule, Site, StandIns, Target
from fxremat.passes.variants.saved_values import as_view, has_order, in_shape
from fxremat.runtime.chunks.operator import ROWS
from fxremat.runtime.chunks.program import dump

_ATEN = torch.ops.aten
MATMUL_ROWS = 16
"""Rows of a tensor core's matrix product in 16 bits (mma.m16n8k16 in NVIDIA's PTX)."""


Sizes = tuple[int, int]
"""Rows of a chunk and of a tile."""


def sizes(region: Region) -> list[Sizes]:
    """The sizes that a region is offered in, large chunks first.

    Of a batch of matrices or images one is enough for a chunk. On a GPU a chunk of other rows
    begins at a multiple of 16 bytes, as kernels expect, however narrow a row is.
    """
    in_batches = region.of_images or "bmm" in _names(region)
    least = 1 if in_batches else MATMUL_ROWS
    is_cpu = next(iter(region.kinds)).meta["val"].device.type == "cpu"
    chunks = {max(least, ceil(region.rows / part)) for part in CHUNK_PARTS}
    if not in_batches and not is_cpu:
        chunks = {max(least, chunk // MATMUL_ROWS * MATMUL_ROWS) for chunk in chunks}
    widest = max(dtype_of(n).itemsize for n in region.kinds if region.is_big(n)) * region.width
    tile = max(1, TILE_BYTES // widest)
    return [
        (chunk, min(tile, chunk) if is_cpu else chunk)
        for chunk in sorted(chunks, reverse=True)
        if chunk < region.rows
    ]


# --- which rule ----------------------------------------------------------------------------------


def _names(region: Region) -> set[str]:
    return {packet_name(node) for node in region.kinds}


def rule_of(region: Region) -> str | None:
    """The name of the rule that a region belongs to; None for one that is left alone."""
    names = _names(region)
    sums_exponentials = any(
        any(packet_name(i) == "exp" for i in node.all_input_nodes)
        for node, kind in region.kinds.items()
        if kind == "row" and packet_name(node) == "sum"
    )
    normalises = names & {"_softmax", "_log_softmax"} or ("exp" in names and sums_exponentials)
    matmuls = sum(packet_name(n) in ("mm", "addmm") for n in region.kinds)
    if "bmm" in names or "baddbmm" in names:
        return "chunked_attention" if normalises else None
    if normalises and (matmuls or names & {"gather", "scatter", "scatter_add"}):
        return "chunked_loss"
    return "chunked_mlp" if matmuls >= 2 else None


# --- putting calls in ----------------------------------------------------------------------------


@dataclass
class _Insertion:
    """A form, being put into a copy of the graph of its region."""

    form: _Form
    into: Target
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """What the loops gave so far, as [rows, *row_shape] or as a sum.

    Before that the nodes between the factor and the region, computed for a factor of 1.
    """

    def __post_init__(self) -> None:
        self.region, self.graph = self.form.region, self.into.graph

    def after(self, nodes: list[fx.Node]) -> None:
        """Go on behind the last of ``nodes``, of inputs, and of the forward if that has no loop."""
        joint = self.region.joint
        if self.region.only_backward:
            backward = (n for n in joint.module.graph.nodes if joint.role[n] is Role.BACKWARD)
            nodes = [*nodes, self.into(next(n for n in backward if n.op == "call_function"))]
        last = max(nodes)
        while last.next.op == "placeholder":
            last = last.next
        self.graph.inserting_before(last.next)

    def input(self, node: fx.Node) -> fx.Node:
        return self.made.get(node) or self.into(node)

    def shaped(self, node: fx.Node, *shape: int) -> fx.Node:
        """A node in a shape, copied where no view is that."""
        given = self.input(node)
        add = adder(self.graph, given)
        if as_view(given.meta["val"], shape) is None:
            given = add(_ATEN.clone.default, given, memory_format=torch.contiguous_format)
        return in_shape(add, given, shape)

    def call(self, loop: Loop) -> None:
        self.after([self.input(node) for node, _ in (*loop.rows, *loop.whole)])
        rows = [self.shaped(node, self.region.rows, *shape) for node, shape in loop.rows]
        whole = [self.shaped(node, *shape) for node, shape in loop.whole]
        args = (rows, whole, dump(loop.program), *self.form.size)
        call = add_call(self.graph, ROWS, args, loop.results[0])
        for position, node in enumerate(loop.results):
            self.made[node] = add_call(self.graph, operator.getitem, (call, position), node)

    def copy_for_one(self, scale: Factor) -> None:
        """Compute what is between the factor and the region for a factor of 1."""
        read = {i for n in scale.between for i in n.all_input_nodes}
        read -= {scale.node, *scale.between}
        inputs = self.graph.find_nodes(op="placeholder")
        self.after([*map(self.into, read), inputs[-1]])
        tensor = scale.node.meta["val"]
        kwargs = {"dtype": tensor.dtype, "device": tensor.device}
        args: Any = (list(tensor.shape), 1.0)
        one = add_call(self.graph, _ATEN.full.default, args, scale.node, **kwargs)
        self.made[scale.node] = one
        for node in scale.between:
            args, named = fx.map_arg((node.args, dict(node.kwargs)), self.input)
            self.made[node] = add_call(self.graph, node.target, args, node, **named)

    def stand_in(self, node: fx.Node) -> fx.Node:
        """What may be read in place of a node: its shape and strides."""
        add = adder(self.graph, node)
        return laid_out_like(node, in_shape(add, self.made[node], known_shape(node)), add)

    def scaled(self, node: fx.Node, scale: Factor) -> fx.Node:
        """A multiple of the factor: the result for 1, times the factor."""
        given = self.into(scale.node)
        given = in_shape(adder(self.graph, given), given, ())
        return add_call(self.graph, _ATEN.mul.Tensor, (node, given), node)


# --- forms ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
    """A way to compute a region; `insert` is what a site calls."""

    region: Region
    loops: tuple[Loop, ...]
    size: Sizes
    scale: Factor | None = None

    def insert(self, into: Target) -> StandIns:
        one = _Insertion(self, into)
        found: StandIns = {}
        multiples = frozenset[fx.Node]()
        if self.scale is not None:
            one.copy_for_one(self.scale)
            multiples = self.scale.multiples
        outside = set(self.region.read_outside())
        for loop in self.loops:
            one.call(loop)
            for node in loop.results:
                if node in outside and node not in multiples:
                    found[node] = one.stand_in(node)
        if self.scale is not None:
            one.after([into(self.scale.node), *one.made.values()])
            for node in sorted(multiples & outside):
                one.made[node] = one.scaled(one.made[node], self.scale)
                found[node] = one.stand_in(node)
        return found


_Way = Callable[[Sizes], _Form]


def _again(region: Region, ignored: IgnoredRows | None, scale: Factor | None = None) -> _Way | None:
    """The loops of a region, which leave rows out if some are ``ignored``."""
    if not all(map(has_order, region.read_outside())):
        return None
    known = levels(region, None if scale is None else scale.node)
    try:
        loops = tuple(plan_loops(region, known))
        for loop in loops:
            dump(loop.program)
    except (Refused, TypeError):
        return None
    if ignored is not None:
        loops = tuple(map(ignored.leave_out, loops))
    if not loops or (scale is not None and len(loops) > 1):
        return None
    return partial(_Form, region, loops, scale=scale)


def _late(region: Region, _: IgnoredRows | None) -> _Way | None:
    half = region.backward_half()
    return _again(half, None) if half.read_outside() else None


def _at_once(region: Region, ignored: IgnoredRows | None) -> _Way | None:
    has_backward = any(region.joint.role[n] is Role.BACKWARD for n in region.kinds)
    scale = factor(region) if has_backward else None
    return None if scale is None else _again(region, ignored, scale)


def forms(region: Region, others: Set[fx.Node] = frozenset()) -> Iterator[tuple[str, _Form]]:
    """The ways to compute a region, by name; it may grow, but not by ``others``."""
    regions: list[tuple[Region, IgnoredRows | None]] = [(region, None)]
    if rule_of(region) == "chunked_loss" and (ignored := ignored_rows(region, others)):
        regions.insert(0, (ignored.region, ignored))
    other = ("late", _late) if region.of_images else ("at once", _at_once)
    ways = {
        name: next((made for one in regions if (made := way(*one))), None)
        for name, way in (("again", _again), other)
    }
    for size in sizes(region):
        for name, way in ways.items():
            if way is not None:
                yield f"{name} {size[0]}", way(size)


def find(joint: JointGraph, rule: str) -> list[Site]:
    found: list[Site] = []
    regions = (
        find_image_regions(joint)
        if rule == "chunked_convolutions"
        else find_regions(joint, lambda region: rule_of(region) == rule)
    )
    claimed = {node for region in regions for node in region.kinds}
    for region in regions:
        for form, made in list(forms(region, claimed)):
            name, late = f"{rule} {region.name} {form}", made.region.only_backward
            found.append(Site(rule, name, made.insert, backward_only=late))
            claimed |= set(made.region.kinds)
    return found


RULES = CHUNKED_LOSS, CHUNKED_MLP, CHUNKED_ATTENTION, CHUNKED_CONVOLUTIONS = tuple(
    Rule(name, line, partial(find, rule=name))
    for name, line in (
        ("chunked_loss", "logits and their loss a few rows at a time"),
        ("chunked_mlp", "the hidden layer of an MLP a few rows at a time"),
        ("chunked_attention", "attention written by hand, a few heads at a time"),
        ("chunked_convolutions",
         "a convolution, normalisation and activation a few images at a time"),
    )
)  # fmt: skip

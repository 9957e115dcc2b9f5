"""Derivatives of activations in one to four bits an element (few-bit backward).

In the joint graph an activation multiplies the gradient by a derivative f that is computed from
its input x alone. Whatever it is called, what the backward does to a gradient element by element,
with one value x and no other, is found, tried out to be linear in the gradient, and f(x) is
replaced by one of ``2**bits`` levels: only the number of the interval that x lies in is saved, in
planes of bits.

    x ── erf, exp, ... ── f(x) ── mul (gradient)                        before
    x ── compare ── pack ── planes ── unpack ── where ── f'(x) ── mul   after

This is Novikov et al. 2022, "Few-bit Backward" (arXiv 2202.00441), section 3. Boundaries and
levels are those of least squared error over x in [-REACH, REACH], weighted equally: the optimum
among all boundaries that lie between the POINTS of a grid, by their dynamic programme (section
3.2), each then moved within its cell to where f crosses from one level to the next. So activations
whose derivative is piecewise constant (leaky ReLU, hardtanh, ReLU6) lose nothing. The table is
built from the very nodes of the graph, run on the grid, so no activation has to be known by name:
GELU in both forms, SiLU, tanh, sigmoid, softplus, ELU, Mish, and products of several factors of
one x are all the same to it.

Only functions are taken that are flat outside of the grid, within FLAT: there the last levels go
on for ever. So neither ``x * x`` nor ``exp`` is. What is lost is bounded in the mean over the grid
(`Steps.mean_error`), not for single elements: x at a boundary gets a level half a jump away. The
error has a bias; the paper trains with it. The executor "aot_eager" has whole calls such as
gelu_backward in place of the factors, and no site.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxremat.compat.configuration import OpOverload
from fxremat.compat.tensors import outside_fake_mode
from fxremat.passes.joint_graph import JointGraph, Role, is_repeatable, is_tensor, is_view
from fxremat.passes.materialisation import is_fusable, is_reduction
from fxremat.passes.nodes import fake, laid_out_like
from fxremat.passes.variants.few_bit_tables import Steps, optimal_steps, refined
from fxremat.passes.variants.packed_bits import pack, unpack
from fxremat.passes.variants.rule import Rule, Site, StandIns
from fxremat.passes.variants.saved_values import (
    Inserter,
    as_dtype,
    has_order,
    is_float,
    is_large,
    made_in_forward,
    positions,
)
from fxremat.runtime.quantised import exact

REACH = 10.0
POINTS = 1024
FLAT = 0.01
"""Outside of the grid, f may differ by so much from its value at the end, in parts of its most."""
MOST_BITS = 4

_ATEN = torch.ops.aten
_PRIMS = torch.ops.prims


# --- functions of one value --------------------------------------------------------------


def _is_elementwise(node: fx.Node) -> bool:
    """Whether a node may be part of f: its element follows from that of x, or is a number."""
    if node.op != "call_function" or not is_tensor(node) or is_view(node) or is_reduction(node):
        return False
    if not isinstance(node.target, OpOverload) or not is_repeatable(node, frozenset()):
        return False
    if fake(node).dim() == 0 and is_fusable(node) and not node.all_input_nodes:
        return True
    pointwise = torch.Tag.pointwise in node.target.tags
    return pointwise or node.target is _PRIMS.convert_element_type.default


@dataclass(frozen=True)
class _Region:
    """What the backward does with a gradient, element by element, up to ``last``.

    ``nodes`` are those that read the gradient, directly or not, in the order of the graph;
    ``factors`` is what else they read, numbers apart.
    """

    gradient: fx.Node
    nodes: tuple[fx.Node, ...]
    factors: tuple[fx.Node, ...]
    numbers: tuple[fx.Node, ...]

    @property
    def last(self) -> fx.Node:
        """The node that the region is computed for."""
        return self.nodes[-1]


@dataclass(frozen=True)
class _Factor:
    """f as nodes of the graph, computed from ``x``: what a region multiplies the gradient by."""

    x: fx.Node
    nodes: tuple[fx.Node, ...]
    region: _Region

    def __call__(self, grid: torch.Tensor, gradient: float = 1.0) -> torch.Tensor:
        """What the region makes of a gradient, at the points of a grid of float64."""
        start = self.region.gradient
        ones = torch.full_like(grid, gradient, dtype=fake(start).dtype)
        known: dict[fx.Node, Any] = {self.x: grid.to(fake(self.x).dtype), start: ones}
        for node in (*self.region.numbers, *self.nodes, *self.region.nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            kwargs = {**kwargs, "device": grid.device} if "device" in kwargs else kwargs
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        found: torch.Tensor = known[self.region.last]
        return found.double()


def _cuts(
    factors: tuple[fx.Node, ...], shape: torch.Size, place: Mapping[fx.Node, int]
) -> Iterator[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """Nodes that all of ``factors`` follow from, nearest first, with what lies between.

    Nodes are taken from the last to the first; where one alone is left, all paths go through it.
    """
    waiting = [(-place[f], f.name, f) for f in set(factors)]
    heapq.heapify(waiting)
    seen, inside = set(factors), list[fx.Node]()
    while waiting:
        if len(waiting) == 1:
            yield waiting[0][2], tuple(sorted(inside, key=place.__getitem__))
        node = heapq.heappop(waiting)[2]
        if not _is_elementwise(node) or (fake(node).dim() and fake(node).shape != shape):
            return
        inside.append(node)
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                if _is_number(source):
                    inside.append(source)
                else:
                    heapq.heappush(waiting, (-place[source], source.name, source))


def _is_number(node: fx.Node) -> bool:
    """A tensor of one number that is written in the graph."""
    return _is_elementwise(node) and fake(node).dim() == 0 and not node.all_input_nodes


def _coarse_grid() -> torch.Tensor:
    return torch.linspace(-REACH, REACH, 101, dtype=torch.float64)


def _is_linear(factor: _Factor) -> bool:
    """Whether the gradient is multiplied by f: tried out, as precise as its dtype is."""
    one = factor(_coarse_grid())
    slack = 8 * torch.finfo(fake(factor.region.last).dtype).eps
    near = slack * float(one.abs().max())
    return all(
        torch.allclose(factor(_coarse_grid(), scale), one * scale, rtol=slack, atol=near)
        for scale in (0.0, -1.0, 3.5)
    )


def _is_flat_outside(factor: _Factor) -> bool:
    """Whether f stays where it is at the ends; what is small altogether may grow, as 2 x / n does.

    So that is judged by how large f becomes within the grid.
    """
    far = torch.tensor([-4.0, -2.0, -1.25, -1.0, 1.0, 1.25, 2.0, 4.0], dtype=torch.float64) * REACH
    found = factor(far)
    ends = torch.where(far < 0, found[3], found[4])
    near = (found - ends).abs() <= FLAT * factor(_coarse_grid()).abs().max()
    return bool(near.all()) and bool(found.isfinite().all())


def _function(region: _Region, joint: JointGraph, place: Mapping[fx.Node, int]) -> _Factor | None:
    """f as a function of the nearest fitting value of the forward; None without one."""
    shape = fake(region.last).shape
    for x, inside in _cuts(region.factors, shape, place):
        if fake(x).dtype == torch.bool:  # a mask: `packed_bits` saves it exactly
            return None
        if not made_in_forward(joint, x) or fake(x).shape != shape or not inside:
            continue
        if not is_float(x) or x.target is _PRIMS.convert_element_type.default:
            continue
        factor = _Factor(x, inside, region)
        with outside_fake_mode():
            if has_order(x) and _is_flat_outside(factor) and _is_linear(factor):
                return factor
    return None


# --- sites -------------------------------------------------------------------------------


def _is_late(joint: JointGraph, node: fx.Node) -> bool:
    return joint.role[node] is Role.BACKWARD


def _regions(joint: JointGraph, last: fx.Node, place: Mapping[fx.Node, int]) -> Iterator[_Region]:
    """What lies between one gradient and ``last``, where that is all elementwise; small ones first.

    As with `_cuts`, nodes are taken from the last to the first, and where one is left it is all
    that the others follow from. No node inside is read from outside.
    """
    waiting, seen, inside = [(-place[last], last.name, last)], {last}, list[fx.Node]()
    others: dict[fx.Node, None] = {}
    while waiting:
        if len(waiting) == 1 and inside and is_tensor(waiting[0][2]):
            factors = tuple(n for n in others if not _is_number(n))
            numbers = tuple(n for n in others if _is_number(n))
            gradient = waiting[0][2]
            if factors and fake(gradient).shape == fake(last).shape:
                yield _Region(gradient, tuple(reversed(inside)), factors, numbers)
        node = heapq.heappop(waiting)[2]
        alone = node is last or all(user in inside for user in node.users)
        if not alone or not _is_elementwise(node) or fake(node).shape != fake(last).shape:
            return
        inside.append(node)
        for source in node.all_input_nodes:
            if not _is_late(joint, source):
                others.setdefault(source)
            elif source not in seen:
                seen.add(source)
                heapq.heappush(waiting, (-place[source], source.name, source))


@dataclass
class _Product:
    """A gradient times f(x), and the tables of f by bits, made when first asked for."""

    function: _Factor
    tables: dict[int, Steps] = field(default_factory=dict)

    def table(self, bits: int) -> Steps:
        """The best levels for so many bits."""
        if bits not in self.tables:
            with outside_fake_mode():
                grid = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
                steps = optimal_steps(grid, self.function(grid), 2**bits)
                steps = refined(steps, grid, self.function)
                dtype = fake(self.function.x).dtype  # what the values are compared in
                exact = torch.tensor(steps.boundaries, dtype=grid.dtype).to(dtype).tolist()
                self.tables[bits] = replace(steps, boundaries=tuple(exact))
        return self.tables[bits]

    def insert(self, graph: fx.Graph, where: Mapping[fx.Node, fx.Node], *, bits: int) -> StandIns:
        """Save which level, and multiply the gradient by it."""
        region, table = self.function.region, self.table(bits)
        x, last, gradient = (where[n] for n in (self.function.x, region.last, region.gradient))
        inserter = Inserter(graph, x, last, last)
        planes = planes_of(inserter.early, x, table.boundaries)
        found = derivative(inserter.late, planes, table.levels, fake(x))
        factors = (as_dtype(inserter.late, n, fake(last).dtype) for n in (gradient, found))
        product = inserter.late(_ATEN.mul.Tensor, *factors)
        return {last: laid_out_like(last, product, inserter.late)}


def planes_of(
    add: Callable[..., fx.Node], x: fx.Node, boundaries: Sequence[float]
) -> list[fx.Node]:
    """The interval that x lies in, counted from below, bit by bit; NaN lies in the last.

    Bit j of the number of boundaries below x is the parity of how many of them have a number that
    is a multiple of ``2**j``. Each bit compares by itself: what several loops read, Inductor may
    well write to memory.
    """
    planes = []
    for bit in range(len(boundaries).bit_length()):
        odd = None
        for boundary in boundaries[2**bit - 1 :: 2**bit]:
            not_above = add(_ATEN.le.Scalar, x, boundary)
            above = add(_ATEN.logical_not.default, not_above)
            odd = above if odd is None else add(_ATEN.bitwise_xor.Tensor, odd, above)
        assert odd is not None
        planes.append(pack(add, odd))
    return planes


def derivative(
    add: Callable[..., fx.Node],
    planes: Sequence[fx.Node],
    levels: Sequence[float],
    like: torch.Tensor,
) -> fx.Node:
    """The levels that the planes of bits name."""
    bits = [unpack(add, plane, like) for plane in planes]

    def chosen(among: Sequence[float], known: Sequence[fx.Node]) -> fx.Node:
        if not known:
            return add(
                _ATEN.full.default, [], among[0], dtype=exact(like.dtype), device=like.device
            )
        half = 2 ** (len(known) - 1)
        low = chosen(among[:half], known[:-1])
        if len(among) <= half:
            return low
        return add(_ATEN.where.self, known[-1], chosen(among[half:], known[:-1]), low)

    return chosen(levels, bits)


def products(joint: JointGraph) -> list[_Product]:
    """Every product of a gradient and a function of one value, as large as it can be."""
    place = positions(joint)
    found: list[_Product] = []
    inside: set[fx.Node] = set()
    for last in reversed(joint.module.graph.nodes):
        if last in inside or last.op != "call_function" or not _is_late(joint, last):
            continue
        if not is_tensor(last) or not is_large(last) or not is_float(last):
            continue
        for region in reversed(list(_regions(joint, last, place))):
            function = _function(region, joint, place)
            if function is not None:
                found.append(_Product(function))
                inside.update(region.nodes)
                break
    return found[::-1]


def find_few_bit(joint: JointGraph) -> Iterator[Site]:
    """Derivatives of activations in one to four bits."""
    for product in products(joint):
        for bits in range(1, MOST_BITS + 1):
            name = f"few_bit_activation:{product.function.region.last.name}:{bits}bit"
            yield Site("few_bit_activation", name, partial(product.insert, bits=bits))


RULE = Rule(
    "few_bit_activation", "derivatives of activations in 1 to 4 bits", find_few_bit, lossy=True
)

"""Derivatives of activations in one to four bits an element (few-bit backward).

An activation multiplies the gradient by a derivative f of its input x. Whatever it is called, what
the backward does to a gradient element by element, with one value x and no other, is found and
tried out to be linear in the gradient. Then f(x) is replaced by one of ``2**bits`` levels, and only
the number of the interval that x lies in is saved, in planes of bits.

    x ── erf, exp, ... ── f(x) ── mul (gradient)                        before
    x ── compare ── pack ── planes ── unpack ── where ── f'(x) ── mul   after

This is Novikov et al. 2022 (arXiv 2202.00441), section 3. Boundaries and levels have the least
squared error over x in [-REACH, REACH], by their dynamic programme on a grid of POINTS; each
boundary is then moved to where f crosses from one level to the next. The table is built by running
the nodes of the graph, so no activation has to be known by name. Functions are taken only if they
are flat outside of the grid, within MEASURABLE parts of their most.

What is lost is bounded in the mean over the grid, not for single elements. The error has a bias;
the paper trains with it. The executor "aot_eager" has no site: its graphs have whole calls such as
gelu_backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from fxremat.compat.configuration import OpOverload
from fxremat.compat.tensors import outside_fake_mode
from fxremat.core.constants import FEW_BIT_GRID, MEASURABLE
from fxremat.passes.joint_graph import JointGraph, Role, is_repeatable, is_tensor, is_view
from fxremat.passes.materialisation import is_fusable, is_reduction
from fxremat.passes.nodes import Add, fake, laid_out_like, narrowings, run_calls
from fxremat.passes.variants.insertion import Rule, Site, StandIns, Target
from fxremat.passes.variants.packed_bits import pack, unpack
from fxremat.passes.variants.saved_values import (
    as_dtype,
    has_order,
    is_float,
    is_large,
    made_in_forward,
)
from fxremat.runtime.quantised import exact

REACH, POINTS = FEW_BIT_GRID
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
    is_number = fake(node).dim() == 0 and is_fusable(node) and not node.all_input_nodes
    is_pointwise = torch.Tag.pointwise in node.target.tags
    return is_number or is_pointwise or node.target is _PRIMS.convert_element_type.default


@dataclass(frozen=True)
class _Product:
    """A gradient times f(x), as ``nodes`` compute it, and tables of f by bits, once asked for."""

    x: fx.Node
    gradient: fx.Node
    last: fx.Node
    nodes: tuple[fx.Node, ...]
    tables: dict[int, Steps] = field(default_factory=dict, compare=False)

    def __call__(self, grid: torch.Tensor, gradient: float = 1.0) -> torch.Tensor:
        """What becomes of a gradient, at the points of a grid of float64."""
        ones = torch.full_like(grid, gradient, dtype=fake(self.gradient).dtype)
        known: dict[fx.Node, Any] = {self.x: grid.to(fake(self.x).dtype), self.gradient: ones}
        run_calls(self.nodes, known, grid.device)
        found: torch.Tensor = known[self.last]
        return found.double()

    def is_linear(self) -> bool:
        """Whether the gradient is multiplied by f: tried out, as precise as its dtype is."""
        one = self(_grid())
        slack = 8 * torch.finfo(fake(self.last).dtype).eps
        near = slack * float(one.abs().max())
        return all(
            torch.allclose(self(_grid(), scale), one * scale, rtol=slack, atol=near)
            for scale in (0.0, -1.0, 3.5)
        )

    def is_flat_outside(self) -> bool:
        """Whether f stays where it is at the ends of the grid.

        What is small altogether may grow, as 2 x / n does. So the measure is how large f becomes
        within the grid.
        """
        far = torch.tensor([-4.0, -2.0, -1.25, -1.0, 1.0, 1.25, 2.0, 4.0], dtype=torch.float64)
        found = self(far * REACH)
        ends = torch.where(far < 0, found[3], found[4])
        near = (found - ends).abs() <= MEASURABLE * self(_grid()).abs().max()
        return bool(near.all()) and bool(found.isfinite().all())

    def table(self, bits: int) -> Steps:
        if bits not in self.tables:
            with outside_fake_mode():
                grid = _grid(POINTS)
                steps = refined(optimal_steps(grid, self(grid), 2**bits), grid, self)
                dtype = fake(self.x).dtype  # what the values are compared in
                exact = torch.tensor(steps.boundaries, dtype=grid.dtype).to(dtype).tolist()
                self.tables[bits] = replace(steps, boundaries=tuple(exact))
        return self.tables[bits]

    def insert(self, into: Target, *, bits: int) -> StandIns:
        """Save which level, and multiply the gradient by it."""
        table = self.table(bits)
        x, last, gradient = map(into, (self.x, self.last, self.gradient))
        late = into.before(last)
        planes = planes_of(into.behind(x, last), x, table.boundaries)
        found = derivative(late, planes, table.levels, fake(x))
        factors = (as_dtype(late, n, fake(last).dtype) for n in (gradient, found))
        return {self.last: laid_out_like(last, late(_ATEN.mul.Tensor, *factors), late)}


# --- finding -----------------------------------------------------------------------------


def _is_number(node: fx.Node) -> bool:
    """A tensor of one number that is written in the graph."""
    return _is_elementwise(node) and fake(node).dim() == 0 and not node.all_input_nodes


def _grid(points: int = 101) -> torch.Tensor:
    return torch.linspace(-REACH, REACH, points, dtype=torch.float64)


def _product(
    joint: JointGraph, last: fx.Node, gradient: fx.Node, region: set[fx.Node], read: set[fx.Node]
) -> _Product | None:
    """With f as a function of the nearest fitting value of the forward; None without one."""
    shape, inside = fake(last).shape, set[fx.Node]()

    def sources(node: fx.Node) -> list[fx.Node] | None:
        if not _is_elementwise(node) or (fake(node).dim() and fake(node).shape != shape):
            return None
        numbers = set(filter(_is_number, node.all_input_nodes))
        inside.update((node, *numbers))
        return [source for source in node.all_input_nodes if source not in numbers]

    for x in narrowings(read, sources):
        if fake(x).dtype == torch.bool:  # a mask: `packed_bits` saves it exactly
            return None
        if not made_in_forward(joint, x) or fake(x).shape != shape or not inside:
            continue
        if not is_float(x) or x.target is _PRIMS.convert_element_type.default:
            continue
        found = _Product(x, gradient, last, tuple(sorted(region | inside)))
        with outside_fake_mode():
            if has_order(x) and found.is_flat_outside() and found.is_linear():
                return found
    return None


def _regions(
    joint: JointGraph, last: fx.Node
) -> Iterator[tuple[fx.Node, set[fx.Node], set[fx.Node]]]:
    """What lies between one gradient and ``last``, where that is all elementwise; small ones first.

    A gradient, the nodes that read it, directly or not, with numbers that these read, and what else
    they read. No node inside is read from outside.
    """
    inside: set[fx.Node] = set()
    others: set[fx.Node] = set()

    def sources(node: fx.Node) -> list[fx.Node] | None:
        alone = node is last or inside.issuperset(node.users)
        if not alone or not _is_elementwise(node) or fake(node).shape != fake(last).shape:
            return None
        inside.add(node)
        late = [n for n in node.all_input_nodes if joint.role[n] is Role.BACKWARD]
        others.update(n for n in node.all_input_nodes if n not in late)
        return late

    for gradient in narrowings([last], sources):
        numbers = set(filter(_is_number, others))
        is_like = is_tensor(gradient) and fake(gradient).shape == fake(last).shape
        if inside and others - numbers and is_like:
            yield gradient, inside | numbers, others - numbers


def planes_of(add: Add, x: fx.Node, boundaries: Sequence[float]) -> list[fx.Node]:
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
    add: Add, planes: Sequence[fx.Node], levels: Sequence[float], like: torch.Tensor
) -> fx.Node:
    bits = [unpack(add, plane, like) for plane in planes]

    def chosen(among: Sequence[float], known: Sequence[fx.Node]) -> fx.Node:
        if not known:
            kind = {"dtype": exact(like.dtype), "device": like.device}
            return add(_ATEN.full.default, [], among[0], **kind)
        half = 2 ** (len(known) - 1)
        low = chosen(among[:half], known[:-1])
        if len(among) <= half:
            return low
        return add(_ATEN.where.self, known[-1], chosen(among[half:], known[:-1]), low)

    return chosen(levels, bits)


def products(joint: JointGraph) -> list[_Product]:
    """Every product of a gradient and a function of one value, as large as it can be."""
    found: list[_Product] = []
    inside: set[fx.Node] = set()
    for last in reversed(joint.module.graph.nodes):
        is_late = last.op == "call_function" and joint.role[last] is Role.BACKWARD
        if last in inside or not is_late or not is_large(last) or not is_float(last):
            continue
        for region in reversed(list(_regions(joint, last))):
            product = _product(joint, last, *region)
            if product is not None:
                found.append(product)
                inside |= region[1]
                break
    return found[::-1]


def find_few_bit(joint: JointGraph) -> Iterator[Site]:
    for product in products(joint):
        for bits in range(1, MOST_BITS + 1):
            name = f"few_bit_activation:{product.last.name}:{bits}bit"
            yield Site("few_bit_activation", name, partial(product.insert, bits=bits))


RULE = Rule(
    "few_bit_activation", "derivatives of activations in 1 to 4 bits", find_few_bit, lossy=True
)


# --- tables of levels -------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """A piecewise constant function: ``levels[i]`` from ``boundaries[i - 1]`` on."""

    boundaries: tuple[float, ...]
    levels: tuple[float, ...]


def _costs(values: torch.Tensor) -> torch.Tensor:
    """``costs[i, j]``: squared error of one level for the values from i up to, without, j."""
    zero = values.new_zeros(1)
    ones = torch.cat([zero, values.cumsum(0)])
    squares = torch.cat([zero, values.square().cumsum(0)])
    count = torch.arange(len(values) + 1, dtype=values.dtype)
    width = count[None, :] - count[:, None]
    total = ones[None, :] - ones[:, None]
    error = squares[None, :] - squares[:, None] - total.square() / width.clamp(min=1)
    return error.clamp_(min=0).masked_fill_(width <= 0, torch.inf)


def optimal_steps(grid: torch.Tensor, values: torch.Tensor, levels: int) -> Steps:
    """The best piecewise constant function of so many levels, for values on a sorted grid."""
    costs = _costs(values)
    best, cuts = costs[0], []
    for _ in range(levels - 1):  # best[j]: error of the first j values, with one level more
        best, cut = (best[:, None] + costs).min(dim=0)
        cuts.append(cut)
    ends = [len(values)]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    inner = sorted(ends[1:])
    parts = torch.tensor_split(values, inner)
    return Steps(
        boundaries=tuple(float(grid[i - 1] + grid[i]) / 2 for i in inner),
        levels=tuple(float(part.mean()) for part in parts),
    )


def refined(steps: Steps, grid: torch.Tensor, function: Callable[..., torch.Tensor]) -> Steps:
    """Boundaries moved to where the function is half-way between the levels beside them.

    Each stays in its cell of the grid. Where the function jumps, the boundary is then exact: the
    last number before the jump, in the precision in which the function takes its argument.
    """
    where = torch.searchsorted(grid, torch.tensor(steps.boundaries, dtype=grid.dtype))
    low, high = grid[where - 1], grid[where]
    levels = torch.tensor(steps.levels, dtype=grid.dtype)
    half = (levels[1:] + levels[:-1]) / 2
    rising = function(high) > half
    crossed = rising != (function(low) > half)
    for _ in range(60):
        middle = (low + high) / 2
        passed = (function(middle) > half) == rising
        low, high = torch.where(passed, low, middle), torch.where(passed, middle, high)
    found = torch.where(crossed, low, torch.tensor(steps.boundaries, dtype=grid.dtype))
    return replace(steps, boundaries=tuple(found.tolist()))

"""Regions of the joint graph that work row by row and have big intermediates.

A region begins with one big value of N rows and takes in, over operands and readers, every big
value that is connected to it and computed row by row; what reads them (reductions, matmuls back to
a narrow width, sums over the rows); and the narrow values between these, such as the logarithm
between two passes over the logits.

    x ── mm ── logits ── amax, sub, exp, sum ── log ── ... ── d_logits ── mm ── dx
               |------------------- the region -------------------------------|

Everything else is outside. Where a value cannot be in the region, because its operator mixes rows,
draws random numbers or is not known, the region ends there: the value is an input or a reader.

A node's *level* counts the barriers behind it inside the region: a sum over rows that is read
again, a way that leaves the region and comes back, and the tangents. One loop computes one level.
So no loop reads what depends on it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod

from torch import fx

from fxremat.core.constants import CHUNK_PARTS, MOST_NODES
from fxremat.passes.joint_graph import JointGraph, Role, is_random, is_repeatable, is_tensor
from fxremat.passes.nodes import dtype_of, known_shape, packet_name, shape_of
from fxremat.passes.variants.chunks.operators import (
    VIEWS,
    Calls,
    Operand,
    calls_of,
    operands,
    row_shape_of,
)
from fxremat.runtime.chunks.program import Kind


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a node; of an operator with several results, the results."""
    for user in node.users:
        items = [item for item in user.users if item.target is operator.getitem]
        yield from items if items and not is_tensor(user) else [user]


CallsCache = dict[tuple[fx.Node, Kind], Calls | None]


@dataclass
class Region:
    """Nodes with their kinds; ``width`` is the number of elements of the widest row."""

    joint: JointGraph
    rows: int
    width: int
    kinds: dict[fx.Node, Kind]
    convolution: fx.Node | None = None
    """The convolution of a region of images (see `find_image_regions`)."""
    only_backward: bool = False
    """Whether the forward has no loops: it stays as it is."""
    _calls: CallsCache = field(default_factory=dict)

    @property
    def of_images(self) -> bool:
        """Whether rows are images, and convolutions known."""
        return self.convolution is not None

    @property
    def name(self) -> str:
        return (self.convolution or self.in_order()[0]).name

    def calls(self, node: fx.Node, kind: Kind) -> Calls | None:
        """How a node is computed as ``kind``; None if it may not be in a region."""
        key = node, kind
        if key not in self._calls:
            of_images = node.target is operator.getitem or packet_name(node) == "convolution"
            is_mask_of_dropout = any(  # that is worth keeping of random numbers
                is_random(i) or packet_name(i) == "inductor_random" for i in node.all_input_nodes
            )
            fits = is_repeatable(node, self.joint.mutated) and not is_mask_of_dropout
            fits = fits and (self.of_images or not of_images)
            self._calls[key] = calls_of(node, kind, self.rows) if fits else None
        return self._calls[key]

    def known_calls(self, node: fx.Node, kind: Kind) -> Calls:
        calls = self.calls(node, kind)
        assert calls is not None
        return calls

    def operands(self, node: fx.Node) -> list[Operand]:
        return list(operands(self.known_calls(node, self.kinds[node])))

    def is_big(self, node: fx.Node) -> bool:
        """Whether a row of the node is about as wide as the widest."""
        row_shape = row_shape_of(node, self.rows)
        return row_shape is not None and prod(row_shape) * 2 >= self.width

    def ends_at(self, node: fx.Node) -> bool:
        """Whether a region of images goes no further: at a convolution, or an input's gradient."""
        if not self.of_images or node.target is not operator.getitem:
            return self.of_images and packet_name(node) == "convolution"
        call, place = node.args
        assert isinstance(call, fx.Node)
        return packet_name(call) == "convolution_backward" and bool(place == 0)

    def is_view(self, node: fx.Node) -> bool:
        return packet_name(node) in VIEWS

    def in_order(self) -> list[fx.Node]:
        return sorted(self.kinds)

    def is_read_outside(self, node: fx.Node) -> bool:
        """Whether a node outside of the region reads this one from a loop."""
        outside = [reader for reader in readers(node) if reader not in self.kinds]
        if self.only_backward and self.is_forward(node):
            return any(r.op != "output" and not self.is_forward(r) for r in outside)
        return bool(outside)

    def is_forward(self, node: fx.Node) -> bool:
        return self.joint.role[node] is Role.FORWARD

    def backward_half(self) -> Region:
        """The region with loops in the backward only: they compute rows of the forward again."""
        kinds = {n: k for n, k in self.kinds.items() if k == "row" or not self.is_forward(n)}
        return replace(self, kinds=kinds, only_backward=True)

    def read_outside(self) -> list[fx.Node]:
        """Nodes that somebody outside reads from a loop; of a view, what it looks into."""
        found: set[fx.Node] = set()
        for node in reversed(self.in_order()):
            if node not in found and not self.is_read_outside(node):
                continue
            found.add(node)
            if self.is_view(node):
                found.discard(node)
                found |= {o.node for o in self.operands(node) if o.node in self.kinds}
        return sorted(found)

    def depending_on_big(self) -> set[fx.Node]:
        """Nodes that depend on a big one inside the region, and big ones."""
        found: set[fx.Node] = set()
        for node in self.in_order():
            if self.is_big(node) or any(o.node in found for o in self.operands(node)):
                found.add(node)
        return found


# --- growing -----------------------------------------------------------------------------------


def _kind_of_read(region: Region, user: fx.Node, node: fx.Node) -> Kind | None:
    """The kind in which ``user`` reads the rows of ``node`` as they are."""
    kinds: tuple[Kind, ...] = ("row", "sum", "last")
    for kind in kinds:
        calls = region.calls(user, kind)
        read = {o.kind for o in operands(calls) if o.node is node} if calls else set()
        if read == {region.kinds[node]}:
            return kind
    return None


def _grow(region: Region, seed: fx.Node) -> None:
    """Big values over operands and readers, and whatever reads one of them."""
    region.kinds[seed] = "row"
    todo = [seed]
    while todo and len(region.kinds) <= MOST_NODES:
        node = todo.pop()
        goes_back = region.kinds[node] == "row" and not region.ends_at(node)
        read = [o.node for o in region.operands(node) if o.kind == "row"] if goes_back else []
        for source in read:
            is_new = source not in region.kinds and region.is_big(source)
            if is_new and region.calls(source, "row"):
                region.kinds[source] = "row"
                todo.append(source)
        for reader in readers(node):
            kind = _kind_of_read(region, reader, node)
            if kind is None or reader in region.kinds:
                continue
            region.kinds[reader] = kind
            goes_on = region.is_big(reader) and not region.ends_at(reader)
            if kind == "last" or (kind == "row" and goes_on):
                todo.append(reader)


def _add_transposes(region: Region) -> None:
    """The transposed inputs of sums of products; without them such a sum is no part."""
    for node in [n for n, kind in region.kinds.items() if kind == "sum"]:
        for operand in region.operands(node):
            if operand.kind != "last" or operand.node in region.kinds:
                continue
            if region.calls(operand.node, "last") is None:
                del region.kinds[node]
                break
            region.kinds[operand.node] = "last"


def _add_between(region: Region) -> None:
    """Narrow nodes on a way from the region back into it, in one half of the step."""
    seen: set[fx.Node] = set()
    role = region.joint.role
    stack = [n for n, kind in region.kinds.items() if kind == "row" and not region.is_big(n)]
    while stack and len(seen) < MOST_NODES:
        node = stack.pop()
        for user in node.users:
            is_new = user.op == "call_function" and user not in region.kinds and user not in seen
            if not is_new or region.is_big(user) or region.calls(user, "row") is None:
                continue
            if (role[node] is Role.BACKWARD) == (role[user] is Role.BACKWARD):
                seen.add(user)
                stack.append(user)
    for node in sorted(seen, reverse=True):
        read = [region.operands(user) for user in node.users if user in region.kinds]
        if any(all(o.kind == "row" for o in given if o.node is node) for given in read):
            region.kinds[node] = "row"


def grow(
    joint: JointGraph,
    seed: fx.Node,
    rows: int,
    cache: CallsCache,
    convolution: fx.Node | None = None,
) -> Region:
    """The region around a big value; ``cache`` is what was found out about the same rows."""
    row_shape = row_shape_of(seed, rows)
    assert row_shape is not None
    region = Region(joint, rows, prod(row_shape), {}, convolution, _calls=cache)
    if region.calls(seed, "row") is None:
        return region
    _grow(region, seed)
    if len(region.kinds) > MOST_NODES:
        return region
    _add_transposes(region)
    _add_between(region)
    for node in reversed(region.in_order()):  # views that nobody in the region reads stay outside
        if region.is_view(node) and region.kinds.keys().isdisjoint(readers(node)):
            del region.kinds[node]
    return region


# --- choosing ----------------------------------------------------------------------------------


def nbytes(node: fx.Node) -> int:
    """Bytes of a tensor whose sizes are known; 0 for anything else."""
    shape = shape_of(node)
    return 0 if shape is None else prod(shape) * dtype_of(node).itemsize


def avoided(region: Region) -> int:
    """Bytes of the big values of which never more than a chunk would exist."""
    kept = set(region.read_outside())
    return sum(
        nbytes(n) for n in region.kinds
        if region.is_big(n) and not region.is_view(n) and n not in kept
    )  # fmt: skip


def _around(joint: JointGraph, seed: fx.Node) -> list[Region]:
    """The regions around a value, grown only once: several rules want some of them."""
    calls: dict[int, CallsCache] = joint.notes.setdefault("calls of rows", {})
    grown: dict[fx.Node, list[Region]] = joint.notes.setdefault("regions", {})
    if seed not in grown:
        shape = known_shape(seed)  # rows are a product of leading dimensions, largest first
        counts = dict.fromkeys(prod(shape[:cut]) for cut in range(len(shape) - 1, 0, -1))
        regions = (grow(joint, seed, n, calls.setdefault(n, {})) for n in counts if n > 1)
        grown[seed] = [r for r in regions if r.kinds]
    return grown[seed]


def find_regions(joint: JointGraph, wanted: Callable[[Region], bool]) -> list[Region]:
    """The wanted regions of a graph, the widest values first; no node is in two of them.

    Of several ways to see rows in a value, the one is taken by which most bytes vanish. What was
    big in a region that is not wanted begins no other one, so the graph is looked at a few times.
    """
    nodes = [n for n in joint.module.graph.nodes if n.op == "call_function"]
    sizes = {n: nbytes(n) for n in nodes if packet_name(n) not in VIEWS}
    least = max(sizes.values(), default=0) / max(CHUNK_PARTS)
    seeds = [n for n in nodes if sizes.get(n, 0) >= max(least, 1)]
    found: list[Region] = []
    taken: set[fx.Node] = set()
    tried: set[fx.Node] = set()
    for seed in sorted(seeds, key=lambda n: (-sizes[n], n)):
        if seed in tried:
            continue
        regions = _around(joint, seed)
        tried |= {seed, *(n for r in regions for n in r.kinds if r.is_big(n))}
        fit = [r for r in regions if is_worth_it(r) and wanted(r) and not taken & set(r.kinds)]
        if fit:
            found.append(max(fit, key=avoided))
            taken |= set(found[-1].kinds)
    return found


def is_worth_it(region: Region) -> bool:
    return len(region.kinds) <= MOST_NODES and region.width > 1 and avoided(region) > 0


# --- around a convolution ------------------------------------------------------------------------


def find_image_regions(joint: JointGraph) -> list[Region]:
    """The region around each convolution whose result is at least half as large as any value.

    Rows are images. Such a region takes in what the result of one convolution is turned into,
    forward and backward, up to the next convolutions: these read and give values that exist as a
    whole (x, y, dx, dy). What is between (c, h, dh, dc) is computed a few images at a time, and
    again for each of the loops: for mean and variance, for y, for what the gradient of a
    normalisation adds up, for dx.

        x ── convolution ── c ── normalise, relu ── h ── convolution ── y
                            |-------- big --------|
        dx ── gradient ──── dc ── normalise' ──── dh ── gradient ────── dy

    So the convolution itself is computed several times, which is cheap where it has few channels to
    read, as at the images, and there it is where values are largest. The gradient of its input is
    computed twice, because what a normalisation's gradient adds up has to be known first.
    """
    calls = [node for node in joint.module.graph.nodes if node.op == "call_function"]
    least = max(map(nbytes, calls), default=0) / 2
    cache: dict[int, CallsCache] = {}
    found: list[Region] = []
    for node in calls:
        shape = shape_of(node) if packet_name(node) == "convolution" else None
        if shape is None or nbytes(node) < least or shape[0] < 2:
            continue
        known = cache.setdefault(shape[0], {})
        region = grow(joint, node, shape[0], known, convolution=node)
        if is_worth_it(region) and all(region.kinds != other.kinds for other in found):
            found.append(region)
    return found


# --- levels ------------------------------------------------------------------------------------


def levels(region: Region, given: fx.Node | None = None) -> dict[fx.Node, int]:
    """The level of every node; where a node is ``given``, tangents are no barrier.

    One sweep over the graph: outside of the region, a node has the level of its operands, one more
    for those that are inside.
    """
    inside = region.in_order()
    forward = [n for n in inside if region.joint.role[n] is Role.FORWARD]
    if given is not None or not forward:
        return _sweep(region, inside, 0, given)
    first = _sweep(region, forward, 0)
    later = [n for n in inside if n not in first]
    return first | _sweep(region, later, max(first.values()) + 1)


def _sweep(
    region: Region, inside: list[fx.Node], base: int, given: fx.Node | None = None
) -> dict[fx.Node, int]:
    found: dict[fx.Node, int] = {}
    mine, outside = set(inside), dict[fx.Node, int]()
    node = inside[0] if inside else None
    while node is not None:
        if node in mine:
            read = (
                found[o.node] + (region.kinds[o.node] != o.kind)
                if o.node in found
                else outside.get(o.node, 0)
                for o in region.operands(node)
            )
            found[node] = max([base, *read])
        else:
            behind = [found[i] + 1 if i in found else outside.get(i, 0)
                      for i in node.all_input_nodes]  # fmt: skip
            if any(behind) and node is not given:
                outside[node] = max(behind)
        node = None if node is inside[-1] else node.next
    return found

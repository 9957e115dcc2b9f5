"""Attention written by hand, recognised in the joint graph with its backward.

    S = a Q K^T + masks,  P = softmax(S),  O = P V                          forward
    dV = P^T G,  dP = G V^T,  dS = P (dP - rowsum(P dP)),                   backward
    dQ = a dS K,  dK = a dS^T Q

Views, transposes, copies and conversions between floats may stand anywhere between. What the
backward computes is compared with these formulas, whatever G is. Each product is there at most
once. Nothing of size [T, S] may reach a result of the graph but through O, dQ, dK and dV: so
probabilities that are read elsewhere, dropout on them, and gradients of a bias are no match.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxremat.passes.joint_graph import JointGraph, Role, reached
from fxremat.passes.nodes import Shape, dtype_of, known_shape, packet_name, shape_of
from fxremat.passes.variants.attention.layout import Product, Seen, origin, swapped, viewed, whole
from fxremat.passes.variants.attention.scores import (
    Reading,
    number,
    read,
    read_softmax,
    reduces,
    relatives,
)


@dataclass
class Attention:
    """``query`` [N, T, D], ``key`` [N, S, D], ``value`` [N, S, E] and ``gradient`` [N, T, E].

    Each is a node in that shape (``is_swapped``: with the last two dimensions exchanged).
    """

    probabilities: fx.Node
    scores: Reading
    query: Product
    key: Product
    value: Product
    output: Product
    gradient: Product | None = None
    gradients: dict[str, Product] = field(default_factory=dict)
    late: list[fx.Node] = field(default_factory=list)
    """Products of the backward that read ``gradient``."""

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        batch, rows, columns = known_shape(self.scores.base)
        width, wide = (known_shape(one.node)[-1] for one in (self.query, self.value))
        return batch, rows, columns, width, wide


def factors(product: fx.Node) -> tuple[fx.Node, fx.Node]:
    left, right = product.args[-2:] if packet_name(product) == "bmm" else product.args[1:3]
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    return left, right


# --- relatives of a node -------------------------------------------------------------------------


def _order(reading: Reading, shape: Shape) -> str | None:
    """Whether a reading of [N, T, S] has that shape ("plain") or [N, S, T] ("swapped")."""
    if reading.layout == whole(shape):
        return "plain"
    return "swapped" if reading.layout == swapped(whole(shape)) else None


def _readers(nodes: Iterable[fx.Node], name: str) -> list[fx.Node]:
    found = dict.fromkeys(user for node in nodes for user in node.users)
    return [user for user in found if packet_name(user) == name]


def _seen(product: Product) -> Seen:
    base, layout = origin(product.node)
    return base, swapped(layout) if product.is_swapped and layout else layout


def _other(node: fx.Node, kin: Mapping[fx.Node, str | None], order: str) -> Product | None:
    """What ``node`` multiplies a relative in this order with, from the right."""
    left, right = factors(node)
    if kin.get(left) == order:
        return Product(right, is_swapped=False)
    turned = "swapped" if order == "plain" else "plain"
    return Product(left, is_swapped=True) if kin.get(right) == turned else None


def _times(
    nodes: Iterable[fx.Node], kin: Mapping[fx.Node, str | None], order: str, right: Product
) -> Product | None:
    """The product of a relative in this order and ``right``, if there is one."""
    wanted = _seen(right)
    for node in nodes:
        other = _other(node, kin, order)
        if other is not None and _seen(other) == wanted:
            return Product(node, other.is_swapped)
    return None


# --- the backward of a softmax -------------------------------------------------------------------


def _softmax_gradients(same: set[fx.Node]) -> Iterator[tuple[fx.Node, Any]]:
    """(dS, dP): the gradient of a softmax whose results are ``same``, from that of its result."""
    for node in _readers(same, "_softmax_backward_data"):
        if node.args[1] in same and node.args[2] in (-1, len(known_shape(node)) - 1):
            yield node, node.args[0]
    for product in _readers(same, "mul"):
        left, right = product.args
        given = right if left in same else left
        if not isinstance(given, fx.Node) or given in same:
            continue
        for total in _readers([product], "sum"):
            if not reduces(total, "sum", product):
                continue
            for node in _readers([total], "fma"):  # of -P, the total and the product
                negative, other, added = node.args
                assert isinstance(negative, fx.Node)
                is_negative = packet_name(negative) == "neg" and negative.all_input_nodes[0] in same
                if is_negative and other is total and added is product:
                    yield node, given


# --- the whole -----------------------------------------------------------------------------------


def find_attention(joint: JointGraph) -> Iterator[Attention]:
    for node in joint.module.graph.nodes:
        if joint.role[node] is Role.FORWARD:
            found = _match(joint, node)
            if found is not None:
                yield found


def _match(joint: JointGraph, node: fx.Node) -> Attention | None:
    scores = read_softmax(node)
    if scores is None or not _is_plain(node, scores) or not scores.factor > 0:
        return None
    kin = _unchanged(node, known_shape(scores.base))
    products = _readers(kin, "bmm")
    early = [p for p in products if joint.role[p] is Role.FORWARD]
    value = _other(early[0], kin, "plain") if len(early) == 1 else None
    if value is None:
        return None
    left, right = factors(scores.base)
    found = Attention(
        probabilities=node,
        scores=scores,
        query=Product(left, is_swapped=False),
        key=Product(right, is_swapped=True),
        value=value,
        output=Product(early[0], value.is_swapped),
    )
    late = [p for p in products if p is not early[0]]
    if not _add_backward(found, kin, late) or not _has_fitting_types(found):
        return None
    is_late = all(joint.role[p.node] is not Role.FORWARD for p in found.gradients.values())
    return found if is_late and _is_closed(found) else None


def _unchanged(base: fx.Node, shape: Shape) -> dict[fx.Node, str | None]:
    """All that is ``base`` but moved, with its order where it is a batch of matrices."""
    found: dict[fx.Node, str | None] = {}
    for node, reading in relatives(base).items():
        in_order = viewed(reading.layout, shape) == whole(shape)
        if reading.is_unchanged and (in_order or _order(reading, shape) is not None):
            found[node] = _order(reading, shape)
    return found


def _is_plain(node: fx.Node, scores: Reading) -> bool:
    """Whether the softmax is over [..., T, S], the leading dimensions in order."""
    shape, own = known_shape(scores.base), known_shape(node)
    if len(shape) != 3 or min(shape[1:]) < 2 or own[-2:] != shape[1:]:
        return False
    return viewed(scores.layout, shape) == whole(shape)


def _add_backward(found: Attention, kin: Mapping[fx.Node, str | None], late: list[fx.Node]) -> bool:
    """Fill in the gradients; False where the backward is not what it should be."""
    in_order = {node for node, order in kin.items() if order != "swapped"}
    pairs = list(_softmax_gradients(in_order))
    if len(pairs) > 1:
        return False
    if pairs:
        scores_gradient, given = pairs[0]
        product = _gradient_of_probabilities(found, given)
        if product is None or known_shape(scores_gradient) != known_shape(found.probabilities):
            return False
        found.late.append(product)
        _add_gradients_of_operands(found, scores_gradient)
    elif late:
        found.gradient = _other(late[0], kin, "swapped")
    if found.gradient is not None:
        value = _times(late, kin, "swapped", found.gradient)
        if value is not None:
            found.gradients["value"] = value
            found.late.append(value.node)
    return True


def _gradient_of_probabilities(found: Attention, given: fx.Node) -> fx.Node | None:
    """dP = G V^T; G is noted."""
    reading = read(given)
    shape = known_shape(found.scores.base)
    if reading is None or not reading.is_unchanged or packet_name(reading.base) != "bmm":
        return None
    if known_shape(reading.base) != shape or viewed(reading.layout, shape) != whole(shape):
        return None
    left, right = factors(reading.base)
    if _seen(Product(right, is_swapped=True)) != _seen(found.value):
        return None
    found.gradient = Product(left, is_swapped=False)
    return reading.base


def _add_gradients_of_operands(found: Attention, scores_gradient: fx.Node) -> None:
    """Add the gradients of query and key, if they are scaled and masked as the scores were."""
    shape, wanted = known_shape(found.scores.base), found.scores
    places = {mask.places for mask in wanted.masks if mask.value is not None}
    kin: dict[float, dict[fx.Node, str | None]] = {}
    for node, reading in relatives(scores_gradient).items():
        if reading.is_zeroed and {mask.places for mask in reading.masks} == places:
            kin.setdefault(reading.factor, {})[node] = _order(reading, shape)
    for factor, nodes in kin.items():
        products = _readers(nodes, "bmm")
        for name, order, right in (("query", "plain", found.key), ("key", "swapped", found.query)):
            product = _times(products, nodes, order, right)
            scaled = None if product is None else _scaled(product, wanted.factor / factor)
            if scaled is not None:
                found.gradients[name] = scaled


def _scaled(product: Product, factor: float) -> Product | None:
    """The product times a factor: in the graph behind it, if that is not 1."""
    if math.isclose(factor, 1, rel_tol=1e-6):
        return product
    reader = next(iter(product.node.users), None)
    if reader is None or len(product.node.users) > 1 or packet_name(reader) != "mul":
        return None
    given = number(reader.args[1])
    fits = given is not None and math.isclose(given, factor, rel_tol=1e-6)
    return Product(reader, product.is_swapped) if fits else None


def _has_fitting_types(found: Attention) -> bool:
    """Whether all operands and results have one type of floats, and sizes that are numbers."""
    operands = [found.query, found.key, found.value, found.output, *found.gradients.values()]
    operands += [] if found.gradient is None else [found.gradient]
    types = {dtype_of(operand.node) for operand in operands}
    if len(types) != 1 or any(shape_of(operand.node) is None for operand in operands):
        return False
    # of one query, key or width a product cannot be told from its transpose
    known = {torch.float32, torch.float64, torch.bfloat16, torch.float16}
    return types <= known and min(found.sizes[3:]) > 1


def _is_closed(found: Attention) -> bool:
    """Whether nothing of size [T, S] reaches a result of the graph but through the products."""
    ends = {found.output.node, *(product.node for product in found.gradients.values())}
    seen = reached([found.scores.base, *found.late], lambda n: () if n in ends else n.users)
    return all(node.op != "output" for node in seen)

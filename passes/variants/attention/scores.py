"""What a matrix of scores is: a product, moved, scaled and masked; and softmax of such scores.

Read from a node back to the product, and in the backward from the operand of a product back to the
gradient of the softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxremat.core.constants import MOST_NODES
from fxremat.passes.nodes import Shape, dtype_of, known_shape, packet_name, shape_of
from fxremat.passes.variants.attention.layout import Layout, is_move, moved, whole

VERY_NEGATIVE = -1e4
"""What is filled in for keys that are masked out is at most this: exp of it is 0 in float64."""


@dataclass(frozen=True)
class Mask:
    """A tensor that is added to scores of ``shape``, or says where these are filled in.

    ``value`` is filled in where the tensor is true (``is_kept``: where it is false); None if the
    tensor is added.
    """

    tensor: fx.Node
    shape: Shape
    value: float | None = None
    is_kept: bool = False

    @property
    def places(self) -> tuple[fx.Node, bool, Shape]:
        """Equal for what is filled in at the same places."""
        return self.tensor, self.is_kept, self.shape


@dataclass(frozen=True)
class Reading:
    """A node as ``factor`` times ``base``, moved, with something added or filled in, in order."""

    base: fx.Node
    layout: Layout
    factor: float = 1.0
    masks: tuple[Mask, ...] = ()

    @property
    def is_unchanged(self) -> bool:
        """Whether the node is the base, but for where its elements are and rounding."""
        return self.factor == 1 and not self.masks

    @property
    def is_zeroed(self) -> bool:
        """Whether nothing but zeros was filled in, and nothing added."""
        return all(mask.value == 0 for mask in self.masks)

    def times(self, factor: float) -> Reading | None:
        """Scaled; None where that would scale what was added or filled in."""
        return replace(self, factor=self.factor * factor) if self.is_zeroed else None

    def masked(self, *mask: Any) -> Reading:
        return replace(self, masks=(*self.masks, Mask(*mask)))


def number(value: Any) -> float | None:
    """A number, or the number in a tensor that holds one and is made in the graph."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, fx.Node) and shape_of(value) == ():
        if packet_name(value) in ("full", "scalar_tensor"):
            return number(value.args[-1])
        if packet_name(value) in ("convert_element_type", "_to_copy", "clone", "lift_fresh_copy"):
            return number(value.args[0])
    return None


Below = Callable[[Any], Reading | None]
"""What is known of an operand."""


def read(node: Any) -> Reading | None:
    """What ``node`` is of a product of two batches of matrices."""
    known: dict[fx.Node, Reading | None] = {}  # sums could be read in many ways

    def below(one: Any) -> Reading | None:
        if not isinstance(one, fx.Node) or shape_of(one) is None:
            return None
        if one not in known and len(known) < MOST_NODES:
            known[one] = None
            is_product = packet_name(one) in ("bmm", "baddbmm")
            known[one] = _begin(one) if is_product else _read(one, below)
        return known.get(one)

    return below(node)


def relatives(base: fx.Node) -> dict[fx.Node, Reading]:
    """All that is ``base`` moved, scaled or masked; itself first."""
    found = {base: Reading(base, whole(known_shape(base)))}
    todo = [base]
    while todo:
        for user in todo.pop().users:
            is_new = user.op == "call_function" and user not in found
            reading = _read(user, found.get) if is_new and shape_of(user) is not None else None
            if reading is not None:
                found[user] = reading
                todo.append(user)
    return found


def _read(node: fx.Node, below: Below) -> Reading | None:
    if packet_name(node) in _READERS:
        return _READERS[packet_name(node)](node, below)
    given = below(node.args[0]) if is_move(node) else None
    layout = None if given is None else moved(node, given.layout)
    return None if given is None or layout is None else replace(given, layout=layout)


def _begin(node: fx.Node) -> Reading | None:
    shape = known_shape(node)
    found = Reading(node, whole(shape))
    if packet_name(node) == "bmm":
        return found
    beta, alpha = (number(node.kwargs.get(name, 1)) for name in ("beta", "alpha"))
    if alpha is None or beta not in (0.0, 1.0):
        return None
    scaled = found.times(alpha)
    assert scaled is not None
    given = node.args[0]
    assert isinstance(given, fx.Node)
    return scaled if beta == 0 else scaled.masked(given, shape)


def _cast(node: fx.Node, below: Below) -> Reading | None:
    fits = all(dtype_of(n).is_floating_point for n in (node, *node.all_input_nodes))
    return below(node.args[0]) if fits else None


def _scaled(node: fx.Node, below: Below) -> Reading | None:
    """Times a number, or divided by one."""
    left, right = node.args[:2]
    factor, given = number(right), left
    if packet_name(node) == "div":
        factor = None if not factor or "rounding_mode" in node.kwargs else 1 / factor
    elif factor is None:
        factor, given = number(left), right
    found = below(given)
    return found.times(factor) if found is not None and factor is not None else None


def _added(node: fx.Node, below: Below) -> Reading | None:
    shape = known_shape(node)
    if node.kwargs.get("alpha", 1) != 1:
        return None
    left, right = node.args
    for given, other in ((left, right), (right, left)):
        found = below(given)
        if found is None or not isinstance(other, fx.Node) or shape_of(other) is None:
            continue
        if shape_of(given) == shape:  # type: ignore[arg-type]
            return found.masked(other, shape)
    return None


def _where(node: fx.Node, below: Below) -> Reading | None:
    mask, if_true, if_false = node.args
    value, given, is_kept = number(if_true), if_false, False
    if value is None:
        value, given, is_kept = number(if_false), if_true, True
    return _filled(node, below, mask, given, value, is_kept)


def _filled(
    node: fx.Node, below: Below, mask: Any, given: Any, value: float | None, is_kept: bool
) -> Reading | None:
    found, shape = below(given), known_shape(node)
    if found is None or value is None or shape_of(given) != shape or shape_of(mask) is None:
        return None
    if (value != 0 and not value <= VERY_NEGATIVE) or dtype_of(mask) != torch.bool:
        return None
    return found.masked(mask, shape, value, is_kept)


_READERS: dict[str, Callable[[fx.Node, Below], Reading | None]] = {
    **dict.fromkeys(("convert_element_type", "_to_copy"), _cast),
    **dict.fromkeys(("mul", "div"), _scaled),
    "add": _added,
    "where": _where,
    "masked_fill": lambda node, below: _filled(
        node, below, node.args[1], node.args[0], number(node.args[2]), False
    ),
}


# --- softmax -------------------------------------------------------------------------------------


def read_softmax(node: fx.Node) -> Reading | None:
    """The scores of a softmax over the last dimension, by one call or in parts."""
    shape = shape_of(node)
    if shape is None or not shape:
        return None
    if packet_name(node) == "_softmax":
        fits = node.args[1] in (-1, len(shape) - 1)
        return _of_forward(read(node.args[0])) if fits else None
    if packet_name(node) != "div" or len(node.args) != 2:
        return None
    powers, total = node.args
    if packet_name(powers) != "exp" or not reduces(total, "sum", powers):  # type: ignore[arg-type]
        return None
    return _of_forward(_shifted(powers.args[0]))  # type: ignore[union-attr]


def _of_forward(scores: Reading | None) -> Reading | None:
    """Scores may not be filled with 0: that is no mask."""
    is_mask = scores is None or all(mask.value != 0 for mask in scores.masks)
    return scores if is_mask else None


def reduces(node: Any, name: str, source: Any) -> bool:
    """Whether ``node`` reduces ``source`` along the last dimension, which it keeps."""
    if not isinstance(node, fx.Node) or packet_name(node) != name or len(node.args) < 3:
        return False
    given, dims, keeps = node.args[:3]
    last = len(shape_of(source) or ()) - 1
    return given is source and bool(keeps) and dims in ([-1], [last])


def _shifted(node: Any) -> Reading | None:
    """Scores less their largest, perhaps scaled after that.

    Inductor does so where that is finite, and computes both: they are equal but for rounding.
    """
    name = packet_name(node) if isinstance(node, fx.Node) else ""
    if name == "sub":
        given, largest = node.args
        fits = not node.kwargs and reduces(largest, "amax", given)
        return read(given) if fits else None
    if name in ("mul", "div"):
        factor = number(node.args[1])
        below = _shifted(node.args[0]) if factor else None
        if below is None or not factor:
            return None
        return below.times(factor if name == "mul" else 1 / factor)
    if name == "where":
        one, other = _shifted(node.args[1]), _shifted(node.args[2])
        if one is None or other is None or replace(one, factor=other.factor) != other:
            return None
        return other if math.isclose(one.factor, other.factor, rel_tol=1e-6) else None
    return None

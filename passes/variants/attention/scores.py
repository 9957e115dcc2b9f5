"""What a matrix of scores is: a product, moved, scaled and masked; and softmax of such scores.

Read from a node back to the product, and in the backward from the operand of a product back to the
gradient of the softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxremat.core.constants import MOST_NODES
from fxremat.passes.nodes import Shape, dtype_of, known_shape, packet_name, shape_of
from fxremat.passes.variants.attention.layout import Layout, is_move, moved, whole

VERY_NEGATIVE = -1e4
"""What is filled in for keys that are masked out is at most this: exp of it is 0 in float64."""


@dataclass(frozen=True)
class Filled:
    """``value`` where ``mask`` is true (``is_kept``: where it is false), in scores of ``shape``."""

    mask: fx.Node
    is_kept: bool
    value: float
    shape: Shape

    @property
    def key(self) -> tuple[fx.Node, bool, Shape]:
        """Equal for what is filled in at the same places."""
        return self.mask, self.is_kept, self.shape


@dataclass(frozen=True)
class Added:
    """A tensor added to scores of ``shape``."""

    node: fx.Node
    shape: Shape


@dataclass(frozen=True)
class Reading:
    """A node as ``factor`` times ``base``, moved, with something added or filled in, in order."""

    base: fx.Node
    layout: Layout
    factor: float = 1.0
    added: tuple[Added, ...] = ()
    filled: tuple[Filled, ...] = ()

    @property
    def is_unchanged(self) -> bool:
        """Whether the node is the base, but for where its elements are and rounding."""
        return self.factor == 1 and not self.added and not self.filled

    def times(self, factor: float) -> Reading | None:
        """Scaled; None where that would scale what was added or filled in."""
        if self.added or any(mask.value for mask in self.filled):
            return None
        return replace(self, factor=self.factor * factor)


def packets(graph: fx.Graph) -> set[str]:
    return {packet_name(node) for node in graph.nodes}


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


@dataclass(frozen=True)
class _ScoresSearch:
    """What is read back to, and what was found on the way: sums could be read in many ways."""

    base: fx.Node | None
    known: dict[fx.Node, Reading | None] = field(default_factory=dict)

    def read(self, node: Any) -> Reading | None:
        if not isinstance(node, fx.Node) or shape_of(node) is None:
            return None
        if node not in self.known:
            self.known[node] = None
            self.known[node] = self._read(node) if len(self.known) <= MOST_NODES else None
        return self.known[node]

    def _read(self, node: fx.Node) -> Reading | None:
        if node is self.base:
            return Reading(node, whole(shape_of(node) or ()))
        if self.base is None and packet_name(node) in ("bmm", "baddbmm"):
            return _begin(node)
        reader = _READERS.get(packet_name(node))
        if reader is not None:
            return reader(node, self)
        below = self.read(node.args[0]) if is_move(node) else None
        layout = None if below is None else moved(node, below.layout)
        return None if below is None or layout is None else replace(below, layout=layout)


def read(node: Any, base: fx.Node | None) -> Reading | None:
    """What ``node`` is of ``base``; of a product of two batches of matrices if that is None."""
    return _ScoresSearch(base).read(node)


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
    return scaled if beta == 0 else replace(scaled, added=(Added(given, shape),))


def _cast(node: fx.Node, to: _ScoresSearch) -> Reading | None:
    below = to.read(node.args[0])
    fits = below is not None and all(
        dtype_of(n).is_floating_point for n in (node, *node.all_input_nodes)
    )
    return below if fits else None


def _scaled(node: fx.Node, to: _ScoresSearch) -> Reading | None:
    """Times a number, or divided by one."""
    left, right = node.args[:2]
    factor, given = number(right), left
    if packet_name(node) == "div":
        factor = None if not factor or "rounding_mode" in node.kwargs else 1 / factor
    elif factor is None:
        factor, given = number(left), right
    below = None if factor is None else to.read(given)
    return below.times(factor) if below is not None and factor is not None else None


def _added(node: fx.Node, to: _ScoresSearch) -> Reading | None:
    shape = known_shape(node)
    if node.kwargs.get("alpha", 1) != 1:
        return None
    left, right = node.args
    for given, other in ((left, right), (right, left)):
        below = to.read(given)
        if below is None or not isinstance(other, fx.Node) or shape_of(other) is None:
            continue
        if shape_of(given) == shape:  # type: ignore[arg-type]
            return replace(below, added=(*below.added, Added(other, shape)))
    return None


def _where(node: fx.Node, to: _ScoresSearch) -> Reading | None:
    mask, if_true, if_false = node.args
    value, given, is_kept = number(if_true), if_false, False
    if value is None:
        value, given, is_kept = number(if_false), if_true, True
    return _filled(node, to, mask, given, value, is_kept)


def _masked_fill(node: fx.Node, to: _ScoresSearch) -> Reading | None:
    given, mask, value = node.args
    return _filled(node, to, mask, given, number(value), False)


def _filled(
    node: fx.Node, to: _ScoresSearch, mask: Any, given: Any, value: float | None, is_kept: bool
) -> Reading | None:
    below, shape = to.read(given), known_shape(node)
    if below is None or value is None or shape_of(given) != shape or shape_of(mask) is None:
        return None
    if (value != 0 and not value <= VERY_NEGATIVE) or dtype_of(mask) != torch.bool:
        return None
    return replace(below, filled=(*below.filled, Filled(mask, is_kept, value, shape)))


_READERS: dict[str, Callable[[fx.Node, _ScoresSearch], Reading | None]] = {
    **dict.fromkeys(("convert_element_type", "_to_copy"), _cast),
    **dict.fromkeys(("mul", "div"), _scaled),
    "add": _added,
    "where": _where,
    "masked_fill": _masked_fill,
}


# --- softmax -------------------------------------------------------------------------------------


def read_softmax(node: fx.Node) -> Reading | None:
    """The scores of a softmax over the last dimension, by one call or in parts."""
    shape = shape_of(node)
    if shape is None or not shape:
        return None
    if packet_name(node) == "_softmax":
        fits = node.args[1] in (-1, len(shape) - 1)
        return _of_forward(read(node.args[0], None)) if fits else None
    if packet_name(node) != "div" or len(node.args) != 2:
        return None
    powers, total = node.args
    if packet_name(powers) != "exp" or not _reduces(total, "sum", powers):  # type: ignore[arg-type]
        return None
    return _of_forward(_shifted(powers.args[0]))  # type: ignore[union-attr]


def _of_forward(scores: Reading | None) -> Reading | None:
    """Scores may not be filled with 0: that is no mask."""
    if scores is None or any(not mask.value for mask in scores.filled):
        return None
    return scores


def _reduces(node: Any, name: str, source: Any) -> bool:
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
        fits = not node.kwargs and _reduces(largest, "amax", given)
        return read(given, None) if fits else None
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

"""Gradients in the forward: where the backward of a region is linear in one number.

The loss is one number, so all that comes from outside into the backward of a loss is one number s,
by which everything is multiplied. Then the gradients may be computed with s = 1 together with the
loss, in one loop over the logits, and multiplied by s when it is known:

    dx(s) = s dx(1)

`factor` finds s: a tangent, or a number computed from tangents, on every way from the tangents into
the region; of several the first, which in most steps is the gradient of the loss itself. (A later
one may be infinite where no label counts, and what a mask then makes zero must stay so.) What lies
between s and the region is computed for s = 1 too. That all of it is linear is shown op by op: each
operator is linear in the operands that depend on s, with the others fixed, and gives zero for zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxremat.compat.configuration import OpOverload
from fxremat.passes.joint_graph import Role, is_repeatable, is_tensor, reached
from fxremat.passes.nodes import arguments_of, dtype_of, narrowings, packet_name, shape_of
from fxremat.passes.variants.chunks.loops import constant_of
from fxremat.passes.variants.chunks.operators import VIEWS
from fxremat.passes.variants.chunks.regions import Region, levels


@dataclass(frozen=True)
class Factor:
    """The number, and the nodes outside of the region that are computed for 1 in place of it.

    The ``multiples`` of it are in the region.
    """

    node: fx.Node
    between: tuple[fx.Node, ...]
    multiples: frozenset[fx.Node]


def factor(region: Region) -> Factor | None:
    """The number that the backward of the region is a multiple of."""
    role = region.joint.role

    def late(nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [node for node in nodes if role.get(node) is Role.BACKWARD]

    def sources(node: fx.Node) -> list[fx.Node] | None:
        return None if node.op == "placeholder" else late(node.all_input_nodes)

    ends = late(region.kinds)
    passed = [n for n in narrowings(ends, sources) if n not in region.kinds]
    first = next((n for n in reversed(passed) if shape_of(n) in ((), (1,))), None)
    if first is None:
        return None
    ways = reached(ends, lambda node: late(node.all_input_nodes))
    behind = sorted(node for node in ways if node > first)
    between = tuple(node for node in behind if node not in region.kinds)
    dependent = {first}
    for node in behind:
        if not _is_linear(node, dependent) or dtype_of(node) is torch.float16:
            return None
        dependent.add(node)
    if not all(is_repeatable(node, region.joint.mutated) for node in between):
        return None
    if max(levels(region, first).values()) > 0:
        return None
    return Factor(first, between, frozenset(dependent.intersection(region.kinds)))


# --- linear operators ----------------------------------------------------------------------------

_IN_ONE: dict[str, tuple[str, ...]] = {
    "convert_element_type": ("a",),
    **dict.fromkeys(
        {"neg", "clone", "sum", "mean", "permute", "expand", "div", "gather", "constant_pad_nd"}
        | VIEWS,
        ("self",),
    ),
    **dict.fromkeys(
        (
            "_softmax_backward_data", "_log_softmax_backward_data", "threshold_backward",
            "gelu_backward", "silu_backward", "sigmoid_backward", "tanh_backward",
        ),
        ("grad_output",),
    ),
    "mul": ("self", "other"), "mm": ("self", "mat2"), "bmm": ("self", "mat2"),
}  # fmt: skip
"""Operators that are linear in one of these operands, where only that depends on the number."""
_SUMS = {"add": ("self", "other"), "sub": ("self", "other"), "where": ("self", "other"),
         "scatter": ("self", "src"), "scatter_add": ("self", "src")}  # fmt: skip


def _is_zero(thing: Any) -> bool:
    number = constant_of(thing) if isinstance(thing, fx.Node) else thing
    return isinstance(number, (int, float)) and number == 0


def _is_linear(node: fx.Node, dependent: set[fx.Node]) -> bool:
    """Whether the node is linear in what depends on the number, and 0 where that is 0."""
    if not isinstance(node.target, OpOverload) or not is_tensor(node):
        return False
    name, named = packet_name(node), arguments_of(node)
    if "reduce" in named or not dtype_of(node).is_floating_point:
        return False
    read = {key for key, one in named.items() if isinstance(one, fx.Node) and one in dependent}
    if dependent.intersection(node.all_input_nodes) != {named[key] for key in read}:  # in lists
        return name == "cat" and all(i in dependent or _is_zero(i) for i in node.all_input_nodes)
    if name in _IN_ONE:
        is_plain = named.get("rounding_mode") is None and _is_zero(named.get("value", 0))
        return len(read) == 1 and read <= {*_IN_ONE[name]} and is_plain
    if name in _SUMS:
        others = [named.get(key, named.get("value")) for key in _SUMS[name] if key not in read]
        return read <= {*_SUMS[name]} and all(map(_is_zero, others))
    return False

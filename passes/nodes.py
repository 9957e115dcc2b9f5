"""What an FX node says of its call and of its result."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxremat import compat
from fxremat.passes.joint_graph import is_tensor

Shape = tuple[int, ...]


def shape_of(node: fx.Node) -> Shape | None:
    """The shape in numbers; None for what is no tensor or has sizes that are not known."""
    if not is_tensor(node):
        return None
    shape = tuple(node.meta["val"].shape)
    return shape if all(type(size) is int for size in shape) else None


def dtype_of(node: fx.Node) -> torch.dtype:
    """The type of a tensor's elements."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def bound(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    target = node.target
    assert isinstance(target, compat.OpOverload)
    given = {}
    for position, argument in enumerate(target._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        value = node.args[position] if position < len(node.args) else default
        given[argument.name] = node.kwargs.get(argument.name, value)
    return given


def packet_of(node: fx.Node) -> object:
    """The operator without its overload; the target itself where it is no operator."""
    target = node.target
    return target.overloadpacket if isinstance(target, compat.OpOverload) else target


def packet_name(node: fx.Node) -> str:
    """The operator's name without namespace and overload; empty for what is no operator."""
    target = node.target
    return target.overloadpacket.__name__ if isinstance(target, compat.OpOverload) else ""

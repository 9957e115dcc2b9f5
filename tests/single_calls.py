"""Nodes that call one operator each, in graphs of their own, and tensors to call them with."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

ATEN = torch.ops.aten
X = torch.zeros(4, 4)
KEY = torch.zeros(1, 2, 4, 8)


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node that calls ``target``; tensors become placeholders of a graph of its own."""
    graph = fx.Graph()

    def given(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = value
        return node

    node = graph.call_function(target, tuple(map(given, args)), kwargs)
    node.meta["val"] = target(*args, **kwargs)
    return node


def item(node: fx.Node, index: int) -> fx.Node:
    """The getitem of a call that returns a tuple."""
    taken = node.graph.call_function(operator.getitem, (node, index))
    taken.meta["val"] = node.meta["val"][index]
    return taken

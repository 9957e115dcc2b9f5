"""Graphs that are put together call by call."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


class ByHand:
    """A graph with fake results of one size, unless said otherwise."""

    def __init__(self, *inputs: str) -> None:
        self.graph = fx.Graph()
        self.inputs = {name: self.graph.placeholder(name) for name in inputs}
        for node in self.inputs.values():
            node.meta["val"] = torch.empty(4, 4)

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    def done(self, *results: fx.Node) -> fx.Graph:
        self.graph.output(results)
        return self.graph

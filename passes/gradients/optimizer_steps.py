"""Say where a gradient is in host memory and its weight is read no more: its optimizer may step.

    before:  ...  wait_host(g, x)  ...  wait_device(w_2, w)  ...  settle;  return g
    after:   ...  wait_host(g, x)  ...  wait_device(w_2, w)  arrived(g, w)  ...  settle;  return g

``w`` is an input of the graph, and ``g`` the gradient that the graph returns for it. After the call
only the end of the graph uses either, in whatever order their transfers were. It is done for
weights that the graph only fetches, and for gradients that it only returns.

Whether a step then begins is decided when the graph runs
(`fxremat.runtime.gradients.optimizer_steps`). The graph cannot know whether two of its inputs share
memory, so the first call names all inputs that are read after it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import torch
from torch import fx

from fxremat import runtime
from fxremat.passes.joint_graph import JointGraph, is_fetch, is_put, is_tensor, root
from fxremat.passes.offload import MOVED

HOST = torch.device("cpu")


class Gradient(NamedTuple):
    """What a graph returns for an input, both in host memory; ``device`` is where it was made."""

    result: fx.Node
    weight: fx.Node
    device: torch.device

    def touching(self) -> tuple[fx.Node, ...]:
        """The gradient's node, and all that reads the gradient or the weight."""
        return self.result, *self.result.users, *self.weight.users


def host_gradients(joint: JointGraph) -> list[Gradient]:
    """The gradients that a joint graph puts to host memory and only returns."""
    results = joint.results[joint.num_forward_outputs :]
    if len(results) != len(joint.primals):
        return []
    return [
        Gradient(result, weight, result.all_input_nodes[0].meta["val"].device)
        for result, weight in zip(results, joint.primals, strict=True)
        if isinstance(result, fx.Node)
        and is_put(result)
        and len(result.users) == 1
        and results.count(result) == 1
        and weight not in joint.mutated
        and all(map(is_fetch, weight.users))
    ]


def insert_arrived(
    graph: fx.Graph, gradients: Sequence[Gradient], backward: Sequence[fx.Node]
) -> None:
    """Insert a call ``arrived`` for each gradient; ``backward`` are the nodes of that half."""
    position = {node: index for index, node in enumerate(backward)}
    last = {
        gradient: max(position.get(node, -1) for node in gradient.touching())
        for gradient in gradients
        if gradient.result in position
    }
    in_order = sorted(last, key=last.__getitem__)
    if not in_order:
        return
    behind = backward[last[in_order[0]] + 1 :]
    read = (*(gradient.weight for gradient in in_order[1:]), *_inputs_read(behind, position))
    for gradient in reversed(in_order):  # the first of two at the same place comes first
        is_first = gradient is in_order[0]
        others = [node for node in dict.fromkeys(read) if is_first and node is not gradient.weight]
        _insert(graph, backward[last[gradient]], gradient, others, is_first)


def _inputs_read(nodes: Sequence[fx.Node], own: Container[fx.Node]) -> list[fx.Node]:
    """What ``nodes`` read of the graph's inputs on the host, themselves or as views."""
    outside = (n for node in nodes for n in node.all_input_nodes if n not in own)
    return [
        node
        for node in dict.fromkeys(outside)
        if root(node).op == "placeholder" and is_tensor(node) and node.meta["val"].device == HOST
    ]


def _insert(
    graph: fx.Graph, anchor: fx.Node, gradient: Gradient, read: list[fx.Node], is_first: bool
) -> None:
    arguments = (gradient.result, gradient.weight, read, is_first, gradient.device)
    with graph.inserting_after(anchor):
        node = graph.call_function(runtime.arrived, arguments)
    node.meta["val"] = None
    node.meta["partitioner_tag"] = "must_be_in_backward"
    node._rename(f"arrived_{gradient.result.name.removesuffix(MOVED)}{MOVED}")

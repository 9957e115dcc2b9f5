"""Say where a gradient is in host memory and its weight is read no more: its optimizer may step.

    before:  ...  wait_host(g, x)  ...  wait_device(w_2, w)  ...  settle;  return g
    after:   ...  wait_host(g, x)  ...  wait_device(w_2, w)  arrived(g, w)  ...  settle;  return g

``w`` is the graph's input and ``g`` what the graph returns for it. Behind the call nothing but the
end of the graph uses either, whichever the order of their transfers was. Only for weights that
the graph does nothing with but fetch, and for gradients that it does nothing with but return.

Whether a step then begins is decided when the graph runs
(`fxremat.runtime.gradients.optimizer_steps`). What the graph cannot know is whether two of its
inputs share memory, so the first call names them.
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


def gradients(joint: JointGraph) -> list[Gradient]:
    """The gradients of a joint graph with which an optimizer may step."""
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


def announce(graph: fx.Graph, found: Sequence[Gradient], backward: Sequence[fx.Node]) -> None:
    """Put the calls in; ``found`` and ``backward``, the nodes of that half, are of ``graph``."""
    position = {node: index for index, node in enumerate(backward)}
    last = {
        one: max(position.get(n, -1) for n in (one.result, *one.result.users, *one.weight.users))
        for one in found
        if one.result in position
    }
    in_order = sorted(last, key=last.__getitem__)
    if not in_order:
        return
    behind = backward[last[in_order[0]] + 1 :]
    read = (*(one.weight for one in in_order[1:]), *_inputs_read(behind, position))
    for one in reversed(in_order):  # the first of two at the same place comes first
        is_first = one is in_order[0]
        others = [node for node in dict.fromkeys(read) if is_first and node is not one.weight]
        _insert(graph, backward[last[one]], one, others, is_first)


def _inputs_read(nodes: Sequence[fx.Node], own: Container[fx.Node]) -> list[fx.Node]:
    """What ``nodes`` read of the graph's inputs on the host, themselves or as views."""
    outside = (n for node in nodes for n in node.all_input_nodes if n not in own)
    return [
        node
        for node in dict.fromkeys(outside)
        if root(node).op == "placeholder" and is_tensor(node) and node.meta["val"].device == HOST
    ]


def _insert(
    graph: fx.Graph, anchor: fx.Node, one: Gradient, read: list[fx.Node], is_first: bool
) -> None:
    arguments = (one.result, one.weight, read, is_first, one.device)
    with graph.inserting_after(anchor):
        node = graph.call_function(runtime.arrived, arguments)
    node.meta["val"] = None
    node.meta["partitioner_tag"] = "must_be_in_backward"
    node._rename(f"arrived_{one.result.name.removesuffix(MOVED)}{MOVED}")

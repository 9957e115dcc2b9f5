"""The user's MUST_RECOMPUTE, and graph inputs that the step overwrites.

`torch.utils.checkpoint` policies arrive as tags on nodes. An op tagged MUST_SAVE is never run
again. MUST_RECOMPUTE is obeyed here: the backward gets copies of the tagged nodes. From then on
only the backward needs these ops, so nothing of them is saved. PREFER_SAVE and PREFER_RECOMPUTE
leave the choice to the planner.

    a = f(x) [MUST_RECOMPUTE]; b = g(a) | a' = h(a, t)      a' = h(f'(x), t)

A graph input that the step overwrites (a running statistic, say) and whose old content the
backward reads is cloned in the forward; the backward reads the clone.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from fxremat.compat.joint_graph import user_tag
from fxremat.passes.base import Changed, Pass, in_place
from fxremat.passes.halves import RECOMPUTED
from fxremat.passes.joint_graph import (
    JointGraph,
    Role,
    is_mutating,
    is_repeatable,
    is_view,
    reached,
    read_joint_graph,
    root,
)
from fxremat.passes.nodes import add_call, copy_named


def _must_recompute(node: fx.Node, joint: JointGraph) -> bool:
    if node.op != "call_function" or joint.role[node] is not Role.FORWARD:
        return False
    if node.target is operator.getitem and not is_view(node):  # goes where its call goes
        return _must_recompute(node.all_input_nodes[0], joint)
    may_run_again = is_view(node) or is_repeatable(node, joint.mutated)
    return user_tag(node) == "MUST_RECOMPUTE" and may_run_again


def _tagged_behind(
    reader: fx.Node, joint: JointGraph, copied: dict[fx.Node, fx.Node]
) -> list[fx.Node]:
    """The tagged nodes, not ``copied`` yet, that ``reader`` reads, straight or through others."""

    def tagged(node: fx.Node) -> list[fx.Node]:
        read = node.all_input_nodes
        return [n for n in read if n not in copied and _must_recompute(n, joint)]

    return sorted(reached(tagged(reader), tagged))


def _readers(joint: JointGraph, source: fx.Node) -> list[fx.Node]:
    """What reads the input, or a view of it; not what writes into it."""
    return [
        node
        for node in joint.module.graph.nodes
        if any(root(i) is source for i in node.all_input_nodes) and not is_mutating(node)
    ]


def _is_early(reader: fx.Node, joint: JointGraph) -> bool:
    return joint.role.get(reader) is Role.FORWARD or reader.op == "output"


@dataclass(frozen=True)
class ObeyMustRecompute(Pass):
    """Obeys MUST_RECOMPUTE, in a joint graph whose forward has so many outputs."""

    name = "must recompute"
    num_forward_outputs: int

    def call(self, module: fx.GraphModule) -> Changed:
        """Give the backward its own copies of tagged nodes."""
        joint, graph = read_joint_graph(module, self.num_forward_outputs), module.graph
        copies: dict[fx.Node, fx.Node] = {}
        for reader in list(graph.nodes):
            if _is_early(reader, joint):
                continue
            for node in _tagged_behind(reader, joint, copies):
                with graph.inserting_before(reader):
                    name = node.name + RECOMPUTED
                    copies[node] = copy_named(graph, node, lambda n: copies.get(n, n), name)
                copies[node].meta.pop("recompute", None)
            for source in reader.all_input_nodes:
                if source in copies:
                    reader.replace_input_with(source, copies[source])
        return in_place(module, bool(copies))

    def ensures(self, module: fx.GraphModule) -> None:
        """No call of the backward reads a tagged node of the forward."""
        joint = read_joint_graph(module, self.num_forward_outputs)
        for reader in module.graph.nodes:
            tagged = [n for n in reader.all_input_nodes if _must_recompute(n, joint)]
            is_fine = _is_early(reader, joint) or not tagged
            self.demand(is_fine, f"{reader.name} reads {tagged} of the forward")


@dataclass(frozen=True)
class ProtectMutatedInputs(Pass):
    """Clones overwritten inputs, in a joint graph whose forward has so many outputs."""

    name = "mutated inputs"
    num_forward_outputs: int

    def call(self, module: fx.GraphModule) -> Changed:
        """Let the backward read a clone of what the step overwrites."""
        joint = read_joint_graph(module, self.num_forward_outputs)
        graph, changed = module.graph, False
        for source in (node for node in joint.primals if node in joint.mutated):
            if all(_is_early(reader, joint) for reader in _readers(joint, source)):
                continue
            last_input = [n for n in graph.nodes if n.op == "placeholder"][-1]
            with graph.inserting_after(last_input):
                clone = add_call(graph, torch.ops.aten.clone.default, (source,), source)
            clone.meta["partitioner_tag"] = "must_be_in_forward"
            for node in list(source.users):
                if node is not clone and node.op != "output" and not is_mutating(node):
                    node.replace_input_with(source, clone)
            changed = True
        return in_place(module, changed)

    def ensures(self, module: fx.GraphModule) -> None:
        """The backward reads no input that the step overwrites."""
        joint = read_joint_graph(module, self.num_forward_outputs)
        for node in joint.mutated:
            late = [n.name for n in _readers(joint, node) if not _is_early(n, joint)]
            self.demand(not late, f"{late} of the backward read {node.name}")

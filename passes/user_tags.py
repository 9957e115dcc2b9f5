"""The user's MUST_RECOMPUTE, and graph inputs that the step overwrites.

`torch.utils.checkpoint` policies arrive as tags on nodes. MUST_SAVE makes an op one that is
never run again. MUST_RECOMPUTE is obeyed here: the backward gets copies of the tagged nodes,
which from then on are ops that only the backward needs, so nothing of them is saved.
PREFER_SAVE and PREFER_RECOMPUTE leave the choice to the planner.

    a = f(x) [MUST_RECOMPUTE]; b = g(a) | a' = h(a, t)      a' = h(f'(x), t)

A graph input that the step overwrites (a running statistic, say) and whose old content the
backward reads is cloned in the forward; the backward reads the clone.
"""

from __future__ import annotations

import torch
from torch import fx

from fxremat import compat
from fxremat.passes.joint_graph import (
    JointGraph,
    Role,
    is_mutating,
    is_repeatable,
    is_view,
    root,
)


def _must_recompute(node: fx.Node, joint: JointGraph) -> bool:
    return (
        joint.role[node] is Role.FORWARD
        and compat.user_tag(node) == "MUST_RECOMPUTE"
        and (is_view(node) or is_repeatable(node, joint.mutated))
    )


def obey_must_recompute(joint: JointGraph) -> bool:
    """Give the backward its own copies of nodes tagged MUST_RECOMPUTE; True if there are any."""
    graph = joint.module.graph
    copies: dict[fx.Node, fx.Node] = {}

    def look(node: fx.Node) -> fx.Node:
        if node.op != "call_function" or not _must_recompute(node, joint):
            return node
        if node not in copies:
            for source in node.all_input_nodes:
                look(source)
            with graph.inserting_before(first_reader):
                copies[node] = graph.node_copy(node, look)
            copies[node].meta = {k: v for k, v in node.meta.items() if k != "recompute"}
        return copies[node]

    for node in list(graph.nodes):
        if joint.role.get(node) in (Role.BACKWARD, Role.LAZY):
            first_reader = node
            for source in node.all_input_nodes:
                new = look(source)
                if new is not source:
                    node.replace_input_with(source, new)
    return bool(copies)


def protect_mutated_inputs(joint: JointGraph) -> bool:
    """Let the backward read a clone of what the step overwrites; True if anything changed."""
    graph = joint.module.graph
    changed = False
    for source in joint.mutated:
        readers = [
            n
            for n in graph.nodes
            if source in n.all_input_nodes or any(root(i) is source for i in n.all_input_nodes)
        ]
        if all(joint.role.get(n) is Role.FORWARD or n.op == "output" for n in readers):
            continue
        last_input = [n for n in graph.nodes if n.op == "placeholder"][-1]
        with graph.inserting_after(last_input):
            clone = graph.call_function(torch.ops.aten.clone.default, (source,))
        clone.meta = {k: v for k, v in source.meta.items() if k not in ("desc",)}
        clone.meta["val"] = source.meta["val"].clone()
        for node in list(source.users):
            if node is not clone and node.op != "output" and not is_mutating(node):
                node.replace_input_with(source, clone)
        changed = True
    return changed

"""Ops that write over an operand that dies in them.

    s = addmm(m, a, b)                     addmm_into(m, a, b)
    t = relu(s)                   becomes  t = relu(m)

Inductor writes its loops over what they read for the last time, but gives every library call new
memory. `runtime.kernels.IN_PLACE` lists the calls with a form that changes their first argument
instead. Whoever read the result reads a new view of that storage from then on.

An operand may be written over where

* it is the result of a pure call, contiguous, all of its storage, with the size and dtype of
  the result: no graph input, nothing that comes from the host, no expanded or shifted view;
* nobody reads it, or a view of it, at or after the call: results of the graph are read at the end;
* the forward does not save it for the backward: autograd owns what is saved, and may run the
  backward twice.

Before planning, `overwritable` says which pairs are possible. After planning, `rewrite` takes the
pairs that hold in the planned graph, where every run of an op is a node of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from fxremat.compat.configuration import OpOverload
from fxremat.compat.joint_graph import copy_module, must_be_in_forward
from fxremat.passes.base import Changed, Pass
from fxremat.passes.halves import Rewritten
from fxremat.passes.joint_graph import JointGraph, computed_from, is_tensor, root
from fxremat.passes.materialisation import users_through_views
from fxremat.passes.nodes import covers_storage, fake
from fxremat.runtime import kernels

INTO = "_into"
_OWN_SHAPE = frozenset({kernels.addmm_into, kernels.baddbmm_into})
"""These take an operand of any shape."""
_FRESH = frozenset({"aten", "prims", "fxremat_kernels"})


def operand_of(node: fx.Node) -> fx.Node | None:
    """The owner of the storage that the call could write over, by sizes and dtypes alone."""
    if node.op != "call_function" or node.target not in kernels.IN_PLACE or node.kwargs:
        return None
    given = node.args[0]
    if not isinstance(given, fx.Node) or not is_tensor(given) or not is_tensor(node):
        return None
    owner = root(given)
    alone = all(root(n) is not owner for n in _tensors(node.args[1:]))
    shaped = owner is given or kernels.IN_PLACE[node.target] in _OWN_SHAPE
    fits = _is_fresh(owner) and covers_storage(given) and _matches(given, node)
    return owner if alone and shaped and fits else None


def _tensors(args: Any) -> list[fx.Node]:
    return [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, fx.Node)]


def _is_fresh(owner: fx.Node) -> bool:
    """Whether the node has new memory that torch gave it; constants live in loops alone."""
    target = owner.target
    if owner.op != "call_function" or not isinstance(target, OpOverload):
        return False
    known = target.namespace in _FRESH or target in kernels.IN_PLACE
    return known and is_tensor(owner) and any(map(is_tensor, owner.all_input_nodes))


def _matches(given: fx.Node, node: fx.Node) -> bool:
    one, other = fake(given), fake(node)
    same = one.dtype == other.dtype and one.device == other.device and one.numel() > 0
    sizes = tuple(other.shape)
    return same and all(type(n) is int for n in sizes) and tuple(one.shape) == sizes


def overwritable(joint: JointGraph) -> dict[fx.Node, fx.Node]:
    """Calls of the joint graph, each with the owner of the storage that it could write over.

    It may do so where the plan lets that owner die in the call. Owners that live to the end, and
    those in the other half of the graph, are left out.
    """
    results, found = joint.result_roots(), {}
    for node in joint.module.graph.nodes:
        owner = operand_of(node)
        lives_on = owner is None or owner in results or owner in joint.mutated
        if owner is not None and not lives_on and joint.in_one_half(owner, node):
            found[node] = owner
    return found


class _InPlaceWriter:
    """Rewrites a graph of its own; ``kept`` are owners that are saved for the backward."""

    def __init__(self, graph: fx.Graph, kept: set[fx.Node], forward: set[fx.Node]) -> None:
        self.graph, self.kept, self.forward = graph, kept, forward
        self.replacements: dict[fx.Node, fx.Node] = {}

    def may_write(self, node: fx.Node, owner: fx.Node) -> bool:
        if owner in self.kept or (node in self.forward) != (owner in self.forward):
            return False
        return all(user is node or user < node for user in users_through_views(owner))

    def write(self, node: fx.Node, owner: fx.Node) -> None:
        half = "forward" if node in self.forward else "backward"
        with self.graph.inserting_before(node):
            target = kernels.IN_PLACE[node.target]  # type: ignore[index]
            call = self.graph.call_function(target, (owner, *node.args[1:]))
            value = owner.meta["val"] if target._schema.returns else None
            call.meta = {**node.meta, "partitioner_tag": f"must_be_in_{half}", "val": value}
            seen = self.same_view(node.args[0], owner)  # type: ignore[arg-type]
        node.replace_all_uses_with(seen)
        self.replacements[node] = seen
        self.graph.erase_node(node)
        call._rename(node.name + INTO)

    def same_view(self, given: fx.Node, owner: fx.Node) -> fx.Node:
        """A new view of the owner's storage like ``given``, at the point of insertion."""
        if given is owner:
            return owner
        base = self.same_view(given.all_input_nodes[0], owner)
        new = self.graph.node_copy(given, lambda n: base)
        new.meta = dict(given.meta)
        if owner in self.forward:
            self.forward.add(new)
        return new


def rewrite(rewritten: Rewritten, num_forward_outputs: int) -> Rewritten:
    """Write over dead operands in a copy of a planned joint graph; the same if there are none.

    It comes before the graph is cut, because it may give other nodes to what the forward saves.
    """
    env: dict[fx.Node, fx.Node] = {}
    module = copy_module(rewritten.module, env)
    graph = module.graph
    results: Sequence[Any] = graph.output_node().args[0]  # type: ignore[assignment]
    saved = [env[n] for n in rewritten.saved]
    ends = [n for n in results[:num_forward_outputs] if isinstance(n, fx.Node)]
    ends += [*saved, *filter(must_be_in_forward, graph.nodes)]
    writer = _InPlaceWriter(graph, set(map(root, saved)), computed_from(ends))
    for node in list(graph.nodes):
        owner = operand_of(node)
        if owner is not None and writer.may_write(node, owner):
            writer.write(node, owner)
    if not writer.replacements:
        return rewritten
    module.recompile()
    module.meta = dict(rewritten.module.meta)
    return Rewritten(module, tuple(writer.replacements.get(n, n) for n in saved))


@dataclass(frozen=True)
class WriteInPlace(Pass):
    """Writes over dead operands of the ``planned`` graph; ``Changed.data`` is the `Rewritten`."""

    name = "in place"
    planned: Rewritten
    num_forward_outputs: int

    def requires(self, module: fx.GraphModule) -> None:
        self.demand(module is self.planned.module, "the graph is not the one that was planned")

    def call(self, module: fx.GraphModule) -> Changed:
        found = rewrite(self.planned, self.num_forward_outputs)
        return Changed(found.module, found is not self.planned, found)

    def ensures(self, module: fx.GraphModule) -> None:
        """No input of the graph is written over."""
        module.graph.lint()
        calls = set(kernels.IN_PLACE.values())
        for node in module.graph.nodes:
            if node.name.endswith(INTO) and node.target in calls:
                over = root(node.all_input_nodes[0])
                self.demand(over.op == "call_function", f"{node.name} writes over {over.name}")

"""Reading the joint graph: when each node is computed, and which storage it looks into.

Every node has one of three roles:

* FORWARD  - needed for an output of the forward or an assertion, or not allowed to leave it;
* BACKWARD - depends on a tangent, or belongs to the backward by its tag;
* LAZY     - needed by the backward alone, but depends on no tangent (derivative factors,
  transposed weights): it runs in the backward, next to its first use. That keeps peaks low.

A *root* is the node that owns the storage another node looks into: views, and the items of
an op with several results, are resolved to it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any, TypeVar

import torch
from torch import fx

from fxremat.compat.configuration import OpOverload
from fxremat.compat.joint_graph import (
    REPEATABLE,
    is_tangent,
    must_be_in_backward,
    must_be_in_forward,
    mutated_input_of,
    prepare_joint_graph,
    user_tag,
)
from fxremat.compat.ranks import (
    is_collective,
    is_wait,
    moves_between_ranks,
    sums_over_ranks,
)
from fxremat.passes.base import Changed, Pass
from fxremat.runtime import kernels

T = TypeVar("T")
IN_FORWARD = "fxremat_in_forward"
"""In the ``meta`` of a node that a variant put into the forward, for the backward to read."""

STORED = "_stored"
"""In the name of an elementwise node that a variant wants in memory, whatever its readers cost."""


class Role(Enum):
    """When a node of the joint graph is computed."""

    FORWARD = "forward"
    BACKWARD = "backward"
    LAZY = "lazy"


@dataclass(frozen=True)
class JointGraph:
    """The joint graph with the role of every node and its inputs and outputs sorted out."""

    module: fx.GraphModule
    role: dict[fx.Node, Role]
    primals: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    results: tuple[Any, ...]
    num_forward_outputs: int
    mutated: frozenset[fx.Node]
    notes: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What several rules find out about the graph as it is, by the name of whoever notes it."""

    @property
    def forward_outputs(self) -> tuple[fx.Node, ...]:
        return _nodes(self.results[: self.num_forward_outputs])

    @property
    def backward_outputs(self) -> tuple[fx.Node, ...]:
        """The nodes among the backward's results; inputs without gradient have none."""
        return _nodes(self.results[self.num_forward_outputs :])

    def in_one_half(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether both are computed in the forward, or both in the backward."""
        return (self.role[one] is Role.FORWARD) == (self.role[other] is Role.FORWARD)

    def result_roots(self) -> set[fx.Node]:
        """Storages that the graph returns: they live to its end anyway."""
        return set(map(root, _nodes(self.results)))


def _nodes(results: tuple[Any, ...]) -> tuple[fx.Node, ...]:
    return tuple(n for n in results if isinstance(n, fx.Node))


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_multi_output(node: fx.Node) -> bool:
    """Whether the node's result is a tuple or list of tensors, taken apart by getitem."""
    return isinstance(node.meta.get("val"), (tuple, list))


def is_view(node: fx.Node) -> bool:
    """Whether a call returns a view of its first input's storage, and no bytes of its own."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:  # of split, unbind ...: a tuple of views
        return is_view(node.all_input_nodes[0])
    return _gives_view(node.target) and bool(node.all_input_nodes)


@cache
def _gives_view(target: Any) -> bool:
    if target in _VIEWS_WITHOUT_ALIAS:
        return True
    if not isinstance(target, OpOverload):
        return False
    returns = target._schema.returns
    is_mutating = target._schema.is_mutable
    return len(returns) == 1 and returns[0].alias_info is not None and not is_mutating


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers.

    Fused attention is tagged random for its dropout; with probability 0 it draws nothing.
    """
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if "scaled_dot_product" not in str(target):
        return True
    given = dict(zip((one.name for one in target._schema.arguments), node.args, strict=False))
    return (given | node.kwargs).get("dropout_p") not in (None, 0, 0.0)


def is_repeatable(node: fx.Node, mutated: frozenset[fx.Node]) -> bool:
    """Whether running ``node`` again, later, gives the same result and does nothing else.

    ``mutated`` are the graph inputs that the step writes into: read again, they would differ.
    Not repeatable are custom ops unless they are marked, what the user told to save, and calls
    whose result has a size that is known only when they have run. Of collectives those are that
    only move what ranks have; sums over ranks only where the user's checkpoint has them run again.
    """
    target = node.target
    if target is operator.getitem:
        return True
    known = isinstance(target, OpOverload) and target.namespace in _PURE_NAMESPACES
    known = known or node.meta.get(REPEATABLE, False)
    if not known and not _is_repeatable_collective(node):
        return False
    if is_mutating(node) or is_random(node) or is_run_for_effect(node):
        return False
    if node.meta.get("unbacked_bindings") or must_be_in_forward(node) or _is_told_to_save(node):
        return False
    return not any(root(i) in mutated for i in node.all_input_nodes)


_PURE_NAMESPACES = frozenset({"aten", "prims", kernels.NAMESPACE})


def _is_repeatable_collective(node: fx.Node) -> bool:
    """All ranks run it again, at the same place, for they have one graph and one plan."""
    checkpointed = user_tag(node) in ("MUST_RECOMPUTE", "PREFER_RECOMPUTE")
    return is_wait(node) or moves_between_ranks(node) or (sums_over_ranks(node) and checkpointed)


def _is_told_to_save(node: fx.Node) -> bool:
    """Saving a view is saving what it looks into, and running it again costs nothing."""
    told = user_tag(node) == "MUST_SAVE" or node.meta.get("has_backward_hook")
    return bool(told) and not is_view(node)


_ATEN = torch.ops.aten
_VIEWS_WITHOUT_ALIAS = frozenset({
    _ATEN._unsafe_view.default, _ATEN.reshape.default, _ATEN.lift_fresh_copy.default,
    _ATEN.unsafe_split.Tensor, _ATEN.unsafe_split_with_sizes.default,
})  # fmt: skip


def waits_for(node: fx.Node) -> tuple[fx.Node, ...]:
    """What waits for the results of a collective, if nothing else reads these; else nothing."""
    if not is_collective(node) or is_wait(node):
        return ()
    items = [user for user in node.users if user.target is operator.getitem]
    started = items if is_multi_output(node) else [node]
    readers = [list(one.users) for one in started]
    if any(len(each) != 1 or not is_wait(each[0]) for each in readers):
        return ()
    return tuple(each[0] for each in readers)


def is_mutating(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and target._schema.is_mutable


def is_fetch(node: fx.Node) -> bool:
    """Whether the node brings a graph input that lives in host memory to the device."""
    is_call = str(node.target) == "fxremat.fetch.default"
    return is_call and node.all_input_nodes[0].op == "placeholder"


def is_put(node: fx.Node) -> bool:
    """Whether the node takes a result of the graph to host memory."""
    return str(node.target) == "fxremat.put.default"


def root(node: fx.Node) -> fx.Node:
    """The node that owns the storage which ``node`` looks into."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_run_for_effect(node: fx.Node) -> bool:
    """Whether a call has no tensor to give and is there for what it does (an assertion)."""
    gives = is_tensor(node) or is_multi_output(node)
    return node.op == "call_function" and not gives and bool(node.is_impure())


def reached(starts: Iterable[T], onward: Callable[[T], Iterable[T]]) -> set[T]:
    """What (nodes, say) is reached from some, themselves included, step by step."""
    found: set[T] = set()
    stack = list(starts)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(onward(node))
    return found


def computed_from(ends: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes, and all that they are computed from."""
    return reached(ends, lambda node: node.all_input_nodes)


def backward_closure(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on a tangent, or whose tag puts them into the backward."""
    starts = [n for n in graph.nodes if is_tangent(n) or must_be_in_backward(n)]
    return reached(starts, lambda node: node.users) - {graph.output_node()}


def _mutated_inputs(graph: fx.Graph, descriptions: list[Any]) -> set[fx.Node]:
    """Graph inputs whose storage the step writes into, inside the graph or after it."""
    found: set[fx.Node | None] = {
        root(node.args[0])
        for node in graph.nodes
        if node.op == "call_function" and is_mutating(node) and isinstance(node.args[0], fx.Node)
    }
    inputs = {node for node in graph.nodes if node.op == "placeholder"}
    by_desc = {node.meta["desc"]: node for node in inputs if node.meta.get("desc") is not None}
    found |= {by_desc.get(mutated_input_of(description)) for description in descriptions}
    return inputs & found


def read_joint_graph(module: fx.GraphModule, num_fwd_outputs: int) -> JointGraph:
    graph = module.graph
    output = graph.output_node()
    results = tuple(output.args[0])  # type: ignore[arg-type]
    descriptions = list(output.meta.get("desc") or [])
    in_backward = backward_closure(graph)
    early = [n for n in graph.nodes if must_be_in_forward(n) or IN_FORWARD in n.meta]
    effects = filter(is_run_for_effect, graph.nodes)
    ends = {*_nodes(results[:num_fwd_outputs]), *effects} - in_backward
    in_forward = computed_from([*early, *ends])
    role: dict[fx.Node, Role] = {}
    for node in graph.nodes:
        if node in in_backward:
            role[node] = Role.BACKWARD
        elif node.target is operator.getitem:  # an item is there as soon as its call has run
            role[node] = role[node.all_input_nodes[0]]
        elif node in in_forward or node.op in ("placeholder", "get_attr"):
            role[node] = Role.FORWARD
        else:
            role[node] = Role.LAZY
    placeholders = list(graph.find_nodes(op="placeholder"))
    return JointGraph(
        module=module,
        role=role,
        primals=tuple(n for n in placeholders if not is_tangent(n)),
        tangents=tuple(n for n in placeholders if is_tangent(n)),
        results=results,
        num_forward_outputs=num_fwd_outputs,
        mutated=frozenset(_mutated_inputs(graph, descriptions)),
    )


@dataclass(frozen=True)
class CleanUp(Pass):
    """Takes dead code out, merges common subexpressions, and obeys the user's tags on them.

    It comes first: merging would undo the copies that later passes make.
    """

    name = "clean up"

    def call(self, module: fx.GraphModule) -> Changed:
        before = len(module.graph.nodes)
        prepare_joint_graph(module)
        return Changed(module, len(module.graph.nodes) != before)

    def ensures(self, module: fx.GraphModule) -> None:
        module.graph.lint()

"""What AOTAutograd and torch's partitioner know of the nodes of a joint graph."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
import torch._functorch.partitioners as _partitioners
from torch import fx, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import is_sym_node

from fxremat.compat.configuration import functorch_config

_ALONE = "fxremat_alone"
"""While equal calls are merged: the argument that tells a call from all others."""


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder of the joint graph is an incoming gradient."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def must_be_in_forward(node: fx.Node) -> bool:
    """Whether a node may not leave the forward (mutations without a backward tag)."""
    return bool(_partitioners._must_be_in_forward(node))


def must_be_in_backward(node: fx.Node) -> bool:
    """Whether a node's tag puts it into the backward."""
    return bool(_partitioners._must_be_in_backward(node))


def mutated_input_of(description: object) -> object | None:
    """The description of the input that an output of the graph is the new content of."""
    return getattr(description, "mutated_input", None)


def user_tag(node: fx.Node) -> str | None:
    """The name of the user's torch.utils.checkpoint policy on a node, None without one."""
    tag = node.meta.get("recompute")
    return getattr(tag, "name", None)


def without_user_tags(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a joint graph whose nodes have no `torch.utils.checkpoint` policies."""
    copy = copy_module(module)
    for node in copy.graph.nodes:
        node.meta = {k: v for k, v in node.meta.items() if k not in ("recompute", "ac_graph_id")}
    return copy


def prepare_joint_graph(module: fx.GraphModule) -> None:
    """Dead code out, common subexpressions merged, the user's checkpoint tags made consistent.

    Merging must come before recompute copies are made: afterwards it would undo them.
    """
    module.graph.eliminate_dead_code()
    if functorch_config.cse:
        with _told_apart(module):
            module.graph = fx_graph_cse(module.graph)
    if _partitioners.has_recomputable_ops(module):
        _partitioners.cleanup_recompute_tags(module, is_default_partition=False)
    _partitioners.force_save_effectful_ops(module)
    _partitioners.force_save_bw_mutation_src(module)
    module.recompile()


@contextmanager
def _told_apart(module: fx.GraphModule) -> Iterator[None]:
    """No two random calls are equal: torch's list of those that it does not merge has gaps."""
    for node in module.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            node.update_kwarg(_ALONE, node.name)
    yield
    for node in module.graph.nodes:
        if _ALONE in node.kwargs:
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != _ALONE}


def is_symbol(node: fx.Node) -> bool:
    """Whether a node is a symbolic number (or a number computed from one)."""
    return is_sym_node(node)


def is_opaque(node: fx.Node) -> bool:
    """Whether a node is an object that is neither tensor nor number (torch 2.13 and later)."""
    test = getattr(_partitioners, "is_opaque_node", None)
    return bool(test(node)) if test is not None else False


def input_index(node: fx.Node) -> int | None:
    """Which argument of the compiled graph an input of the joint graph is, if it is one as such."""
    description = node.meta.get("desc")
    plain = type(description).__name__ == "PlainAOTInput"
    return int(description.idx) if plain else None  # type: ignore[union-attr]


def module_of(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph with the attributes of ``root``; its Python code is written once it is called.

    Most modules of a compilation are never called, and each would write its code several times.
    """
    return _LazyGraphModule(root, graph)


REPEATABLE = "fxremat_repeatable"
"""In the ``meta`` of a node that is not torch's: this call may run again."""


def mark_repeatable(graph: fx.Graph, names: Collection[str]) -> None:
    """Mark the calls of these ops, by names as "library::op"."""
    for node in graph.nodes if names else ():
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in names:
            node.meta[REPEATABLE] = True


def is_pure_attention(node: fx.Node) -> bool:
    """Whether it is FlexAttention, and what it computes inside draws nothing and writes nowhere."""
    if node.target is not torch.ops.higher_order.flex_attention:
        return False
    root = node.graph.owning_module
    inside = [getattr(root, str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
    graphs = [one.graph for one in inside if isinstance(one, fx.GraphModule)]
    return all(_is_pure(one) for graph in graphs for one in graph.nodes)


def _is_pure(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return node.op != "call_function" or target is operator.getitem
    random = torch.Tag.nondeterministic_seeded in target.tags
    return target.namespace in ("aten", "prims") and not (random or target._schema.is_mutable)


def copy_module(
    module: fx.GraphModule, copies: dict[fx.Node, fx.Node] | None = None
) -> fx.GraphModule:
    """A copy whose nodes have their own ``meta``; ``copies`` is told which is whose."""
    graph, copies = fx.Graph(), {} if copies is None else copies
    result = graph.output(graph.graph_copy(module.graph, copies))
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    result.meta = dict(module.graph.output_node().meta)
    return module_of(module, graph)

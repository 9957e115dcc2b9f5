"""Joint graphs: what torch knows of their nodes, and cutting them in a forward and a backward."""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast
from unittest import mock

import torch
import torch._functorch.partitioners as _partitioners
from torch import fx, nn
from torch._functorch import compile_utils
from torch._functorch._aot_autograd import graph_compile
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.utils._ordered_set import OrderedSet

from fxremat.compat.configuration import functorch_config
from fxremat.compat.tensors import storage_key


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
        # torch's list of calls that draw numbers, and so are no equals, has gaps
        calls = [n.target for n in module.graph.nodes if _draws(n.target)]
        random = [*compile_utils.rand_ops, *(call.overloadpacket for call in calls)]
        with mock.patch.object(compile_utils, "rand_ops", random):
            module.graph = compile_utils.fx_graph_cse(module.graph)
    if _partitioners.has_recomputable_ops(module):
        _partitioners.cleanup_recompute_tags(module, is_default_partition=False)
    _partitioners.force_save_effectful_ops(module)
    _partitioners.force_save_bw_mutation_src(module)
    module.recompile()


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
    changes = _draws(target) or target._schema.is_mutable
    return target.namespace in ("aten", "prims") and not changes


def _draws(target: object) -> bool:
    """Whether a call draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


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


def copy_as_given(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph that Dynamo gave, with where its inputs come from.

    AOTAutograd takes inputs for parameters by that, and its cache knows the graph by that.
    """
    copies = dict[fx.Node, fx.Node]()
    copied = copy_module(gm, copies)
    copied.meta = dict(gm.meta)
    for node in gm.graph.find_nodes(op="placeholder"):
        if hasattr(node, _SOURCE):
            setattr(copies[node], _SOURCE, getattr(node, _SOURCE))
    if hasattr(gm, _SOURCES):
        setattr(copied, _SOURCES, getattr(gm, _SOURCES))
    return copied


_SOURCE, _SOURCES = "_dynamo_source", "_param_name_to_source"


_DONATED = "_donated"
_is_opaque: Any = getattr(_partitioners, "is_opaque_node", lambda node: False)
"""Whether a node is an object that is neither tensor nor number (torch 2.13 and later)."""
_EXTRACT_ARGUMENTS = frozenset(inspect.signature(_partitioners._extract_fwd_bwd_modules).parameters)


def torch_partition(
    module: fx.GraphModule, joint_inputs: Any, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward that plain ``torch.compile`` would make of a joint graph.

    The arguments are those that Inductor gives to a partitioner; ``activation_memory_budget`` and
    the other options are as configured where it is called. Unlike torch's own function it leaves
    ``module`` as it was. Both halves keep the names of the joint graph's nodes, and the user's tags
    alone: torch adds some of its own.
    """
    halves = _partitioners.min_cut_rematerialization_partition(
        copy_module(module), joint_inputs, **kwargs
    )
    tags = {node.name: node.meta.get("recompute") for node in module.graph.nodes}
    for node in (node for half in halves for node in half.graph.nodes):
        if node.meta.get("recompute") is not None and tags.get(node.name, node) is None:
            del node.meta["recompute"]
    return halves


def extract_forward_backward(
    module: fx.GraphModule,
    saved: list[fx.Node],
    *,
    num_fwd_outputs: int,
    static_inputs: Sequence[fx.Node],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph at exactly the nodes ``saved``, which must cover the backward's needs."""
    symbols = [n for n in saved if is_sym_node(n)]
    opaque = [n for n in saved if n not in symbols and _is_opaque(n)]
    tensors = [n for n in saved if n not in symbols and n not in opaque]
    extra = [opaque] if "saved_opaque_nodes" in _EXTRACT_ARGUMENTS else []
    forward, backward = _partitioners._extract_fwd_bwd_modules(
        module,
        tensors,
        symbols,
        *extra,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_nodes=OrderedSet(static_inputs),
    )
    forward = _partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    backward = _partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True)
    used = {node.name for node in module.graph.nodes if node.users}

    # Random calls that torch repeats in the other half go: nothing reads them there. Attention
    # counts as random on CUDA. A call that nothing ever read stays: it draws numbers.
    def stays(node: fx.Node) -> bool:
        return bool(node.is_impure(impure_random=node.name not in used))

    for half in (forward, backward):
        half.graph.eliminate_dead_code(is_impure_node=stays)
    return forward, backward


def donatable(
    forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int
) -> tuple[str, ...]:
    """The names of saved tensors that the backward may write over, none where the user forbids it.

    They are those that torch would donate, less those that share memory with another saved one.
    """
    changes: Any = cast("Any", graph_compile).contain_metadata_mutation_ops
    if not functorch_config.donated_buffer or changes(forward) or changes(backward):
        return ()
    results: Any = forward.graph.output_node().args[0]
    saved = [node for node in results[num_fwd_outputs:] if _has_storage(node)]
    inputs = [node for node in forward.graph.nodes if node.op == "placeholder"]
    ends: Any = backward.graph.output_node().args[0]
    seen = [_value(node) for node in (*inputs, *results[:num_fwd_outputs], *ends)]
    taken = {storage_key(value) for value in seen if isinstance(value, torch.Tensor)}
    sharers = Counter(storage_key(_value(node)) for node in saved)
    keys = {node.name: storage_key(_value(node)) for node in saved}
    return tuple(name for name, key in keys.items() if key not in taken and sharers[key] == 1)


def donate(backward: fx.GraphModule, names: Collection[str]) -> None:
    """Mark inputs of a backward, so that its own results may be written over them.

    Plain ``torch.compile`` donates all that it can, and for that it refuses
    ``backward(retain_graph=True)``: the gradient of the logits is written over the logits. Of a
    graph compiled by us only what is marked here, in its name, is donated. Inductor's caches tell
    graphs apart by their text, which holds these names, but not by what is donated.
    """
    for node in backward.graph.nodes:
        if node.op == "placeholder" and node.name in names:
            node._rename(node.name + _DONATED)
            node.target = node.name
    backward.recompile()


def name_in_forward(node: fx.Node) -> str:
    """What an input of a backward is called in the forward that saved it."""
    return node.name.removesuffix(_DONATED)


def donated_inputs(backward: fx.GraphModule) -> list[int]:
    """The positions of the inputs that are marked."""
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    return [index for index, node in enumerate(placeholders) if node.name.endswith(_DONATED)]


def only_marked_buffers_donated() -> AbstractContextManager[object]:
    """What is compiled inside donates the marked inputs of its backward, and nothing else.

    The option of torch is no help: it is asked again when the backward runs, and a graph of which
    nothing was noted then passes for one that donates.
    """
    found = "collect_bw_donated_buffer_idxs"
    return mock.patch.object(graph_compile, found, lambda _, backward, __: donated_inputs(backward))


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _has_storage(node: Any) -> bool:
    value = _value(node)
    return isinstance(value, torch.Tensor) and value.layout is torch.strided

"""Cutting a joint graph into a forward and a backward: at given nodes, or as torch would.

Saved tensors may be donated: the backward writes its own results to their memory. Plain
``torch.compile`` donates all that it can, and for that it refuses ``backward(retain_graph=True)``:
the gradient of the logits is written over the logits. Of a graph compiled by us only those inputs
of the backward are donated that `donate` has marked in their names. Inductor's caches tell graphs
apart by their text, which holds these names, but not by what is donated.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch._functorch.partitioners as _partitioners
from torch import fx

from fxremat.compat.configuration import functorch_config
from fxremat.compat.joint_graph import copy_module, is_opaque, is_symbol, is_tangent
from fxremat.compat.tensors import storage_key

_DONATED = "_donated"
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


def saved_names(backward: fx.GraphModule) -> tuple[str, ...]:
    """What a backward reads of its forward, by the names in the joint graph, in order."""
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    return tuple(name_in_forward(node) for node in placeholders if not is_tangent(node))


def extract_forward_backward(
    module: fx.GraphModule,
    saved: list[fx.Node],
    *,
    num_fwd_outputs: int,
    static_inputs: Sequence[fx.Node],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph at exactly the nodes ``saved``, which must cover the backward's needs."""
    from torch.utils._ordered_set import OrderedSet

    tensors = [n for n in saved if not is_symbol(n) and not is_opaque(n)]
    symbols = [n for n in saved if is_symbol(n)]
    opaque = [n for n in saved if not is_symbol(n) and is_opaque(n)]
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
    for half in (forward, backward):
        _drop_repeated(half, used)
    return forward, backward


def _drop_repeated(half: fx.GraphModule, used: Collection[str]) -> None:
    """Drop random calls that torch repeats in the other half: nothing reads them there.

    Attention counts as random on CUDA. A call that nothing ever read stays: it draws numbers.
    """

    def stays(node: fx.Node) -> bool:
        return bool(node.is_impure(impure_random=node.name not in used))

    half.graph.eliminate_dead_code(is_impure_node=stays)


def donatable(
    forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int
) -> tuple[str, ...]:
    """The names of saved tensors that the backward may write over, none where the user forbids it.

    They are those that torch would donate, less those that share memory with another saved one.
    """
    from torch._functorch._aot_autograd import graph_compile

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
    """Mark inputs of a backward, so that its own results may be written over them."""
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


@contextmanager
def only_marked_buffers_donated() -> Iterator[None]:
    """What is compiled inside donates the marked inputs of its backward, and nothing else.

    The option of torch is no help: it is asked again when the backward runs, and a graph of which
    nothing was noted then passes for one that donates.
    """
    from torch._functorch._aot_autograd import graph_compile as compiling

    graph_compile: Any = compiling
    found = graph_compile.collect_bw_donated_buffer_idxs
    graph_compile.collect_bw_donated_buffer_idxs = lambda _, backward, __: donated_inputs(backward)
    try:
        yield
    finally:
        graph_compile.collect_bw_donated_buffer_idxs = found


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _has_storage(node: Any) -> bool:
    value = _value(node)
    return isinstance(value, torch.Tensor) and value.layout is torch.strided

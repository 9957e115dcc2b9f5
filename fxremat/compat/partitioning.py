"""Cutting a joint graph into a forward and a backward: at given nodes, or as torch would."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch._functorch.partitioners as _partitioners
from torch import fx

from fxremat.compat.donation import name_in_forward
from fxremat.compat.joint_graph import copy_module, is_opaque, is_symbol, is_tangent

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
    thread = getattr(_partitioners, "thread_graphsafe_rng_from_hops", None)
    if thread is not None:
        forward = thread(forward, is_backward=False)
        backward = thread(backward, is_backward=True)
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

"""Donated buffers: saved tensors whose memory the backward may write its own results to.

Plain ``torch.compile`` donates all that it can: the gradient of the logits is written over the
logits. For that it refuses ``backward(retain_graph=True)``. Of a graph compiled by us only those
inputs of the backward are donated that `donate` has marked in their names. Inductor's caches tell
graphs apart by their text, which holds these names, but not by what is donated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import fx

from fxremat.compat.configuration import functorch_config
from fxremat.compat.tensors import storage_key

_MARK = "_donated"


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
            node._rename(node.name + _MARK)
            node.target = node.name
    backward.recompile()


def name_in_forward(node: fx.Node) -> str:
    """What an input of a backward is called in the forward that saved it."""
    return node.name.removesuffix(_MARK)


def donated_inputs(backward: fx.GraphModule) -> list[int]:
    """The positions of the inputs that are marked."""
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    return [index for index, node in enumerate(placeholders) if node.name.endswith(_MARK)]


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

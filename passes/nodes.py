"""Helpers for single FX nodes: read a call and its result, add a call, look at its storage."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from fxremat.compat.configuration import OpOverload
from fxremat.compat.tensors import fake_mode_of
from fxremat.passes.joint_graph import is_tensor, is_view, root

Shape = tuple[int, ...]
Add = Callable[..., fx.Node]
"""It adds a call, given its target and arguments, at a place of its own choice."""
Lookup = Callable[[fx.Node], fx.Node]


def shape_of(node: fx.Node) -> Shape | None:
    """The shape in numbers; None for what is no tensor or has sizes that are not known."""
    if not is_tensor(node):
        return None
    shape = tuple(node.meta["val"].shape)
    return shape if all(type(size) is int for size in shape) else None


def known_shape(node: fx.Node) -> Shape:
    shape = shape_of(node)
    assert shape is not None
    return shape


def first_operand(node: fx.Node) -> fx.Node:
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


def dtype_of(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    target = node.target
    assert isinstance(target, OpOverload)
    defaults = {
        argument.name: argument.default_value if argument.has_default_value() else None
        for argument in target._schema.arguments
    }
    return defaults | dict(zip(defaults, node.args, strict=False)) | node.kwargs


def packet_of(node: fx.Node) -> object:
    """The operator without its overload; the target itself where it is no operator."""
    target = node.target
    return target.overloadpacket if isinstance(target, OpOverload) else target


def packet_name(node: fx.Node) -> str:
    """The operator's name without namespace and overload; empty for what is no operator."""
    target = node.target
    return target.overloadpacket.__name__ if isinstance(target, OpOverload) else ""


def add_call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, **kwargs: Any
) -> fx.Node:
    """A call at the graph's point of insertion, its fake result worked out.

    ``like`` is the node that it stands for or helps to: source lines and tags for the report are
    taken from there.
    """
    node = graph.call_function(target, args, kwargs)
    work_out_result(node)
    kept = ("stack_trace", "nn_module_stack", "source_fn_stack", "partitioner_tag", "seq_nr")
    node.meta.update({key: like.meta[key] for key in kept if key in like.meta})
    return node


def work_out_result(node: fx.Node) -> None:
    """The fake result of a call, from those of what it reads."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    with fake_mode_of(node.graph):
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def copy_named(graph: fx.Graph, node: fx.Node, lookup: Lookup, name: str) -> fx.Node:
    """A copy of this name, in which ``lookup`` tells what stands for each node that is read.

    What is copied and then renamed keeps two names from others, of which one is another node's.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), lookup)
    new = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
    new.meta = dict(node.meta)
    return new


def adder(graph: fx.Graph, like: fx.Node, before: fx.Node | None = None) -> Add:
    """It adds calls before a node, all of them described like one node.

    Without ``before`` they stand at the graph's point of insertion.
    """

    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with nullcontext() if before is None else graph.inserting_before(before):
            return add_call(graph, target, args, like, **kwargs)

    return add


def items(add: Add, call: fx.Node, *positions: int) -> tuple[fx.Node, ...]:
    """Results of a call that has several, by their positions."""
    return tuple(add(operator.getitem, call, position) for position in positions)


def copy_calls(add: Add, nodes: Iterable[fx.Node], new: dict[fx.Node, fx.Node]) -> None:
    """Calls like those of ``nodes`` that read what is ``new`` in place of the old, and join it."""
    for old in nodes:
        args, kwargs = fx.map_arg((old.args, old.kwargs), lambda n: new.get(n, n))
        new[old] = add(old.target, *args, **kwargs)


def run_calls(nodes: Iterable[fx.Node], known: dict[fx.Node, Any], device: torch.device) -> None:
    """Compute calls from what is ``known``, which they join; what they make is on a device."""
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        kwargs = {**kwargs, "device": device} if "device" in kwargs else kwargs
        known[node] = node.target(*args, **kwargs)  # type: ignore[operator]


def narrowings(
    starts: Iterable[fx.Node], sources: Callable[[fx.Node], Iterable[fx.Node] | None]
) -> Iterator[fx.Node]:
    """Nodes that all of ``starts`` follow from, nearest first; it ends where there are no sources.

    Nodes are taken from the last to the first; where one alone waits, all paths go through it.
    """
    waiting, seen = set(starts), set(starts)
    while waiting:
        last = max(waiting)
        if len(waiting) == 1:
            yield last
        found = sources(last)
        if found is None:
            return
        waiting = (waiting - {last}) | (set(found) - seen)
        seen |= waiting


def laid_out_like(old: fx.Node, new: fx.Node, add: Add) -> fx.Node:
    """``new``, or a copy of it whose dimensions lie in memory in the order of those of ``old``."""
    if _strides(new) == _strides(old):
        return new
    strides = fake(old).stride()
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    turned = add(torch.ops.aten.permute.default, new, order)
    copy = add(torch.ops.aten.clone.default, turned, memory_format=torch.contiguous_format)
    back = [order.index(dim) for dim in range(len(order))]
    return add(torch.ops.aten.permute.default, copy, back)


def _strides(node: fx.Node) -> list[int]:
    """Those that matter: a dimension of one element may have any."""
    tensor = fake(node)
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


class Ancestry:
    """What the nodes of a graph are computed from: a bit for each, in one number for each node."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._place: dict[fx.Node, int] = {}
        self._bits: dict[fx.Node, int] = {}
        self.add(nodes)

    def add(self, nodes: Iterable[fx.Node]) -> None:
        """More nodes, which no other one reads yet."""
        for node in nodes:
            place = self._place[node] = len(self._place)
            bits = 1 << place
            for source in node.all_input_nodes:
                bits |= self._bits[source]
            self._bits[node] = bits

    def depends(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether a node is computed from another, or is it."""
        place = self._place.get(source)
        return place is not None and bool(self._bits[node] >> place & 1)


def fake(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def covers_storage(node: fx.Node) -> bool:
    """Whether a node has all elements of its storage, in the same order.

    Both are contiguous then. False where sizes are not known: to compare symbols leaves guards.
    """
    owner = root(node)
    if not is_tensor(node) or not is_tensor(owner) or not _keeps_order(node):
        return False
    whole, owned = fake(node), fake(owner)
    if any(type(n) is not int for n in (*whole.shape, *owned.shape)):
        return False
    same = whole.numel() == owned.numel() and whole.dtype == owned.dtype
    return same and whole.is_contiguous() and owned.is_contiguous()


def _keeps_order(node: fx.Node) -> bool:
    """Whether a node is made by true views: a reshape of what is not contiguous is a copy."""
    while is_view(node):
        base = node.all_input_nodes[0]
        if not is_tensor(base):
            return False
        if node.target is torch.ops.aten.reshape.default and not fake(base).is_contiguous():
            return False
        node = base
    return True

"""Verifying calls that write over an operand, with nothing taken from who put them there.

What a storage holds at each moment is followed through both graphs, before and after: a number that
says how its elements were computed. A call that writes gives its operand's storage another number:
that of the call it stands for. The second graph is right if

* each such call stands for one of the first graph, with the same sizes and dtype of its result,
  on arguments that hold then what they held there;
* so does every other call: nothing is read after it was written over;
* no graph input, constant or overlapping memory is written, and the backward does not write
  what the forward returned or saved;
* both graphs return the same.

How rounding differs between a call and its form in place is not checked here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat.compat.configuration import OpOverload
from fxremat.errors import VerificationFailed
from fxremat.runtime.kernels import IN_PLACE, addmm_into, baddbmm_into
from fxremat.verify.predicates import (
    is_dense,
    is_mutating,
    regroups,
    results_of,
    root,
    schema_of,
    tensor_of,
    viewed,
    with_nodes_as,
)


def _kind(node: fx.Node) -> tuple[str, str] | None:
    tensor = tensor_of(node)
    return None if tensor is None else (str(tuple(tensor.shape)), str(tensor.dtype))


def _is_pure(node: fx.Node) -> bool:
    if schema_of(node) is None:
        return node.target is operator.getitem
    assert isinstance(node.target, OpOverload)
    known = node.target.namespace in ("aten", "prims", "fxremat_kernels") or node.target in IN_PLACE
    return known and torch.Tag.nondeterministic_seeded not in node.target.tags


class _Reader:
    """Follows what the storages of one graph hold; the numbers are common to both graphs."""

    def __init__(self, numbers: dict[Any, int], meant: dict[fx.Node, OpOverload]) -> None:
        self.numbers, self.meant = numbers, meant
        self.holds: dict[fx.Node, int] = {}
        self.last_write: dict[fx.Node, fx.Node] = {}

    def number(self, key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def seen(self, node: fx.Node) -> int:
        """What reading the node gives now."""
        owner = root(node)
        if owner is node or regroups(node, owner):
            return self.holds[owner]
        return self.number(("view", node.target, self.arguments(node)))

    def arguments(self, node: fx.Node) -> Any:
        def read(source: fx.Node) -> Any:
            return self.seen(source), _kind(source)

        return tuple(with_nodes_as(each, read) for each in (*node.args, node.kwargs))

    def run(self, graph: fx.Graph) -> Iterator[tuple[fx.Node, int]]:
        """Every call that computes something, and what it gave."""
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.holds[node] = self.number((node.op, str(node.target)))
            elif node.op == "call_function" and viewed(node) is None:
                yield node, self.call(node)

    def call(self, node: fx.Node) -> int:
        meant = self.meant.get(node)
        if meant is not None:
            given = self.number_of_meant(node, meant)
        else:
            name = None if _is_pure(node) and not is_mutating(node) else node.name
            given = self.number((node.target, self.arguments(node), name))
        self.holds[node] = given
        if is_mutating(node) and isinstance(node.args[0], fx.Node):
            owner = root(node.args[0])
            self.holds[owner] = given
            self.last_write[owner] = node
        return given

    def number_of_meant(self, node: fx.Node, meant: OpOverload) -> int:
        """The number of the call that this one stands for: its first argument has their shape."""
        first, *others = self.arguments(node)
        held, (_, dtype) = first
        return self.number((meant, ((held, (_shape(node), dtype)), *others), None))


def _shape(node: fx.Node) -> str:
    tensors = [tensor_of(n) for n in node.all_input_nodes]
    shapes = [tuple(t.shape) for t in tensors if t is not None]
    if node.target is addmm_into:
        return str((shapes[1][0], shapes[-1][1]))
    if node.target is baddbmm_into:
        return str((*shapes[1][:2], shapes[-1][2]))
    return str(shapes[0])


def _fail(what: str) -> None:
    raise VerificationFailed("in place", what)


def _check_write(node: fx.Node, kept: dict[fx.Node, str]) -> None:
    """What may be seen of one call without following the data."""
    target = node.args[0]
    assert isinstance(target, fx.Node)
    owner, tensor = root(target), tensor_of(target)
    if owner.op != "call_function":
        _fail(f"{node.name} writes over {owner.name}, which the graph does not own")
    whole = tensor is not None and is_dense(tensor)
    if not whole or (target is not owner and not regroups(target, owner)):
        _fail(f"{node.name} writes over {target.name}, which is not all of its memory, in order")
    others = (n for n in pytree.tree_leaves(node.args[1:]) if isinstance(n, fx.Node))
    if any(root(n) is owner for n in others):
        _fail(f"{node.name} reads {owner.name} while it writes over it")
    half = node.meta.get("partitioner_tag")
    if half not in ("must_be_in_forward", "must_be_in_backward"):
        _fail(f"{node.name} belongs to neither half")
    if half == "must_be_in_backward" and owner in kept:
        _fail(f"{node.name} writes over {owner.name}, which the forward {kept[owner]}")


def _stand_ins(before: fx.Graph, after: fx.Graph) -> dict[fx.Node, OpOverload]:
    """The calls that write and were not there before; each with the call it stands for."""
    there = {node.name for node in before.nodes if is_mutating(node)}
    functional = {in_place: op for op, in_place in IN_PLACE.items()}
    found = {}
    for node in after.nodes:
        if is_mutating(node) and node.name not in there:
            if node.target not in functional:
                _fail(f"{node.name} writes, and nobody knows what")
            found[node] = functional[node.target]
    return found


def _explain(node: fx.Node, reader: _Reader) -> str:
    """Which operand no longer holds what the call should read."""
    for source in node.all_input_nodes:
        owner = root(source)
        if owner in reader.last_write and reader.last_write[owner] is not node:
            writer = reader.last_write[owner].name
            return f"{node.name} reads {source.name} after {writer} wrote over it"
    return f"{node.name} computes what the graph did not compute before"


def check_in_place(
    before: fx.Graph, after: fx.Graph, *, saved: Iterable[str], num_forward_outputs: int
) -> None:
    """Raise `VerificationFailed`, with what is wrong, unless ``after`` computes as ``before``.

    ``saved`` are the names of the nodes of ``after`` that its forward saves for its backward.
    """
    meant, numbers = _stand_ins(before, after), dict[Any, int]()
    first, second = _Reader(numbers, {}), _Reader(numbers, meant)
    kinds: dict[int, set[Any]] = {}
    for node, number in first.run(before):
        kinds.setdefault(number, set()).add(_kind(node))
    names = set(saved)
    kept = {root(n): "saved" for n in after.nodes if n.name in names}
    returned = results_of(after)[:num_forward_outputs]
    kept |= {root(n): "returned" for n in returned if isinstance(n, fx.Node)}
    for node in meant:
        _check_write(node, kept)
    for node, number in second.run(after):
        if number not in kinds:
            _fail(_explain(node, second))
        target = node.args[0] if node in meant else None
        if isinstance(target, fx.Node) and (_shape(node), _kind(target)[1]) not in kinds[number]:  # type: ignore[index]
            _fail(f"{node.name} writes a result of another size or dtype over {target.name}")
    old, new = results_of(before), results_of(after)
    for index, (a, b) in enumerate(zip(old, new, strict=True)):
        one = (first.seen(a), _kind(a)) if isinstance(a, fx.Node) else a
        other = (second.seen(b), _kind(b)) if isinstance(b, fx.Node) else b
        if one != other:
            _fail(f"result {index} is not what it was")

"""Verifying the forward and the backward that a graph was cut into, whoever cut it.

Both are read with the value numbers of the whole graph; what the backward is given has, by its
name, the number that the forward returned it with. The halves are right if their results together
are those of the graph, if the backward is given only what the forward returns, and if what is no
function of its arguments runs once in all, as before. Layout and kernels of a call of ``rows`` are
no part of what it computes; its results have to lie as the operator says.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fxremat.compat.joint_graph import is_tangent
from fxremat.compat.sizes import size_bound
from fxremat.compat.tensors import fake_mode_of
from fxremat.errors import VerificationFailed
from fxremat.runtime.chunks.operator import ROWS
from fxremat.verify.data_flow import Numbering, ReadGraph
from fxremat.verify.predicates import is_tensor, results_of


def check_halves(
    joint: fx.Graph,
    forward: fx.Graph,
    backward: fx.Graph,
    *,
    num_forward_outputs: int,
    mutated: Iterable[str],
) -> None:
    """Raise `VerificationFailed` unless the halves together compute what the graph does.

    ``joint`` is the graph that was cut; ``mutated`` are names of its inputs that the step writes.
    """
    numbering = Numbering(frozenset(mutated))
    whole = numbering.read(joint)
    first = numbering.read(forward)
    returned = results_of(forward)
    second = numbering.read(backward, _given(forward, returned, backward, first))
    expected = [whole.number(result) for result in results_of(joint)]
    found = [first.number(result) for result in returned[:num_forward_outputs]]
    found += [second.number(result) for result in results_of(backward)]
    if len(expected) != len(found):
        raise VerificationFailed("halves", "there are more results, or fewer")
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one != other:
            half = "forward" if index < num_forward_outputs else "backward"
            raise VerificationFailed("halves", f"result {index}, of the {half}, is another")
    if sorted(whole.once) != sorted([*first.once, *second.once]):
        changed = sorted({*whole.once} ^ {*first.once, *second.once}) or whole.once
        raise VerificationFailed("halves", f"calls that must run exactly once: {changed[:5]}")
    check_rows(forward)
    check_rows(backward)


def _given(
    forward: fx.Graph, returned: list[Any], backward: fx.Graph, first: ReadGraph
) -> dict[fx.Node, tuple[int, int | None]]:
    """What the backward starts with, and what was last written into it."""
    there = {node.name: node for node in returned if isinstance(node, fx.Node)}
    known = {}
    for node in backward.nodes:
        if node.op != "placeholder" or is_tangent(node):
            continue
        source = there.get(node.name)
        if source is not None:
            known[node] = first.of[source], first.written_into(source)
        elif node.users and is_tensor(node):
            raise VerificationFailed("halves", f"the forward does not return {node.name}")
    return known


def check_rows(graph: fx.Graph) -> None:
    """Raise `VerificationFailed` where results of a call of ``rows`` lie in memory otherwise.

    Its fake kernel is run again on the call as it stands, and compared with what the graph notes.
    """
    for node in graph.find_nodes(op="call_function", target=ROWS):
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        with fake_mode_of(graph):
            made = ROWS(*args, **kwargs)
        _compare(node.name, node.meta["val"], made)
        for item in node.users:
            if item.op == "call_function" and isinstance(item.args[1], int):
                _compare(item.name, [item.meta["val"]], [made[item.args[1]]])


def _compare(name: str, noted: list[torch.Tensor], made: list[torch.Tensor]) -> None:
    if [_form(one) for one in noted] != [_form(one) for one in made]:
        raise VerificationFailed("row programmes", f"{name} does not lie as its graph says")


def _form(value: torch.Tensor) -> Any:
    sizes, strides = map(size_bound, value.shape), map(size_bound, value.stride())
    return list(sizes), list(strides), value.dtype

"""Sums of gradients: the second summand is added to the first where it is computed.

    m1 = mm(a, b)  ...  m2 = mm(c, d);  s = add(m1, m2)        weight used twice
    m1 = mm(a, b)  ...  s = addmm(m1, c, d)                    after

    m1 = mm(a, b)  ...  e = embedding's gradient(idx, g);  s = add(m1, e)      tied embedding
    m1 = mm(a, b)  ...  s = index_put(m1, [idx], g, accumulate=True)           after

The later summand has no storage of its own any more, and its op may write over the earlier one:
`passes.inplace` makes it do so. Inductor joins `add` and `mm` too, but into a third buffer, and
only where there is no view between them; it adds gradients of embeddings to a buffer of zeros.

This is sound because a sum may be computed in any order: only rounding changes, as in Inductor's
own rewriting. It is done in the backward alone, and where

* only the sum reads the later summand, and nobody reads the earlier one after it is computed;
* both are contiguous, so that views between them and the sum only regroup the same elements;
* all sizes are known when compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxremat.passes.base import Changed, Pass, in_place
from fxremat.passes.joint_graph import backward_closure, is_run_for_effect, is_view, root
from fxremat.passes.materialisation import users_through_views
from fxremat.passes.nodes import Add, adder, covers_storage, fake
from fxremat.runtime import accumulated

_ATEN = torch.ops.aten
Accumulate = Callable[[Add, fx.Node, fx.Node], fx.Node]


def _matrix_product(add: Add, into: fx.Node, later: fx.Node) -> fx.Node:
    batched = later.target is _ATEN.bmm.default
    return add(_ATEN.baddbmm.default if batched else _ATEN.addmm.default, into, *later.args)


def _masked_rows(add: Add, into: fx.Node, later: fx.Node) -> fx.Node:
    """The masked form of Inductor's decomposition: rows out of bounds get nothing."""
    _, mask, indices, values = later.args
    like = fake(into)
    kind = {"dtype": like.dtype, "device": like.device, "pin_memory": False}
    kept = add(_ATEN.where.self, mask, values, add(_ATEN.full.default, [], 0, **kind))
    near = []
    for index, size in zip(indices, like.shape, strict=False):  # type: ignore[arg-type]
        above = add(_ATEN.clamp_min.default, index, -size)
        near.append(add(_ATEN.clamp_max.default, above, size - 1))
    return add(_ATEN.index_put.default, into, near, kept, True)


def _rows(add: Add, into: fx.Node, later: fx.Node) -> fx.Node:
    if later.target is _ATEN.embedding_dense_backward.default:
        given: tuple[Any, ...] = [later.args[1]], later.args[0]
    else:
        given = later.args[1:3]
    return add(_ATEN.index_put.default, into, *given, True)


_MAKERS: dict[Any, Accumulate] = {
    _ATEN.mm.default: _matrix_product,
    _ATEN.bmm.default: _matrix_product,
    _ATEN._unsafe_masked_index_put_accumulate.default: _masked_rows,
    _ATEN.index_put.default: _rows,
    _ATEN._unsafe_index_put.default: _rows,
    _ATEN.embedding_dense_backward.default: _rows,
}
_FILLED = (_ATEN.full.default, _ATEN.new_full.default, _ATEN.full_like.default)
_ZEROS = (_ATEN.zeros.default, _ATEN.new_zeros.default, _ATEN.zeros_like.default)
_EXTERN = {*_MAKERS, _ATEN.addmm.default, _ATEN.baddbmm.default}
"""Calls whose result always has memory of its own: only onto these is anything added."""


def _is_zero(node: Any) -> bool:
    if not isinstance(node, fx.Node):
        return False
    return node.target in _ZEROS or (node.target in _FILLED and bool(node.args[-1] == 0))


def _starts_at_zero(later: fx.Node) -> bool:
    """Whether the call gives nothing but what is to be added."""
    args = later.args
    if later.target is _ATEN.embedding_dense_backward.default:
        return len(args) == 5 and args[3:] == (-1, False)
    if later.target is _ATEN._unsafe_masked_index_put_accumulate.default:
        return _is_zero(args[0]) and None not in args[2]  # type: ignore[operator]
    if later.target in (_ATEN.index_put.default, _ATEN._unsafe_index_put.default):
        return _is_zero(args[0]) and len(args) == 4 and args[3] is True
    return True


def _is_sum(node: fx.Node) -> bool:
    if node.target is not _ATEN.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    nodes = (node, *node.all_input_nodes)
    if len(nodes) != 3 or not all(map(covers_storage, nodes)):
        return False
    return len({(fake(n).shape, fake(n).dtype) for n in nodes}) == 1


def _may_join(sum_node: fx.Node, earlier: fx.Node, later: fx.Node) -> bool:
    """Whether ``later`` may be added onto ``earlier`` where it is computed; both own storage."""
    if earlier is later or earlier.target not in _EXTERN or later.target not in _MAKERS:
        return False
    if later.kwargs or not _starts_at_zero(later) or users_through_views(later) != [sum_node]:
        return False
    return all(user is sum_node or user < later for user in users_through_views(earlier))


def _join(graph: fx.Graph, sum_node: fx.Node, earlier: fx.Node, later: fx.Node) -> fx.Node:
    shape, add, into = list(fake(later).shape), adder(graph, later, later), earlier
    operand = next(n for n in sum_node.all_input_nodes if root(n) is later)
    if list(fake(earlier).shape) != shape:
        into = add(_ATEN.view.default, earlier, shape)
    joined = _MAKERS[later.target](add, into, later)
    later.replace_all_uses_with(joined)
    sum_node.replace_all_uses_with(joined if operand is later else operand)
    views = [n for n in sum_node.all_input_nodes if n is not operand]
    graph.erase_node(sum_node)
    _erase_unread(graph, [later, *(n for n in later.all_input_nodes if _is_zero(n)), *views])
    return joined


def _erase_unread(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Erase what nobody reads, and the views that it is a view of."""
    for node in nodes:
        if not node.users:
            sources = node.all_input_nodes if is_view(node) else []
            graph.erase_node(node)
            _erase_unread(graph, sources)


@dataclass(frozen=True)
class GradientSums(Pass):
    """Adds summands onto each other; for graphs that Inductor compiles.

    It runs before `passes.accumulation`, whose calls read gradients after the sum.
    """

    name = "gradient sums"

    def requires(self, module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            self.demand(node.target is not accumulated, f"{node.name} has been put in before")

    def call(self, module: fx.GraphModule) -> Changed:
        backward, found = backward_closure(module.graph), False
        for sum_node in list(module.graph.nodes):
            if sum_node not in backward or not _is_sum(sum_node):
                continue
            earlier, later = sorted(map(root, sum_node.all_input_nodes))
            if {earlier, later} <= backward and _may_join(sum_node, earlier, later):
                backward.add(_join(module.graph, sum_node, earlier, later))
                found = True
        return in_place(module, found)

    def ensures(self, module: fx.GraphModule) -> None:
        """The graph is well formed, and every call that gives something says what."""
        module.graph.lint()
        for node in module.graph.nodes:
            gives = node.op == "call_function" and not is_run_for_effect(node)
            known = not gives or "val" in node.meta
            self.demand(known, f"{node.name} has no fake result")

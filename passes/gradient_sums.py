"""Sums of gradients: the second summand is added to the first where it is computed.

    m1 = mm(a, b)  ...  m2 = mm(c, d);  s = add(m1, m2)        weight used twice
    m1 = mm(a, b)  ...  s = addmm(m1, c, d)                    after

    m1 = mm(a, b)  ...  e = embedding's gradient(idx, g);  s = add(m1, e)      tied embedding
    m1 = mm(a, b)  ...  s = index_put(m1, [idx], g, accumulate=True)           after

The later summand has no storage of its own any more, and its op may write over the earlier one:
`passes.inplace` makes it do so. Inductor joins `add` and `mm` too, but into a third buffer, and
only where there is no view between them; it adds gradients of embeddings to a buffer of zeros.

Sound because a sum may be computed in any order: what changes is rounding, as in Inductor's own
rewriting. It is done in the backward alone, where the later summand is read by the sum and by
nobody else, where the earlier one is read by nobody after it, and where both are contiguous, so
that views between them and the sum do nothing but regroup the same elements. Sizes that are
not known when compiling are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import fx

from fxremat import compat
from fxremat.passes.base import Changed, Pass
from fxremat.passes.joint_graph import is_run_for_effect, is_view, root
from fxremat.passes.materialisation import users_through_views
from fxremat.passes.nodes import add_call, fake, shows_all
from fxremat.runtime import accumulated

_ATEN = torch.ops.aten
Accumulate = Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]


def _matrix_product(graph: fx.Graph, into: fx.Node, late: fx.Node) -> fx.Node:
    batched = late.target is _ATEN.bmm.default
    target = _ATEN.baddbmm.default if batched else _ATEN.addmm.default
    return add_call(graph, target, (into, *late.args), late)


def _masked_rows(graph: fx.Graph, into: fx.Node, late: fx.Node) -> fx.Node:
    """The masked form of Inductor's decomposition: rows out of bounds get nothing."""
    _, mask, indices, values = late.args
    like = fake(into)
    zero = add_call(
        graph, _ATEN.full.default, ([], 0), late, dtype=like.dtype, device=like.device,
        pin_memory=False,
    )  # fmt: skip
    kept = add_call(graph, _ATEN.where.self, (mask, values, zero), late)
    near = []
    for index, size in zip(indices, like.shape, strict=False):  # type: ignore[arg-type]
        above = add_call(graph, _ATEN.clamp_min.default, (index, -size), late)
        near.append(add_call(graph, _ATEN.clamp_max.default, (above, size - 1), late))
    return add_call(graph, _ATEN.index_put.default, (into, near, kept, True), late)


def _rows(graph: fx.Graph, into: fx.Node, late: fx.Node) -> fx.Node:
    _, indices, values, *_ = late.args
    return add_call(graph, _ATEN.index_put.default, (into, indices, values, True), late)


def _embedding(graph: fx.Graph, into: fx.Node, late: fx.Node) -> fx.Node:
    values, index, *_ = late.args
    return add_call(graph, _ATEN.index_put.default, (into, [index], values, True), late)


_MAKERS: dict[Any, Accumulate] = {
    _ATEN.mm.default: _matrix_product,
    _ATEN.bmm.default: _matrix_product,
    _ATEN._unsafe_masked_index_put_accumulate.default: _masked_rows,
    _ATEN.index_put.default: _rows,
    _ATEN._unsafe_index_put.default: _rows,
    _ATEN.embedding_dense_backward.default: _embedding,
}
_EXTERN = {*_MAKERS, _ATEN.addmm.default, _ATEN.baddbmm.default}
"""Calls whose result has memory of its own in any case: only these are added to."""


def _is_zero(node: Any) -> bool:
    if not isinstance(node, fx.Node) or len(node.args) < 1:
        return False
    if node.target in (_ATEN.full.default, _ATEN.new_full.default, _ATEN.full_like.default):
        return bool(node.args[-1] == 0)
    return node.target in (_ATEN.zeros.default, _ATEN.new_zeros.default, _ATEN.zeros_like.default)


def _starts_at_zero(late: fx.Node) -> bool:
    """Whether the call gives nothing but what is to be added."""
    args = late.args
    if late.target is _ATEN.embedding_dense_backward.default:
        return len(args) == 5 and args[3:] == (-1, False)
    if late.target is _ATEN._unsafe_masked_index_put_accumulate.default:
        return _is_zero(args[0]) and None not in args[2]  # type: ignore[operator]
    if late.target in (_ATEN.index_put.default, _ATEN._unsafe_index_put.default):
        return _is_zero(args[0]) and len(args) == 4 and args[3] is True
    return True


def _is_sum(node: fx.Node) -> bool:
    if node.target is not _ATEN.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    if len(node.all_input_nodes) != 2 or not all(map(shows_all, (node, *node.all_input_nodes))):
        return False
    kinds = {(fake(n).shape, fake(n).dtype) for n in (node, *node.all_input_nodes)}
    return len(kinds) == 1


def _may_join(total: fx.Node, early: fx.Node, late: fx.Node, at: dict[fx.Node, int]) -> bool:
    """Whether ``late`` may be computed onto ``early``: both own their storage."""
    if early is late or early.target not in _EXTERN or late.target not in _MAKERS:
        return False
    if late.kwargs or not _starts_at_zero(late) or users_through_views(late) != [total]:
        return False
    return all(user is total or at[user] < at[late] for user in users_through_views(early))


def _join(graph: fx.Graph, total: fx.Node, early: fx.Node, late: fx.Node) -> fx.Node:
    shape = list(fake(late).shape)
    operand = next(n for n in total.all_input_nodes if root(n) is late)
    with graph.inserting_before(late):
        into = early
        if list(fake(early).shape) != shape:
            into = add_call(graph, _ATEN.view.default, (early, shape), late)
        joined = _MAKERS[late.target](graph, into, late)
    late.replace_all_uses_with(joined)
    total.replace_all_uses_with(joined if operand is late else operand)
    views = [n for n in total.all_input_nodes if n is not operand]
    graph.erase_node(total)
    _erase_unread(graph, [late, *(n for n in late.all_input_nodes if _is_zero(n)), *views])
    return joined


def _erase_unread(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Erase what nobody reads, and the views that it is a view of."""
    for node in nodes:
        if not node.users:
            sources = node.all_input_nodes if is_view(node) else []
            graph.erase_node(node)
            _erase_unread(graph, sources)


def _after_tangents(graph: fx.Graph) -> set[fx.Node]:
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        if compat.is_tangent(node) or any(n in reached for n in node.all_input_nodes):
            reached.add(node)
    return reached


def accumulate_sums(graph: fx.Graph) -> bool:
    """Rewrite the sums of a joint graph, in place; whether there were any."""
    backward = _after_tangents(graph)
    at = dict(zip(graph.nodes, count()))
    found = False
    for total in list(graph.nodes):
        if total not in backward or not _is_sum(total):
            continue
        early, late = sorted(map(root, total.all_input_nodes), key=at.__getitem__)
        if not {early, late} <= backward or not _may_join(total, early, late, at):
            continue
        place = at[late]
        joined = _join(graph, total, early, late)
        backward.add(joined)
        at[joined] = place
        at.update((n, place) for n in joined.all_input_nodes if n not in at)
        found = True
    return found


@dataclass(frozen=True)
class GradientSums(Pass):
    """Adds summands onto each other; for graphs that Inductor compiles.

    It runs before gradients are given up: who gives one up reads it after the sum.
    """

    name = "gradient sums"

    def requires(self, module: fx.GraphModule) -> None:
        """No gradient is given up yet."""
        for node in module.graph.nodes:
            self.demand(node.target is not accumulated, f"{node.name} has been put in before")

    def call(self, module: fx.GraphModule) -> Changed:
        """Works in place."""
        found = accumulate_sums(module.graph)
        if found:
            module.recompile()
        return Changed(module, found)

    def ensures(self, module: fx.GraphModule) -> None:
        """The graph is well formed, and every call that gives something says what."""
        module.graph.lint()
        for node in module.graph.nodes:
            gives = node.op == "call_function" and not is_run_for_effect(node)
            known = not gives or "val" in node.meta
            self.demand(known, f"{node.name} has no fake result")

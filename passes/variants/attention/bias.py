"""The masks of attention written by hand, as the one tensor that a fused kernel adds to the scores.

Tensors that are added are added up. What is filled in becomes a tensor that holds it where the mask
is, and 0 elsewhere. Rows without any key need more, for there kernels give what they like. Such
rows are moved to 0 first, and then:

* filled in with finite numbers, weights do not depend on the query: the query of such a row is set
  to 0, and so is its gradient, as it is in the graph;
* filled in with -inf, the row of the output is NaN, and so are the gradients of all values of that
  head: these are written over;
* -inf added: NaN likewise, and the gradients of the query and of all keys too;
* large negative numbers added: weights are nearly equal, but gradients go through to the query and
  to all keys. No kernel does that.

So added tensors are taken only where the graph makes them from nothing: they are computed here, and
have no row of the last kind. Any others are a matter for a lossy rule. Masks that are computed here
also tell whether they are the causal one, which kernels know without a tensor. Where something is
both added and filled in, nothing is offered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import fx

from fxremat.compat.configuration import OpOverload
from fxremat.compat.tensors import outside_fake_mode
from fxremat.core.constants import MOST_MASK_ELEMENTS, MOST_NODES
from fxremat.passes.joint_graph import is_mutating, is_random, reached
from fxremat.passes.nodes import Add, Lookup, Shape, dtype_of, packet_name, run_calls, shape_of
from fxremat.passes.variants.attention.layout import expanded, is_move, viewed, whole
from fxremat.passes.variants.attention.scores import VERY_NEGATIVE, Mask, Reading, number
from fxremat.passes.variants.saved_values import as_dtype, in_shape

_ATEN = torch.ops.aten
Heads = tuple[int, int]
"""How many batches, and how many heads in each."""


@dataclass(frozen=True)
class Rows:
    """Flags [b, h, t, 1] of rows without keys, in a graph, or None where there can be none."""

    zero: fx.Node | None = None
    """The query counts as 0, and gets no gradient."""
    lost: fx.Node | None = None
    """The output is NaN."""


@dataclass(frozen=True)
class Bias:
    """What is added to the scores: ``is_causal``, or the parts in the order in which they came."""

    heads: Heads
    is_causal: bool = False
    parts: tuple[Mask, ...] = ()
    may_be_empty: bool = False
    """Whether a row could be without any key."""
    may_be_lost: bool = False
    """Whether it could be without, by -inf."""

    @property
    def is_inexact(self) -> bool:
        """Whether rows without keys may have other weights than they had."""
        return self.may_be_empty and self.parts[0].value is None

    def insert(self, add: Add, at: Lookup, dtype: torch.dtype) -> tuple[fx.Node | None, Rows]:
        """Put the tensor in, if there is one, for a kernel of this type."""
        if not self.parts:
            return None, Rows()
        is_added = self.parts[0].value is None
        found, hidden = (_add_up if is_added else _fill_in)(self, add, at, dtype)
        zero = lost = None
        if self.may_be_empty or self.may_be_lost:
            most = add(_ATEN.amax.default, found, [-1], True)
            found = add(_ATEN.sub.Tensor, found, most)
            if self.may_be_lost:
                lost = add(_ATEN.eq.Scalar, most, -math.inf)
                found = where(add, lost, 0.0, found)
            if hidden is not None:
                seen = add(_ATEN.any.dim, add(_ATEN.logical_not.default, hidden), -1, True)
                zero = add(_ATEN.logical_not.default, seen)
        return found, Rows(zero, lost)


def plan_bias(scores: Reading, heads: Heads) -> Bias | None:
    """How the masks of these scores are given to a kernel; None where they cannot be."""
    parts = scores.masks
    if not parts:
        return Bias(heads)
    is_added = parts[0].value is None
    if any((part.value is None) is not is_added or _in_four(part, heads) is None for part in parts):
        return None
    if is_added and not all(dtype_of(part.tensor).is_floating_point for part in parts):
        return None
    with outside_fake_mode(), torch.no_grad():
        known = _known(parts)
        if known is None:
            is_finite = all(_is_finite(part.tensor if is_added else part.value) for part in parts)
            return Bias(heads, parts=parts, may_be_empty=True, may_be_lost=not is_finite)
        if not known.any():
            return Bias(heads)
        if _is_causal(known, parts[0].shape):
            return Bias(heads, is_causal=True)
        most = known.amax(-1)
        is_lost = bool((most == -math.inf).any())
        is_empty = bool((most[most > -math.inf] <= VERY_NEGATIVE).any())
        is_empty = is_empty or (is_lost and not is_added)
        return Bias(heads, parts=parts, may_be_empty=is_empty, may_be_lost=is_lost)


def _in_four(mask: Mask, heads: Heads) -> Shape | None:
    """The shape of a mask, its leading dimensions put into two.

    None for a mask that is the same along a part of one of them.
    """
    own, shape = shape_of(mask.tensor) or (), (*heads, *mask.shape[-2:])
    layout = viewed(expanded(whole(own), own, mask.shape), shape)
    varies = [{step > 0 for _, step in pairs} for pairs in layout or ()]
    if layout is None or any(len(each) > 1 for each in varies):
        return None
    return tuple(size if True in each else 1 for size, each in zip(shape, varies, strict=True))


# --- what is known of masks ----------------------------------------------------------------------


def _known(parts: Sequence[Mask]) -> torch.Tensor | None:
    """What is added to the scores in all, where the graph makes that from nothing."""
    found = torch.zeros((), dtype=torch.float32)
    for part in parts:
        value = _computed(part.tensor)
        if value is None:
            return None
        if part.value is None:
            found = found + value.float()
        else:
            hard = value.logical_not() if part.is_kept else value
            found = torch.where(hard, part.value, found)
    return found


def _is_causal(known: torch.Tensor, of: Shape) -> bool:
    rows, columns = of[-2:]
    if rows != columns or known.numel() != rows * columns:
        return False
    known = known.reshape(rows, columns)
    later = torch.ones(rows, columns, dtype=torch.bool).triu(1)
    return not known[~later].any() and bool((known[later] <= VERY_NEGATIVE).all())


def _computed(node: fx.Node) -> torch.Tensor | None:
    """The value of a tensor that is made from no input of the graph, on the CPU."""
    needed = reached([node], lambda one: one.all_input_nodes if _is_computable(one) else ())
    if len(needed) > MOST_NODES or not all(map(_is_computable, needed)):
        return None
    values: dict[fx.Node, Any] = {}
    run_calls(sorted(needed), values, torch.device("cpu"))
    found = values[node]
    return found if isinstance(found, torch.Tensor) else None


def _is_computable(node: fx.Node) -> bool:
    """Whether a node is a call that gives the same each time, and no large tensor."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    shape = shape_of(node)
    is_small = shape is not None and math.prod(shape) <= MOST_MASK_ELEMENTS
    return is_small and not is_random(node) and not is_mutating(node)


def _is_finite(node: Any) -> bool:
    """Whether a tensor holds finite numbers for certain."""
    if not isinstance(node, fx.Node):
        return isinstance(node, (int, float)) and math.isfinite(node)
    value = number(node)
    if value is not None:
        return math.isfinite(value)
    name = packet_name(node)
    if is_move(node) or name in ("slice", "select"):
        return _is_finite(node.args[0])
    held = {"where": slice(1, 3), "masked_fill": slice(0, 3, 2), "full": slice(1, 2)}
    if name in held:
        return all(map(_is_finite, node.args[held[name]]))
    return name in ("zeros", "ones")


# --- putting them in -----------------------------------------------------------------------------


def _shaped(add: Add, at: Lookup, mask: Mask, heads: Heads) -> fx.Node:
    shape = _in_four(mask, heads)
    assert shape is not None
    return in_shape(add, at(mask.tensor), shape)


def scalar(add: Add, value: float, like: fx.Node, dtype: torch.dtype) -> fx.Node:
    return add(_ATEN.full.default, [], value, dtype=dtype, device=like.meta["val"].device)


def where(add: Add, mask: fx.Node, value: float, node: fx.Node) -> fx.Node:
    """``node`` with a number where the mask is true."""
    return add(_ATEN.where.self, mask, scalar(add, value, node, dtype_of(node)), node)


def _add_up(plan: Bias, add: Add, at: Lookup, dtype: torch.dtype) -> tuple[fx.Node, fx.Node | None]:
    """The sum of what is added; there is no mask."""
    types = [*(dtype_of(part.tensor) for part in plan.parts), dtype]
    wide = max(types, key=lambda one: one.itemsize)
    found = (as_dtype(add, _shaped(add, at, part, plan.heads), wide) for part in plan.parts)
    return reduce(partial(add, _ATEN.add.Tensor), found), None


def _fill_in(
    plan: Bias, add: Add, at: Lookup, dtype: torch.dtype
) -> tuple[fx.Node, fx.Node | None]:
    found: fx.Node | None = None
    hidden: fx.Node | None = None
    for part in plan.parts:
        assert part.value is not None
        mask = _shaped(add, at, part, plan.heads)
        mask = add(_ATEN.logical_not.default, mask) if part.is_kept else mask
        value = max(part.value, torch.finfo(dtype).min) if math.isfinite(part.value) else part.value
        rest = scalar(add, 0.0, mask, dtype) if found is None else found
        found = add(_ATEN.where.self, mask, scalar(add, value, mask, dtype), rest)
        hidden = mask if hidden is None else add(_ATEN.logical_or.default, hidden, mask)
    assert found is not None
    return found, hidden

"""Max-pooling: its gradient gathered by the eight-bit offsets, instead of scattered by indices.

Inductor keeps for each result of a max-pool, in a byte, the place of the largest element within its
window. For the gradient it makes indices of eight bytes, and adds to where they point in a tensor
of zeros. But an element of the input lies in few windows, which are known. So it can gather from
those whose offsets point to it, and neither indices nor zeros are written (Gist, Jain et al. 2018,
section 4.2, keeps offsets in place of indices).

    offsets ── indices ──┐
       zeros ── scatter_add ── view       before
        gradients ───────┘

    offsets, gradients ── where(offsets == own place, gradients, 0) ── view       one term a window

The terms are added in the order in which they were scattered, so the result is the same bit by bit.
Where windows overlap, the comparisons have to be few enough for Inductor to do them in one loop.

torch 2.11 leaves the gradient as one op, which is given the input too, for its sizes alone: there
the input need not be kept for it any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import fx

from fxremat.passes.joint_graph import STORED, JointGraph, root
from fxremat.passes.materialisation import MOST_INLINED_OPS, users_through_views
from fxremat.passes.nodes import Add, adder, fake, shape_of
from fxremat.passes.variants.insertion import Rule, Site, StandIns

_ATEN, _PRIMS = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class _Axis:
    """One of the two axes: sizes of input and result, and the windows."""

    size: int
    results: int
    kernel: int
    stride: int
    padding: int

    @property
    def windows(self) -> int:
        """The number of windows in which an element lies, at most."""
        return -(-self.kernel // self.stride)

    @property
    def is_tiled(self) -> bool:
        """Whether every element lies in exactly one window."""
        whole = self.size == self.results * self.stride and not self.padding
        return whole and self.kernel == self.stride


@dataclass(frozen=True)
class _Pool:
    """A gradient of a max-pool: the scattering, its result as it is read, what it is made from."""

    scatter: fx.Node
    result: fx.Node
    offsets: fx.Node
    gradients: fx.Node
    axes: tuple[_Axis, _Axis]

    def insert(self, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> StandIns:
        old = copies[self.result]
        with graph.inserting_before(old):
            call = adder(graph, old)
            return {old: _gather(call, self, copies[self.offsets], copies[self.gradients])}


def _scattered(node: fx.Node) -> tuple[Any, Any] | None:
    """Indices and gradients, if these are scattered over zeros as after a max-pool."""
    args: tuple[Any, ...] = node.args
    if node.target is _ATEN.scatter_add.default:
        zeros, axis, index, gradients = args
        made = isinstance(zeros, fx.Node) and zeros.target is _ATEN.full.default
        return (index, gradients) if made and zeros.args[1] == 0 and axis == 1 else None
    if node.target is _ATEN.max_pool2d_with_indices_backward.default:
        gradients, index = args[0], args[-1]
        plain = all(fake(each).is_contiguous() for each in (node, gradients))
        return (index, gradients) if plain else None
    return None


def _read(node: fx.Node) -> _Pool | None:
    """The pool whose gradient is scattered by this node, if it is one."""
    index, gradients = _scattered(node) or (None, None)
    if not isinstance(index, fx.Node) or not isinstance(gradients, fx.Node):
        return None
    indices = root(index)
    if indices.target is not _PRIMS._low_memory_max_pool_offsets_to_indices.default:
        return None
    offsets, *rest = indices.args
    numbers: list[Any] = [each if isinstance(each, Sequence) else () for each in rest]
    known = all(len(each) == 2 and all(type(n) is int for n in each) for each in numbers)
    if not known or not isinstance(offsets, fx.Node):
        return None
    kernel, size, stride, padding, dilation = numbers
    shape = shape_of(offsets)
    if any(step != 1 for step in dilation) or shape is None or len(shape) != 4:
        return None
    down, across = map(_Axis, size, shape[2:], kernel, stride, padding)
    if 2 * down.windows * across.windows > MOST_INLINED_OPS:
        return None
    return _Pool(node, _narrowed(node), offsets, gradients, (down, across))


def _narrowed(node: fx.Node) -> fx.Node:
    """The node in fewer bytes, if that is all that anybody reads."""
    readers = users_through_views(node)
    only = readers[0] if len(readers) == 1 else node
    is_cast = only.target is _PRIMS.convert_element_type.default
    return only if is_cast and fake(only).itemsize < fake(node).itemsize else node


def _gather(call: Add, pool: _Pool, offsets: fx.Node, gradients: fx.Node) -> fx.Node:
    device = fake(offsets).device
    both = partial(call, _ATEN.logical_and.default)

    def windows(axis: _Axis, column: bool) -> Iterator[tuple[Any, ...]]:
        """Of each window, first to last: its place, what its offset is, whether there is one.

        None where there is one for every element.
        """
        numbers = {"start": 0, "step": 1, "dtype": torch.int64, "requires_grad": False}
        place = call(_PRIMS.iota.default, axis.size, device=device, **numbers)
        if axis.padding:
            place = call(_ATEN.add.Tensor, place, axis.padding)
        last = call(_ATEN.div.Tensor_mode, place, axis.stride, rounding_mode="floor")
        for back in reversed(range(axis.windows)):
            window = call(_ATEN.sub.Tensor, last, back) if back else last
            start = call(_ATEN.mul.Tensor, window, axis.stride)
            offset = call(_ATEN.sub.Tensor, place, start)
            real = None
            if not axis.is_tiled:
                real = reduce(both, (call(_ATEN.ge.Scalar, window, 0),
                                     call(_ATEN.lt.Scalar, window, axis.results),
                                     call(_ATEN.lt.Scalar, offset, axis.kernel)))  # fmt: skip
                first = call(_ATEN.full.default, [], 0, dtype=torch.int64, device=device)
                window = call(_ATEN.where.self, real, window, first)
            found: tuple[Any, ...] = window, offset, real
            if column:
                found = tuple(each and call(_ATEN.unsqueeze.default, each, 1) for each in found)
            yield found

    scattered = call(_ATEN.view.default, gradients, list(fake(offsets).shape))
    rows, columns = (list(windows(axis, not n)) for n, axis in enumerate(pool.axes))
    total: fx.Node | None = None
    for row, down, is_row in rows:
        for column, across, is_column in columns:
            at = [None, None, row, column]
            place = call(_ATEN.mul.Tensor, down, pool.axes[1].kernel)
            own = call(_ATEN.add.Tensor, place, across)
            given = call(_ATEN.index.Tensor, offsets, at)
            given = call(_PRIMS.convert_element_type.default, given, torch.int64)
            mine = reduce(
                both, filter(None, (is_row, is_column)), call(_ATEN.eq.Tensor, given, own)
            )
            found = call(_ATEN.index.Tensor, scattered, at)
            zero = call(_ATEN.full.default, [], 0, dtype=fake(gradients).dtype, device=device)
            term = call(_ATEN.where.self, mine, found, zero)
            total = term if total is None else call(_ATEN.add.Tensor, total, term)
    assert total is not None
    if pool.result is not pool.scatter:
        total = call(_PRIMS.convert_element_type.default, total, fake(pool.result).dtype)
    if pool.axes[0].windows * pool.axes[1].windows > 1:
        total.meta[STORED] = True  # every loop that reads it would make the comparisons again
    return call(_ATEN.view.default, total, list(fake(pool.result).shape))


def _find(joint: JointGraph) -> Iterator[Site]:
    for node in joint.module.graph.nodes:
        pool = _read(node)
        if pool is not None:
            yield Site("pool_gradient", f"pool_gradient:{node.name}", pool.insert)


RULES = (
    Rule(
        "pool_gradient",
        "max-pool: the gradient gathered by 8-bit offsets, without indices and without zeros",
        _find,
    ),
)

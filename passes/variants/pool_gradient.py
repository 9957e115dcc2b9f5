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

torch leaves the gradient as one op in three dimensions, and in 2.11 in two. It is given the input
too, for its sizes alone: there the input need not be kept for it any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import product
from math import prod
from typing import Any

import torch
from torch import fx

from fxremat.passes.joint_graph import STORED, JointGraph, root
from fxremat.passes.materialisation import MOST_INLINED_OPS, users_through_views
from fxremat.passes.nodes import Add, fake, shape_of
from fxremat.passes.variants.insertion import Rule, Site, StandIns, Target
from fxremat.passes.variants.saved_values import as_dtype, counting

_ATEN, _PRIMS = torch.ops.aten, torch.ops.prims


_BACKWARDS = (
    _ATEN.max_pool2d_with_indices_backward.default,
    _ATEN.max_pool3d_with_indices_backward.default,
)


@dataclass(frozen=True)
class _Axis:
    """One of the axes: sizes of input and result, and the windows."""

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
    """A gradient of a max-pool as it is read, and what it is made from."""

    result: fx.Node
    offsets: fx.Node
    gradients: fx.Node
    axes: tuple[_Axis, ...]

    def insert(self, into: Target) -> StandIns:
        old = fake(self.result)
        call = into.before(into(self.result))
        terms = self.terms(call, into(self.offsets), into(self.gradients))
        total = as_dtype(call, reduce(partial(call, _ATEN.add.Tensor), terms), old.dtype)
        if self.windows > 1:
            total.meta[STORED] = True  # every loop that reads it would compare again
        return {self.result: call(_ATEN.view.default, total, list(old.shape))}

    @property
    def windows(self) -> int:
        """The number of windows in which an element lies, at most."""
        return prod(axis.windows for axis in self.axes)

    def terms(self, call: Add, offsets: fx.Node, gradients: fx.Node) -> Iterator[fx.Node]:
        """What each window that an element may lie in adds to its gradient."""
        device, dtype = fake(offsets).device, fake(gradients).dtype
        scattered = call(_ATEN.view.default, gradients, list(fake(offsets).shape))
        inner = self.axes[1:]
        places = list[list[list[fx.Node | None]]]()
        for after, axis in zip(reversed(range(len(self.axes))), self.axes, strict=True):
            windows, lift = _windows(call, axis, offsets), partial(_before, call, after)
            places.append([[part and lift(part) for part in each] for each in windows])
        for windows_of in product(*places):
            at = [None, None, *(place for place, _, _ in windows_of)]
            own = windows_of[0][1]
            for axis, (_, offset, _) in zip(inner, windows_of[1:], strict=True):
                own = call(_ATEN.add.Tensor, call(_ATEN.mul.Tensor, own, axis.kernel), offset)
            given = as_dtype(call, call(_ATEN.index.Tensor, offsets, at), torch.int64)
            tests = call(_ATEN.eq.Tensor, given, own), *(real for _, _, real in windows_of)
            mine = reduce(partial(call, _ATEN.logical_and.default), filter(None, tests))
            found = call(_ATEN.index.Tensor, scattered, at)
            zero = call(_ATEN.full.default, [], 0, dtype=dtype, device=device)
            yield call(_ATEN.where.self, mine, found, zero)


def _before(call: Add, axes: int, part: fx.Node) -> fx.Node:
    """A vector along an axis that so many others follow."""
    for _ in range(axes):
        part = call(_ATEN.unsqueeze.default, part, fake(part).dim())
    return part


def _windows(call: Add, axis: _Axis, like: fx.Node) -> Iterator[list[fx.Node | None]]:
    """Of each window, first to last: its place, what its offset is, whether there is one.

    None where there is one for every element.
    """
    place = counting(call, axis.size, torch.int64, like)
    if axis.padding:
        place = call(_ATEN.add.Tensor, place, axis.padding)
    last = call(_ATEN.div.Tensor_mode, place, axis.stride, rounding_mode="floor")
    for back in reversed(range(axis.windows)):
        window = call(_ATEN.sub.Tensor, last, back) if back else last
        offset = call(_ATEN.sub.Tensor, place, call(_ATEN.mul.Tensor, window, axis.stride))
        real = None
        if not axis.is_tiled:
            tests = (
                call(_ATEN.ge.Scalar, window, 0),
                call(_ATEN.lt.Scalar, window, axis.results),
                call(_ATEN.lt.Scalar, offset, axis.kernel),
            )
            real = reduce(partial(call, _ATEN.logical_and.default), tests)
            kind = {"dtype": torch.int64, "device": fake(like).device}
            window = call(_ATEN.where.self, real, window, call(_ATEN.full.default, [], 0, **kind))
        yield [window, offset, real]


def _scattered(node: fx.Node) -> tuple[Any, Any] | None:
    """Indices and gradients, if these are scattered over zeros as after a max-pool."""
    args: tuple[Any, ...] = node.args
    if node.target is _ATEN.scatter_add.default:
        zeros, axis, index, gradients = args
        made = isinstance(zeros, fx.Node) and zeros.target is _ATEN.full.default
        return (index, gradients) if made and zeros.args[1] == 0 and axis == 1 else None
    if node.target in _BACKWARDS:
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
    shape = shape_of(offsets) if isinstance(offsets, fx.Node) else None
    axes = 0 if shape is None else len(shape) - 2
    known = all(len(each) == axes and all(type(n) is int for n in each) for each in numbers)
    if not isinstance(offsets, fx.Node) or shape is None or not known:
        return None
    kernel, size, stride, padding, dilation = numbers
    if any(step != 1 for step in dilation):
        return None
    axes_of = tuple(map(_Axis, size, shape[2:], kernel, stride, padding))
    pool = _Pool(_narrowed(node), offsets, gradients, axes_of)
    return pool if 2 * pool.windows <= MOST_INLINED_OPS else None


def _narrowed(node: fx.Node) -> fx.Node:
    """The node in fewer bytes, if that is all that anybody reads."""
    readers = users_through_views(node)
    only = readers[0] if len(readers) == 1 else node
    is_cast = only.target is _PRIMS.convert_element_type.default
    return only if is_cast and fake(only).itemsize < fake(node).itemsize else node


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

"""Scratch memory of torch's own reductions on CUDA, when no Triton kernel does the work.

A reduction with few results and many rows is divided among blocks of threads, which leave what they
have in global memory, with a counter for each group of results. How it is divided follows from the
sizes and from the card (`aten/src/ATen/native/cuda/Reduce.cuh`, ``setReduceConfig``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fxremat.compat.sizes import size_bound

_ATEN = torch.ops.aten
MOST_THREADS, WARP = 512, 32
FEWEST_VALUES, MOST_VALUES = 16, 256
"""How many values a thread adds up, at least and at most."""
WIDEST = 4
"""Elements that a thread loads at once."""
FEWEST_WIDE = 128
"""Contiguous elements from which on they are loaded so."""
_COUNTER = 4
IN_FORM_OUT = {
    _ATEN.sum.IntList_out: _ATEN.sum.dim_IntList,
    _ATEN.amax.out: _ATEN.amax.default,
    _ATEN.amin.out: _ATEN.amin.default,
}
"""The operator with a result of its own, of each that writes into ``out``."""
REDUCTIONS = frozenset(IN_FORM_OUT.values())
_KEPT_IN = {torch.bfloat16: 4, torch.float16: 4}
"""Bytes in which sums of low precision are kept."""


@dataclass(frozen=True)
class Multiprocessors:
    """Of a card: how many there are, and the threads that each has room for."""

    count: int
    threads: int


HOPPER = Multiprocessors(132, 2048)


def _power_of_two(size: int) -> int:
    """The largest that is no larger."""
    return 1 << (max(size, 1).bit_length() - 1)


def _up(size: int, by: int) -> int:
    return -(-size // by)


@dataclass
class _Division:
    """How threads share ``inputs`` of each of ``results``; a block has ``width x height``."""

    inputs: int
    results: int
    wide: int
    width: int
    height: int
    step_inputs: int = 1
    step_results: int = 1

    @property
    def values(self) -> int:
        """How many values one thread adds up."""
        return _up(self.inputs, self.step_inputs)

    @property
    def groups(self) -> int:
        """How many groups of blocks there are that share no result."""
        return _up(self.results // self.wide, self.step_results)


def _divided(inputs: int, results: int, *, along: bool, contiguous: bool) -> _Division:
    """A block's shape; ``along`` the fastest dimension is what is reduced."""
    first, second = (inputs, results) if along else (results, inputs)
    wide = 1
    if contiguous and along and first >= FEWEST_WIDE:
        first //= WIDEST
    elif contiguous and not along:
        wide = next(n for n in (4, 2, 1) if results % n == 0)
        first //= wide
    most = MOST_THREADS // wide
    one, two = (min(_power_of_two(size), most) for size in (first, second))
    width = min(one, WARP)
    height = min(two, most // width)
    return _Division(inputs, results, wide, min(one, most // height), height)


def scratch_of_reduction(
    inputs: int,
    results: int,
    itemsize: int,
    *,
    along: bool,
    card: Multiprocessors,
    contiguous: bool = True,
) -> tuple[int, ...]:
    """Bytes of partial results and of counters; nothing where each result has one block.

    ``inputs`` are the elements of one result, ``itemsize`` is of what they are added up in.
    """
    if not inputs or not results:
        return ()
    one = _divided(inputs, results, along=along, contiguous=contiguous)
    if along:
        one.step_inputs *= one.width
    else:
        one.step_results *= one.width
    if one.values < min(one.height * FEWEST_VALUES, MOST_VALUES):
        return ()
    one.step_inputs *= one.height
    at_once = card.count * (card.threads // (one.width * one.height))
    if one.values < MOST_VALUES or one.groups > at_once:
        return ()
    fewest = _up(one.values, MOST_VALUES)
    shared = max(min(_up(at_once, one.groups), _up(one.values, FEWEST_VALUES)), fewest)
    if shared == 1:
        return ()
    partial = itemsize * results * shared * (1 if along else one.width * one.wide)
    return partial, _COUNTER * one.groups


def blocks_of_reduction(
    card: Multiprocessors, x: Any, dims: Sequence[int] | None = None, *_: Any, **__: Any
) -> tuple[int, ...]:
    """The same for a call of one of `REDUCTIONS`; ``x`` may be fake.

    A tensor that is not contiguous, or reduced over some dimensions before and some after those
    that stay, is taken to be divided as if its elements lay in this order.
    """
    sizes = [size_bound(size) for size in x.shape]
    reduced = {d % x.dim() for d in dims} if dims else set(range(x.dim()))
    inputs = prod(sizes[d] for d in reduced)
    results = prod(sizes[d] for d in range(x.dim()) if d not in reduced)
    strides = [(size_bound(x.stride(d)), d) for d in range(x.dim()) if sizes[d] > 1]
    fastest, dim = min(strides, default=(1, next(iter(reduced), 0)))
    kept = _KEPT_IN.get(x.dtype, x.dtype.itemsize)
    how = {"along": dim in reduced, "contiguous": fastest == 1}
    return scratch_of_reduction(inputs, results, kept, card=card, **how)

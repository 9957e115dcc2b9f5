"""Scratch memory inside CUDA library calls, from their sources: for cards that are not here.

* Flash attention's backward adds up the gradient of the queries in float32, and keeps a number for
  each row (`aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp`, ``mha_bwd``); where
  heads share keys, it makes gradients of keys and values for each head. cuDNN's takes the same, in
  one block and without rounding rows up.
* Memory-efficient attention's backward adds up the gradient of the queries in float32, in tiles of
  64 rows with two counters each (`.../cuda/mem_eff_attention/kernel_backward.h`,
  ``workspace_elements_gq``). Before that, in float32, it multiplies gradient and result.
* torch's own reductions, when no Triton kernel does the work: one with few results and many rows is
  divided among blocks of threads, which leave what they have in global memory, with a counter for
  each group of results. How it is divided follows from the sizes and from the card
  (`aten/src/ATen/native/cuda/Reduce.cuh`, ``setReduceConfig``).
* Norms of many tensors are added up from numbers of pieces of 65,536 elements
  (`aten/src/ATen/native/cuda/ForeachReduceOp.cu`).
* Adding by an index sorts the indices, with what cub needs to sort them
  (`aten/src/ATen/native/cuda/Indexing.cu`).

Each comes as the blocks that live together at the worst moment of a call: one block of the same
size would find other room. The tests compare them with what an H200 recorded.

What cuDNN takes for a convolution depends on the algorithm that it picks on the card, and is not
counted. cuBLAS has one workspace for all its calls: `cublas_workspace`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from fxremat.compat.absent.pretending import Properties
from fxremat.compat.sizes import size_bound
from fxremat.compat.tensors import outside_fake_mode
from fxremat.core.constants import GPU_PIECE_ELEMENTS
from fxremat.cost.device import card_named
from fxremat.memory.allocator_settings import round_up
from fxremat.runtime import kernels, quantised

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


def _ceildiv(size: int, by: int) -> int:
    return -(-size // by)


def _power_of_two(size: int) -> int:
    """The largest that is no larger."""
    return 1 << (max(size, 1).bit_length() - 1)


def scratch_of_reduction(
    inputs: int,
    results: int,
    itemsize: int,
    *,
    along: bool,
    card: Any,
    contiguous: bool = True,
) -> tuple[int, ...]:
    """Bytes of partial results and of counters; nothing where each result has one block.

    ``inputs`` are the elements of one result, ``itemsize`` is of what they are added up in.
    ``along`` the fastest dimension is what is reduced. The ``card`` is known by its properties, as
    torch gives them.
    """
    if not inputs or not results:
        return ()
    first, second = (inputs, results) if along else (results, inputs)
    wide = 1
    if contiguous and along and first >= FEWEST_WIDE:
        first //= WIDEST
    elif contiguous and not along:
        wide = next(n for n in (4, 2, 1) if results % n == 0)
        first //= wide
    most = MOST_THREADS // wide
    one, two = (min(_power_of_two(size), most) for size in (first, second))
    height = min(two, most // min(one, WARP))
    width = min(one, most // height)
    by_inputs, by_results = (width, 1) if along else (1, width)
    if _ceildiv(inputs, by_inputs) < min(height * FEWEST_VALUES, MOST_VALUES):
        return ()
    values = _ceildiv(inputs, by_inputs * height)  # that one thread adds up
    groups = _ceildiv(results // wide, by_results)  # of blocks, which share no result
    threads = card.max_threads_per_multi_processor
    at_once = card.multi_processor_count * (threads // (width * height))
    if values < MOST_VALUES or groups > at_once:
        return ()
    fewest = _ceildiv(values, MOST_VALUES)
    shared = max(min(_ceildiv(at_once, groups), _ceildiv(values, FEWEST_VALUES)), fewest)
    if shared == 1:
        return ()
    partial = itemsize * results * shared * (1 if along else width * wide)
    return partial, _COUNTER * groups


def blocks_of_reduction(
    card: Any, x: Any, dims: Sequence[int] | None = None, *_: Any, **__: Any
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


_FLOAT = 4
_INDEX = 8
_CUDNN_ALIGNMENT = 256
_CUB_BYTES = 4608
_PIECE = 65536
Blocks = tuple[int, ...]
"""Bytes of blocks that live at the same time."""


def cublas_workspace(capability: tuple[int, int]) -> int:
    """The workspaces of one thread: torch gives cuBLAS 32 MiB from Hopper on, else 8.1 MiB.

    The forward runs in one thread, the backward in another, and each has its own
    (`aten/src/ATen/cuda/CublasHandlePool.cpp`).
    """
    return 32 * 2**20 if capability >= (9, 0) else 4096 * 1024 * 2 + 16 * 8 * 1024


def _expanded(query: Any, key: Any) -> Blocks:
    """Gradients of keys and values for each head, where heads share them."""
    batch, heads, _, width = map(size_bound, query.shape)
    key_heads, columns = map(size_bound, key.shape[1:3])
    size = batch * heads * columns * width * int(query.dtype.itemsize)
    return (size, size) if key_heads != heads else ()


def _flash_backward(gradient: Any, query: Any, key: Any, *_: Any, **__: Any) -> Blocks:
    batch, heads, rows, width = map(size_bound, query.shape)
    long_rows = batch * heads * round_up(rows, 128)
    return (long_rows * _FLOAT, long_rows * round_up(width, 32) * _FLOAT, *_expanded(query, key))


def _cudnn_backward(gradient: Any, query: Any, key: Any, *_: Any, **__: Any) -> Blocks:
    batch, heads, rows, width = map(size_bound, query.shape)
    sums = batch * heads * rows * (width + 1) * _FLOAT
    return (sums + sum(_expanded(query, key)) + _CUDNN_ALIGNMENT,)


def _efficient_backward(gradient: Any, query: Any, *_: Any, **__: Any) -> Blocks:
    batch, heads, rows, width = map(size_bound, query.shape)
    sums = batch * heads * rows * _FLOAT
    tile = 64 * round_up(width, 64) * _FLOAT + 2 * _INDEX
    adding = (sums, batch * heads * _ceildiv(rows, 64) * tile)
    multiplying = (batch * heads * rows * width * _FLOAT, sums, sums)
    is_wide = query.dtype.itemsize == _FLOAT
    return max(adding, multiplying, key=sum) if is_wide else adding


def _index_put(target: Any, indices: Any, *_: Any, **__: Any) -> Blocks:
    given = [x for x in indices if isinstance(x, torch.Tensor)]
    count = max((size_bound(x.numel()) for x in given), default=0)
    of_all = count * _INDEX
    return (*(of_all,) * 4, 2 * of_all + count // 4 + _CUB_BYTES)


def _norms(tensors: Any, *_: Any, **__: Any) -> Blocks:
    """A number for each piece of each tensor, as many pieces as the largest one has."""
    pieces = max((_ceildiv(size_bound(x.numel()), _PIECE) for x in tensors), default=0)
    return (len(tensors) * pieces * _FLOAT,)


def _in_pieces(x: Any, *_: Any, **__: Any) -> Blocks:
    """At most, of the operators that encode floats piece by piece."""
    count = min(size_bound(x.numel()), GPU_PIECE_ELEMENTS)
    return (count * quantised.BYTES_PER_ELEMENT,)


FORMULAS: Mapping[Any, Callable[..., Blocks]] = {
    _ATEN._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _ATEN._scaled_dot_product_cudnn_attention.default: lambda *_, **__: (_CUDNN_ALIGNMENT,),
    _ATEN._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    _ATEN._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _ATEN.index_put.default: _index_put,
    _ATEN.index_put_.default: _index_put,
    _ATEN._unsafe_index_put.default: _index_put,
    _ATEN._index_put_impl_.default: _index_put,
    _ATEN._foreach_norm.Scalar: _norms,
    quantised.quantised: _in_pieces,
    quantised.as_fp8: _in_pieces,
}
"""Scratch memory by operator, of its arguments; tensors may be fake."""


def known_blocks(target: Any, args: Any, kwargs: Any, card: Any) -> Blocks | None:
    """What a library call takes, where that follows from its arguments and the card."""
    if IN_FORM_OUT.get(target, target) in REDUCTIONS:
        return blocks_of_reduction(card, *args, **kwargs)
    formula = FORMULAS.get(target)
    return None if formula is None else formula(*args, **kwargs)


HOPPER = card_named("H200").properties()


@dataclass(frozen=True)
class CudaScratch:
    """Answers as `fxremat.cost.workspaces.Workspaces` does, without running anything."""

    by_inductor: bool = False
    card: Properties = HOPPER

    def of_node(self, node: fx.Node) -> int:
        if node.target not in FORMULAS:  # reductions of the graph are loops of Inductor's
            return kernels.declared(node, self.of_call, by_inductor=self.by_inductor)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        return self.of_call(node.target, args, kwargs)

    def of_call(self, target: Any, args: Any, kwargs: Any) -> int:
        return sum(self.blocks_of_call(target, args, kwargs))

    def blocks_of_call(self, target: Any, args: Any, kwargs: Any) -> Blocks:
        """The same as blocks that live together."""
        if target in kernels.WORKSPACES:
            return (kernels.WORKSPACES[target](*args, **kwargs, measure=self.of_call),)
        return known_blocks(target, args, kwargs, self.card) or ()


_HAVE_CUBLAS: set[torch.device] = set()


def allocate_cublas(device: torch.device) -> None:
    """Have both workspaces allocated: whoever counts what is allocated from now on sees them.

    That of the thread that runs forwards, and that of backwards. They stay, so they come from no
    larger piece, of which the rest would be lost: what the allocator keeps goes back to the device
    before. Where nothing but deterministic algorithms may run, a product may be refused.
    """
    if device not in _HAVE_CUBLAS and torch.cuda.is_available():
        torch.cuda.empty_cache()
        _HAVE_CUBLAS.add(device)
    with outside_fake_mode(), torch.inference_mode(False), torch.enable_grad():
        small = torch.ones(2, 2, dtype=torch.float32, device=device, requires_grad=True)
        with suppress(RuntimeError):
            torch.autograd.grad((small @ small).sum(), small)

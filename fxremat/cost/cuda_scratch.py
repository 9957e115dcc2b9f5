"""Scratch memory inside CUDA library calls, from their sources: for cards that are not here.

* Flash attention's backward adds up the gradient of the queries in float32, and keeps a number for
  each row (`aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp`, ``mha_bwd``); where
  heads share keys, it makes gradients of keys and values for each head. cuDNN's is taken to need
  the same.
* Memory-efficient attention's backward adds up in float32 where its result has 16 bits
  (`.../cuda/mem_eff_attention/kernel_backward.h`, ``workspace_elements_gq``).
* Adding by an index sorts the indices, with what cub needs to sort them
  (`aten/src/ATen/native/cuda/Indexing.cu`).

What cuDNN takes for a convolution depends on the algorithm that it picks on the card, and is not
counted. cuBLAS has one workspace for all its calls: `cublas_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import fx

from fxremat import compat
from fxremat.cost.workspaces import declared
from fxremat.runtime import kernels, quantised

_ATEN = torch.ops.aten
_FLOAT = 4
_INDEX = 8


def cublas_bytes(capability: tuple[int, int]) -> int:
    """The workspaces of one thread: torch gives cuBLAS 32 MiB from Hopper on, else 8.1 MiB.

    The forward runs in one thread, the backward in another, and each has its own
    (`aten/src/ATen/cuda/CublasHandlePool.cpp`).
    """
    return 32 * 2**20 if capability >= (9, 0) else 4096 * 1024 * 2 + 16 * 8 * 1024


@cache
def allocate_cublas(device: torch.device) -> None:
    """Have both workspaces allocated: whoever counts what is allocated from now on sees them.

    Where nothing but deterministic algorithms may run, a product may be refused.
    """
    with compat.outside_fake_mode(), torch.inference_mode(False), torch.enable_grad():
        small = torch.ones(2, 2, device=device, requires_grad=True)
        with suppress(RuntimeError):
            torch.autograd.grad((small @ small).sum(), small)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _flash_backward(gradient: Any, query: Any, key: Any, *_: Any, **__: Any) -> int:
    batch, heads, rows, width = map(compat.size_bound, query.shape)
    key_heads, columns = map(compat.size_bound, key.shape[1:3])
    long_rows, wide = _up(rows, 128), _up(width, 32)
    for_rows = batch * heads * long_rows * (wide + 1) * _FLOAT
    expanded = 2 * batch * heads * columns * width * int(query.dtype.itemsize)
    return for_rows + (expanded if key_heads != heads else 0)


def _efficient_backward(gradient: Any, query: Any, *_: Any, **__: Any) -> int:
    batch, heads, rows, width = map(compat.size_bound, query.shape)
    sums = batch * heads * rows * _FLOAT
    if query.dtype.itemsize == _FLOAT:
        return sums
    return sums + batch * heads * _up(rows, 64) * _up(width, 64) * _FLOAT


def _index_put(target: Any, indices: Any, *_: Any, **__: Any) -> int:
    given = [x for x in indices if isinstance(x, torch.Tensor)]
    count = max((compat.size_bound(x.numel()) for x in given), default=0)
    return 5 * count * _INDEX


def _in_pieces(x: Any, *_: Any, **__: Any) -> int:
    """At most, of the operators that encode floats piece by piece."""
    count = min(compat.size_bound(x.numel()), quantised.CHUNK_ON_GPU)
    return count * quantised.BYTES_PER_ELEMENT


FORMULAS: Mapping[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _ATEN._scaled_dot_product_cudnn_attention_backward.default: _flash_backward,
    _ATEN._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _ATEN.index_put.default: _index_put,
    _ATEN.index_put_.default: _index_put,
    _ATEN._unsafe_index_put.default: _index_put,
    _ATEN._index_put_impl_.default: _index_put,
    quantised.quantised: _in_pieces,
    quantised.as_fp8: _in_pieces,
}
"""Bytes of scratch memory by operator, of its arguments; tensors may be fake."""


class CudaScratch:
    """Answers as `fxremat.cost.workspaces.Workspaces` does, without running anything."""

    def of_node(self, node: fx.Node) -> int:
        """The scratch bytes of a node of an FX graph."""
        if node.target not in FORMULAS:
            return declared(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        return self.of_call(node.target, args, kwargs)

    def of_call(self, target: Any, args: Any, kwargs: Any) -> int:
        """The scratch bytes of ``target(*args, **kwargs)``."""
        if target in kernels.WORKSPACES:
            return kernels.WORKSPACES[target](*args, **kwargs, measure=self.of_call)
        formula = FORMULAS.get(target)
        return 0 if formula is None else formula(*args, **kwargs)

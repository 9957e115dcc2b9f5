"""Fused attention kernels, each by the device and the operands that it takes.

All take [B, H, T, D] in any order of memory that has D last, and give the output, with what their
backward wants besides: the logarithms of the rows' sums, and on CUDA the state of a generator that
is not used, for nothing is dropped. What they take is checked where torch chooses among them
(`aten/src/ATen/native/transformers/`: `sdp_utils_cpp.cpp`, `cuda/sdp_utils.cpp`).

Those for CUDA are written from there: they were looked at in graphs of fake tensors only, and never
ran on a GPU.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from fxremat.passes.nodes import fake

_ATEN = torch.ops.aten
Add = Callable[..., fx.Node]
Three = tuple[fx.Node, fx.Node, fx.Node]


@dataclass(frozen=True)
class Inputs:
    """Query [B, H, T, D], key [B, H, S, D], value [B, H, S, E], what is added, and the scale."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    bias: fx.Node | None
    is_causal: bool
    scale: float

    @property
    def operands(self) -> Three:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def scores(self) -> list[int]:
        """[B, H, T, S]."""
        return [*fake(self.query).shape[:3], fake(self.key).shape[2]]


@dataclass(frozen=True)
class Kept:
    """What the backward wants of the forward: the output first."""

    output: fx.Node
    more: tuple[fx.Node, ...]


class AttentionKernel(Protocol):
    """A forward and its backward."""

    @property
    def name(self) -> str:
        """Unique among those of a device."""

    @property
    def device(self) -> str:
        """Where it runs."""

    def takes(self, given: Inputs) -> bool:
        """Whether it can compute this."""

    def forward(self, add: Add, given: Inputs) -> Kept:
        """Put the forward in."""

    def backward(self, add: Add, given: Inputs, kept: Kept, gradient: fx.Node) -> Three:
        """Put the backward in: the gradients of query, key and value."""


def _items(add: Add, call: fx.Node, *positions: int) -> tuple[fx.Node, ...]:
    return tuple(add(operator.getitem, call, position) for position in positions)


def _widths(given: Inputs) -> set[int]:
    return {fake(node).shape[-1] for node in given.operands}


@dataclass(frozen=True)
class OnCpu:
    """Flash attention on the CPU: masks may be broadcast, and in float32 for any query."""

    name: str = "cpu"
    device: str = "cpu"

    def takes(self, given: Inputs) -> bool:
        """One width; the type of the mask is that of the query, or float32."""
        query = fake(given.query)
        types = {query.dtype, torch.float32}
        fits = given.bias is None or fake(given.bias).dtype in types
        return len(_widths(given)) == 1 and fits

    def forward(self, add: Add, given: Inputs) -> Kept:
        """Output and logarithms."""
        target = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
        call = add(target, *given.operands, 0.0, given.is_causal, **self._named(given))
        output, logarithms = _items(add, call, 0, 1)
        return Kept(output, (logarithms,))

    def backward(self, add: Add, given: Inputs, kept: Kept, gradient: fx.Node) -> Three:
        """All three at once."""
        target = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
        args = (gradient, *given.operands, kept.output, *kept.more, 0.0, given.is_causal)
        query, key, value = _items(add, add(target, *args, **self._named(given)), 0, 1, 2)
        return query, key, value

    def _named(self, given: Inputs) -> dict[str, Any]:
        return {"attn_mask": given.bias, "scale": given.scale}


def _capability() -> tuple[int, int]:
    """Of the GPU that is here; without one, of the oldest that has all kernels."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)


def _has_little_shared_memory() -> bool:
    """Cards on which flash attention has no backward for widths from 193 to 224."""
    return (8, 6) <= _capability() <= (8, 9) or _capability()[0] == 12


@dataclass(frozen=True)
class FlashOnCuda:
    """FlashAttention-2: no mask but the causal one, 16 bits, widths up to 256."""

    name: str = "flash"
    device: str = "cuda"
    most_width: int = 256

    def takes(self, given: Inputs) -> bool:
        """One width, a multiple of 8: others would have to be padded."""
        query, widths = fake(given.query), _widths(given)
        return (
            torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
            and _capability() >= (8, 0)
            and query.dtype in (torch.float16, torch.bfloat16)
            and given.bias is None
            and len(widths) == 1
            and all(width % 8 == 0 and width <= self.most_width for width in widths)
            and not (_has_little_shared_memory() and any(192 < width <= 224 for width in widths))
        )

    def forward(self, add: Add, given: Inputs) -> Kept:
        """Output, logarithms, and the state of the generator in two parts."""
        target = _ATEN._scaled_dot_product_flash_attention.default
        call = add(target, *given.operands, 0.0, given.is_causal, scale=given.scale)
        output, *more = _items(add, call, 0, 1, 6, 7)
        return Kept(output, tuple(more))

    def backward(self, add: Add, given: Inputs, kept: Kept, gradient: fx.Node) -> Three:
        """Lengths of sequences are given as numbers: all are as long."""
        target = _ATEN._scaled_dot_product_flash_attention_backward.default
        logarithms, seed, offset = kept.more
        rows, columns = given.scores[2:]
        lengths = (None, None, rows, columns)
        args = (gradient, *given.operands, kept.output, logarithms, *lengths, 0.0)
        call = add(target, *args, given.is_causal, seed, offset, scale=given.scale)
        query, key, value = _items(add, call, 0, 1, 2)
        return query, key, value


@dataclass(frozen=True)
class EfficientOnCuda:
    """Memory-efficient attention: any mask, 32 bits too, keys and values of different widths."""

    name: str = "memory-efficient"
    device: str = "cuda"

    def takes(self, given: Inputs) -> bool:
        """Widths fill 16 bytes (float32: four numbers); rows of a mask are a multiple of 16."""
        query = fake(given.query)
        aligned = 4 if query.dtype == torch.float32 else 8
        return (
            torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
            and _capability() >= (8, 0)
            and query.dtype in (torch.float32, torch.float16, torch.bfloat16)
            and all(width % aligned == 0 for width in _widths(given))
            and (given.bias is None or self._takes_bias(given, fake(given.bias)))
        )

    def _takes_bias(self, given: Inputs, bias: torch.Tensor) -> bool:
        fits = given.scores[3] % 16 == 0 and bias.shape[3] == given.scores[3]
        return fits and bias.dtype == fake(given.query).dtype

    def _bias(self, add: Add, given: Inputs) -> fx.Node | None:
        if given.bias is None or list(fake(given.bias).shape) == given.scores:
            return given.bias
        return add(_ATEN.expand.default, given.bias, given.scores)

    def forward(self, add: Add, given: Inputs) -> Kept:
        """Output, logarithms, seed and offset; the last is the mask once more, at full size."""
        bias = self._bias(add, given)
        target = _ATEN._scaled_dot_product_efficient_attention.default
        args = (*given.operands, bias, True, 0.0, given.is_causal)
        more = _items(add, add(target, *args, scale=given.scale), 0, 1, 2, 3)
        return Kept(more[0], (*more[1:], *([] if bias is None else [bias])))

    def backward(self, add: Add, given: Inputs, kept: Kept, gradient: fx.Node) -> Three:
        """Without the gradient of the mask."""
        target = _ATEN._scaled_dot_product_efficient_attention_backward.default
        logarithms, seed, offset, *bias = kept.more
        mask = bias[0] if bias else None
        inputs = (*given.operands, mask, kept.output, logarithms, seed, offset)
        wanted = [True, True, True, False]
        args = (gradient, *inputs, 0.0, wanted, given.is_causal)
        query, key, value = _items(add, add(target, *args, scale=given.scale), 0, 1, 2)
        return query, key, value


KERNELS: tuple[AttentionKernel, ...] = (OnCpu(), FlashOnCuda(), EfficientOnCuda())

"""`scaled_dot_product_attention` as CUDA would run it, on tensors that lie elsewhere.

Which kernel runs is torch's choice at run time: by capability, dtype, head size, mask and layout
(`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`), and each wants its operands prepared in
its own way (`attention.cpp`). On the CPU torch would choose another. So calls in Dynamo's graph are
replaced by one that chooses for a capability, before autograd sees them.

Nested tensors are not handled, and cuDNN is taken to be 9.15.1 or later, as in torch's own wheels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxremat.compat.absent.autocast import low_precision
from fxremat.compat.sizes import size_bound

_ATEN = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
MOST_BATCH = 65535
"""cuDNN's limit of batch and heads."""


@dataclass(frozen=True)
class Call:
    """One attention: query [B, H, T, D], key [B, K, S, D], value [B, K, S, E], what is added."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None
    grouped: bool

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        """Whether a gradient is wanted."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.operands)

    @property
    def widths(self) -> tuple[int, int, int]:
        """The last sizes of query, key and value."""
        query, key, value = (size_bound(x.shape[-1]) for x in self.operands)
        return query, key, value

    @property
    def lengths(self) -> tuple[Any, Any, Any]:
        """T, S and S; they may be symbolic."""
        query, key, value = (x.shape[2] for x in self.operands)
        return query, key, value

    def is_dense(self) -> bool:
        """Four dimensions, one dtype, nothing empty, batches that fit, heads that divide."""
        one_type = len({x.dtype for x in self.operands}) == 1
        if not one_type or any(x.dim() != 4 for x in self.operands):
            return False
        batches = {size_bound(x.shape[0]) for x in self.operands}
        heads, keys, values = (size_bound(x.shape[1]) for x in self.operands)
        fits = keys == values and (heads == keys or (self.grouped and heads % keys == 0))
        return len(batches) == 1 and fits and all(map(size_bound, self.lengths))

    def rows_lie_together(self) -> bool:
        """Whether the last dimension is dense."""
        with_mask = self.operands if self.mask is None else (*self.operands, self.mask)
        return all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in with_mask)


Capability = tuple[int, int]


def for_capability(gm: fx.GraphModule, capability: Capability) -> None:
    """Have each attention of a Dynamo graph, and of its subgraphs, run as on that capability."""
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if node.op == "call_function" and node.target in _ATTENTION:
                node.target = attention
                node.kwargs = {**node.kwargs, "capability": capability}
        module.recompile()


_ATTENTION = (
    torch.nn.functional.scaled_dot_product_attention,
    torch._C._nn.scaled_dot_product_attention,
    _ATEN.scaled_dot_product_attention.default,
)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    capability: Capability,
) -> Tensor:
    """Attention by the kernel that CUDA would take; arguments as torch's own have them."""
    with low_precision() as low:
        query, key, value = map(low, (query, key, value))
        mask = None if attn_mask is None else low(attn_mask)
        call = Call(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
        return chosen_kernel(call, capability)(call)


def chosen_kernel(call: Call, capability: Capability) -> Callable[[Call], Tensor]:
    """The first that takes the call, in the order of that capability."""
    order = (
        (_cudnn, _flash, _efficient) if capability[0] in (9, 10) else (_flash, _efficient, _cudnn)
    )
    takes = {_cudnn: _cudnn_takes, _flash: _flash_takes, _efficient: _efficient_takes}
    return next((kernel for kernel in order if takes[kernel](call, capability)), _math)


def _flash_takes(call: Call, capability: Capability) -> bool:
    enabled = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    query, key, value = call.widths
    if not (enabled and (8, 0) <= capability <= (12, 1) and call.mask is None and call.is_dense()):
        return False
    if call.query.dtype not in _HALF or not query == key == value <= 256:
        return False
    narrow = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    if call.trains and narrow and not (query <= 192 or (call.dropout == 0 and query > 224)):
        return False
    square = size_bound(call.lengths[0]) == size_bound(call.lengths[1])
    return (square or not call.is_causal) and call.rows_lie_together()


def _efficient_takes(call: Call, capability: Capability) -> bool:
    enabled = torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
    if not (enabled and call.is_dense() and call.rows_lie_together()):
        return False
    dtype, is_ampere = call.query.dtype, capability >= (8, 0)
    if dtype not in (torch.float16, torch.float32, *(_HALF if is_ampere else ())):
        return False
    # numbers that a row is a multiple of, for matmuls of that dtype
    aligned = 4 if is_ampere else 1
    if is_ampere or dtype in _HALF:  # by tensor cores
        aligned = max(aligned, 16 // dtype.itemsize)
    query, key, value = call.widths
    return query == key and query % aligned == value % aligned == 0


def _cudnn_takes(call: Call, capability: Capability) -> bool:
    enabled = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    fits = (8, 0) <= capability <= (12, 1) and call.query.dtype in _HALF
    if not (enabled and fits and call.is_dense() and call.rows_lie_together()):
        return False
    if torch.are_deterministic_algorithms_enabled() or (16 * call.dropout) % 1:
        return False
    query, _, value = call.widths
    batch, heads = map(size_bound, call.query.shape[:2])
    rows, columns = map(size_bound, call.lengths[:2])
    return (
        max(batch, heads) <= MOST_BATCH
        and max(query, value) <= 128
        and query % 8 == value % 8 == 0
        and columns != 1
        and (call.dropout == 0 or rows != 1)
    )


def _added(call: Call) -> Tensor | None:
    """The mask as numbers to add: what is False is left out."""
    if call.mask is None or call.mask.dtype is not torch.bool:
        return call.mask
    zeros = torch.zeros((), dtype=call.query.dtype, device=call.mask.device)
    return torch.where(call.mask, zeros, -math.inf)


def _cudnn(call: Call) -> Tensor:
    """cuDNN's fused attention, which repeats a mask over batch and heads by itself."""
    op = _ATEN._scaled_dot_product_cudnn_attention.default
    how = call.trains, call.dropout, call.is_causal, False
    return _result(op(*call.operands, _added(call), *how, scale=call.scale))


def _flash(call: Call) -> Tensor:
    """FlashAttention-2; widths that are no multiple of 8 are padded."""
    width = call.widths[0]
    scale = 1 / math.sqrt(width) if call.scale is None else call.scale
    padded = [_padded(x, 8) for x in call.operands]
    op = _ATEN._scaled_dot_product_flash_attention.default
    output = _result(op(*padded, call.dropout, call.is_causal, False, scale=scale))
    return output if output.shape[-1] == width else output[..., :width]


def _efficient(call: Call) -> Tensor:
    """Memory-efficient attention, with rows of the mask padded to 16 numbers."""
    query, key, value = call.operands
    if call.grouped:  # keys and values once for each head of the queries
        times = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    mask = _added(call)
    if mask is not None:
        mask = mask.expand(*query.shape[:3], key.shape[2])
        mask = _padded(mask, 16)[..., : mask.shape[-1]] if mask.shape[-1] % 16 else mask
    op = _ATEN._scaled_dot_product_efficient_attention.default
    how = call.trains, call.dropout, call.is_causal
    return _result(op(query, key, value, mask, *how, scale=call.scale))


def _math(call: Call) -> Tensor:
    """Attention written as matrix products and a softmax."""
    op = _ATEN._scaled_dot_product_attention_math.default
    how = _added(call), call.dropout, call.is_causal, None
    return _result(op(*call.operands, *how, scale=call.scale, enable_gqa=call.grouped))


def _result(kept: tuple[Tensor, ...]) -> Tensor:
    """Of what a kernel gives, what is not for its backward only."""
    return kept[0]


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    short = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, short)) if short else tensor

"""Kernels of others, as custom ops with backwards of their own, and a model that calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LIBRARY = "fxremat_stand_ins"
"""None of ours: of a library that is known nothing is tried."""


def op(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """A custom op that declares to write into nothing."""
    made = torch.library.custom_op(f"{LIBRARY}::{name}", function, mutates_args=())
    made.register_fake(fake)
    return made


# --- attention, a norm and a loss, each with what its backward reads beside the result -----------


def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return out.contiguous(), total.contiguous()


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = backward(grad, q, k, v, out, total, 0.0, False)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return x * scale * weight, scale


def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    normed = x * scale
    g = grad * weight
    rows = tuple(range(x.dim() - 1))
    return scale * (g - normed * (g * normed).mean(-1, keepdim=True)), (grad * normed).sum(rows)


def _loss(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total = logits.logsumexp(-1)
    return (total - logits.gather(-1, target[:, None])[:, 0]).mean(), total


def _loss_backward(grad: Tensor, logits: Tensor, target: Tensor, total: Tensor) -> Tensor:
    p = (logits - total[:, None]).exp()
    rows = torch.arange(len(target), device=target.device)
    p[rows, target] -= 1
    return p * (grad / len(target))


attention = op(
    "attention", _attention, lambda q, k, v: (q.new_empty(q.shape), q.new_empty(q.shape[:-1]))
)
attention_backward = op(
    "attention_backward",
    _attention_backward,
    lambda grad, q, k, v, out, total: tuple(x.new_empty(x.shape) for x in (q, k, v)),
)
norm = op("norm", _norm, lambda x, w: (x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1))))
norm_backward = op(
    "norm_backward", _norm_backward, lambda g, x, w, s: (x.new_empty(x.shape), w.new_empty(w.shape))
)
loss = op("loss", _loss, lambda x, t: (x.new_empty(()), x.new_empty(x.shape[:-1])))
loss_backward = op("loss_backward", _loss_backward, lambda g, x, t, s: x.new_empty(x.shape))

attention.register_autograd(
    lambda ctx, grad, _: attention_backward(grad.contiguous(), *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)
norm.register_autograd(
    lambda ctx, grad, _: norm_backward(grad.contiguous(), *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output[1]),
)
loss.register_autograd(
    lambda ctx, grad, _: (loss_backward(grad, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output[1]),
)


class Calls(NamedTuple):
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    norm: Callable[[Tensor, Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]


THEIRS = Calls(
    lambda q, k, v: attention(q, k, v)[0], lambda x, w: norm(x, w)[0], lambda x, t: loss(x, t)[0]
)
TORCHS = Calls(
    F.scaled_dot_product_attention, lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), F.cross_entropy
)


class Transformer(nn.Module):
    """A few blocks and a loss; attention, norms and the loss are what ``calls`` says."""

    def __init__(self, calls: Calls, width: int = 64, blocks: int = 4, words: int = 128) -> None:
        super().__init__()
        self.calls = calls
        self.embed = nn.Embedding(words, width)
        self.norms = nn.ParameterList(torch.ones(width) for _ in range(2 * blocks + 1))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(blocks))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(blocks))
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        batch, length, width = x.shape
        norms = iter(self.norms)
        for qkv, up, down in zip(self.qkv, self.up, self.down, strict=True):
            parts = qkv(self.calls.norm(x, next(norms))).view(batch, length, 3, 4, width // 4)
            q, k, v = (one.contiguous() for one in parts.permute(2, 0, 3, 1, 4).unbind(0))
            y = self.calls.attention(q, k, v)
            x = x + y.transpose(1, 2).reshape(batch, length, width)
            x = x + down(F.gelu(up(self.calls.norm(x, next(norms)))))
        logits = self.head(self.calls.norm(x, next(norms)))
        return self.calls.loss(logits.flatten(0, 1), target.flatten())


def words(batch: int = 8, length: int = 64) -> tuple[Tensor, Tensor]:
    ids = torch.randint(128, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

"""Attention written by hand, in many spellings, and inputs for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.graphs import Net

Function = Callable[..., Any]
Inputs = Callable[[torch.dtype], Sequence[Any]]
INF = math.inf


def weights(scores: Tensor, like: Tensor) -> Tensor:
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(like.dtype)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def wide_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights(q @ k.mT * 0.3, q) @ v


def scaled_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q * 0.5) @ (k.mT * 0.5)).softmax(-1) @ v


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 0.25
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def three_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.baddbmm(torch.zeros(1, 1, 1, dtype=q.dtype), q, k.mT, alpha=0.4)
    return torch.bmm(scores.softmax(-1), v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return (q @ k.mT * 0.3).masked_fill(~mask, -INF).softmax(-1) @ v


def added_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.full((q.shape[-2], k.shape[-2]), -INF, dtype=q.dtype).triu(1)
    return (q @ k.mT * 0.3 + mask).softmax(-1) @ v


def filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(mask, -INF).softmax(-1) @ v


def finite(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT * 0.3
    lowest = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype)
    return torch.where(~mask, scores, lowest).softmax(-1) @ v


def filled_twice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return (q @ k.mT * 0.3).masked_fill(later, -1e9).masked_fill(mask, -1e9).softmax(-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + mask).softmax(-1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    slopes = torch.arange(k.shape[-2]) * torch.tensor([-0.1, -0.2, -0.3])[:, None, None]
    scores = weights((q @ k.mT * 0.3 + slopes) + (1 - mask.float()) * -1e4, q)
    return scores @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :1].repeat_interleave(q.shape[1], 1) for x in (k, v))
    return (q @ k.mT * 0.3).softmax(-1) @ v


def expanded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return wide_softmax(q, k, v)


def fused_projection(net: Any, x: Tensor) -> Tensor:
    """GPT-2 and nanoGPT: one projection, heads in front, a mask that is a buffer."""
    batch, length, width = x.shape
    parts = net.qkv(x).split(width, dim=2)
    q, k, v = (part.view(batch, length, 2, width // 2).transpose(1, 2) for part in parts)
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(net.mask[:, :, :length, :length] == 0, -INF)
    y = F.softmax(scores, dim=-1) @ v
    return net.out(y.transpose(1, 2).contiguous().view(batch, length, width))  # type: ignore[no-any-return]


def block(dtype: torch.dtype = torch.float32, width: int = 16, most: int = 8) -> Net:
    torch.manual_seed(1)
    parts = {"qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)}
    mask = torch.ones(most, most).tril()[None, None]
    return Net(fused_projection, **parts, mask=mask).to(dtype)


def heads(dtype: torch.dtype, rows: int = 5, columns: int = 7, width: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 3, rows, width), (2, 3, columns, width), (2, 3, columns, width)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def turned(dtype: torch.dtype) -> list[Tensor]:
    """[B, H, T, D], heads behind in memory for the query, rows behind for the key."""
    q, k, v = (x.detach() for x in heads(dtype))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    return [x.requires_grad_() for x in (q, k.mT.contiguous().mT, v)]


def hidden(*dead: int) -> Tensor:
    """True for keys that are masked out; of these rows, for all."""
    mask = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(3)) < 0.3
    mask[..., 0] = False
    for row in dead:
        mask[1, :, row] = True
    return mask


def low(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -INF)


CASES: dict[str, tuple[Function, Inputs]] = {
    "plain": (plain, heads),
    "plain, turned": (plain, turned),
    "one head": (plain, lambda d: [x[:1, :1].detach().requires_grad_() for x in heads(d)]),
    "softmax in 32 bits": (wide_softmax, heads),
    "scaled before": (scaled_before, heads),
    "einsum": (einsum, lambda d: [
        x.detach().transpose(1, 2).contiguous().requires_grad_() for x in heads(d, 7)]),
    "three dimensions": (three_dimensions, heads),
    "causal": (causal, lambda d: heads(d, 7)),
    "causal, fewer queries": (causal, heads),
    "causal, added": (added_causal, lambda d: heads(d, 7)),
    "filled": (filled, lambda d: [*heads(d), hidden()]),
    "filled, rows without keys": (filled, lambda d: [*heads(d), hidden(2, 3)]),
    "filled, head without keys": (filled, lambda d: [*heads(d), hidden(0, 1, 2, 3, 4)]),
    "filled for all": (filled, lambda d: [*heads(d), hidden()[1, 0]]),
    "finite": (finite, lambda d: [*heads(d), hidden()]),
    "finite, rows without keys": (finite, lambda d: [*heads(d), hidden(2, 3)]),
    "filled twice": (filled_twice, lambda d: [*heads(d), hidden(0, 4)]),
    "added": (added, lambda d: [*heads(d), torch.randn(2, 1, 5, 7, dtype=d)]),
    "added, turned": (added, lambda d: [*heads(d), torch.randn(3, 7, 5, dtype=d).mT]),
    "added to keys": (added, lambda d: [*heads(d), low(hidden()[:, :, :1], d)]),
    "added, rows without keys": (added, lambda d: [*heads(d), low(hidden(1), d)]),
    "padded, with slopes": (padded, lambda d: [*heads(d), ~hidden()[:, :, 2:3]]),
    "grouped": (grouped, heads),
    "grouped, expanded": (expanded, heads),
    "values alone": (lambda q, k, v: plain(q.detach(), k.detach(), v), heads),
    "values fixed": (lambda q, k, v: wide_softmax(q, k, v.detach()), heads),
    "fused projection": (block(), lambda d: [torch.randn(2, 6, 16, dtype=d)]),
}  # fmt: skip


# --- what is no attention, or not only ----------------------------------------------------


class Halved(torch.autograd.Function):
    """Half of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.5


def another_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores: Tensor = Halved.apply(q @ k.mT)  # type: ignore[no-untyped-call]
    return scores.softmax(-1) @ v


ALONE: dict[str, tuple[Function, Inputs]] = {
    "dropout": (lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.5) @ v, heads),
    "a bias to be learnt": (added, lambda d: [*heads(d), torch.randn(3, 5, 7).requires_grad_()]),
    "weights read elsewhere": (lambda q, k, v: ((p := (q @ k.mT).softmax(-1)) @ v, p), heads),
    "scores read elsewhere": (lambda q, k, v: ((s := q @ k.mT).softmax(-1) @ v, s), heads),
    "another gradient": (another_gradient, heads),
    "softmax over queries": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, heads),
    "wider values": (lambda q, k, v: plain(q, k, torch.cat([v, v], -1)), heads),
    "one query": (plain, lambda d: heads(d, 1)),
    "no mask": (
        lambda q, k, v, m: (q @ k.mT).masked_fill(m, 0.0).softmax(-1) @ v,
        lambda d: [*heads(d), hidden()],
    ),
    "a negative scale": (lambda q, k, v: (q @ k.mT * -0.3).softmax(-1) @ v, heads),
    "scaled behind the mask": (
        lambda q, k, v, m: ((q @ k.mT + m) * 0.3).softmax(-1) @ v,
        lambda d: [*heads(d), torch.randn(5, 7)],
    ),
    "added and filled in": (
        lambda q, k, v, m: (q @ k.mT + m.float()).masked_fill(m, -INF).softmax(-1) @ v,
        lambda d: [*heads(d), hidden()],
    ),
}

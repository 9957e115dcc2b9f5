"""Parts that several networks share: the base class, attention, the MLP and the pre-norm block."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Spelling = Literal["fused", "plain", "biased"]
"""Attention by torch's function, or in plain ops with a mask filled in, or with one added."""
Batch = tuple[Tensor, Tensor]
Blocks = list[tuple[nn.Module, str]]


class Network(nn.Module):
    """A training model: `forward(inputs, targets)` returns the scalar loss."""

    def sample(self, batch: int, generator: torch.Generator) -> Batch:
        """Random inputs and targets of the right shape, on the CPU."""
        raise NotImplementedError

    def checkpoint_blocks(self) -> Blocks:
        """The (parent, attribute) places of the blocks a user would checkpoint by hand."""
        raise NotImplementedError

    def units(self) -> Blocks:
        """The same of what a user would compile by itself: blocks, and a head with its loss."""
        heads = [(self, name) for name, one in self.named_children() if isinstance(one, TokenHead)]
        return [*self.checkpoint_blocks(), *heads]


def children_of(*parents: nn.Module) -> Blocks:
    """The places of all direct children of `parents`."""
    return [(parent, name) for parent in parents for name, _ in parent.named_children()]


def random_tokens(shape: tuple[int, ...], vocabulary: int, generator: torch.Generator) -> Tensor:
    """Uniform token numbers."""
    return torch.randint(vocabulary, shape, generator=generator)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over the last dimension."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class TokenHead(nn.Module):
    """The last norm, the logits and their loss in one module, which can be compiled by itself.

    Compiled together, logits need not be in memory as a whole.
    """

    def __init__(self, norm: nn.Module, linear: nn.Linear) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return token_loss(self.linear(self.norm(x)), targets)


def dropout_layer(p: float) -> nn.Module:
    """Dropout, or nothing at all when `p` is zero (no random op in the graph)."""
    return nn.Dropout(p) if p else nn.Identity()


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, heads * k) -> (B, heads, T, k)."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, heads, T, k) -> (B, T, heads * k)."""
    return x.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Multi-head self-attention with one fused projection to queries, keys and values.

    Written in plain ops it is causal, and without dropout.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool,
        dropout: float = 0.0,
        spelling: Spelling = "fused",
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout, self.spelling = heads, causal, dropout, spelling
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        if self.spelling == "fused":
            p = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=p)
        else:
            y = plain_attention(q, k, v, bias)
        result: Tensor = self.out(merge_heads(y))
        return result


def plain_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Attention in plain ops: ``bias`` is added to its scores; None masks what comes later."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if bias is None:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    else:
        scores = scores + bias
    mixed: Tensor = scores.softmax(-1) @ v
    return mixed


class CrossAttention(nn.Module):
    """Multi-head attention of `x` over `context`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q = split_heads(self.q(x), self.heads)
        k, v = (split_heads(part, self.heads) for part in self.kv(context).chunk(2, dim=-1))
        result: Tensor = self.out(merge_heads(F.scaled_dot_product_attention(q, k, v)))
        return result


class BareRMSNorm(nn.Module):
    """RMSNorm written by hand, without a scale, as in the first speedruns of nanoGPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class MLP(nn.Module):
    """Linear, GELU, linear."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


class Block(nn.Module):
    """Pre-norm Transformer block: self-attention, then the MLP."""

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool,
        dropout: float = 0.0,
        spelling: Spelling = "fused",
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention = SelfAttention(width, heads, causal, dropout, spelling)
        self.mlp = MLP(width, 4 * width)
        self.drop = dropout_layer(dropout)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x), bias))
        result: Tensor = x + self.drop(self.mlp(self.norm2(x)))
        return result

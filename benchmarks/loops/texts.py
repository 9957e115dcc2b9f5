"""Models of texts for `benchmarks.loops`: BERT, T5, Llama, LoRA, Gemma-2 and DeBERTa.

Shapes, dtypes and operators follow the models of Hugging Face's transformers that the names stand
for, with their default configuration but for what is said here. Those with ``low`` precision keep
their weights in float32 and run under autocast to bfloat16; the others are bfloat16 throughout.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nets.language import rotary_tables, rotate
from ..nets.layers import merge_heads, split_heads, token_loss

Made = tuple[nn.Module, tuple[Tensor, ...]]
BATCH_OF_TEXTS = 32
DROPOUT = 0.1


class Low(nn.Module):
    """Runs a model under autocast to bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss: Tensor = self.model(*inputs)
            return loss


def words(vocabulary: int, *shape: int) -> Tensor:
    """Random tokens."""
    return torch.randint(3, vocabulary, shape)


class Attention(nn.Module):
    """Separate projections; the scores may be masked, and dropped."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        q, k, v = (split_heads(one(x), self.heads) for one in (self.q, self.k, self.v))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, p, is_causal=causal)
        result: Tensor = self.out(merge_heads(y))
        return result


class Embedded(nn.Module):
    """Tokens and positions, and kinds of tokens where there are more; normed and dropped."""

    def __init__(self, vocabulary: int, width: int, length: int, kinds: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = nn.Embedding(length, width)
        self.kinds = nn.Embedding(kinds, width) if kinds else None
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(DROPOUT)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        if self.kinds is not None:
            x = x + self.kinds(torch.zeros_like(text))
        result: Tensor = self.drop(self.norm(x))
        return result


class BertBlock(nn.Module):
    """LayerNorm after each sum; dropout on all that is added."""

    def __init__(self, width: int, heads: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        x = self.norm1(self.drop(self.attention(x, *more)) + x)
        result: Tensor = self.norm2(self.drop(self.down(F.gelu(self.up(x)))) + x)
        return result


class Bert(nn.Module):
    """BERT for masked words: all of them are guessed, by a head tied to the embedding."""

    def __init__(self, width: int, heads: int, layers: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.embedded = Embedded(vocabulary, width, length, 2)
        self.blocks = nn.ModuleList(
            BertBlock(width, heads, Attention(width, heads, DROPOUT)) for _ in range(layers)
        )
        self.transform, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embedded.tokens.weight

    def forward(self, text: Tensor, there: Tensor, targets: Tensor) -> Tensor:
        x = self.embedded(text)
        mask = there.bool()[:, None, None, :].expand(-1, 1, text.shape[1], -1)
        for block in self.blocks:
            x = block(x, mask)
        return token_loss(self.head(self.norm(F.gelu(self.transform(x)))), targets)


def bert() -> Made:
    """12 layers of 1,024, a batch of 32 x 512, low precision."""
    text = words(30522, BATCH_OF_TEXTS, 512)
    model = Bert(1024, 16, 12, 30522, 512)
    return Low(model), (text, torch.ones_like(text), text.clone())


class Scale(nn.Module):
    """RMSNorm in float32; ``one_more`` than its weight scales, as Gemma's does."""

    def __init__(self, width: int, one_more: bool = False) -> None:
        super().__init__()
        self.weight, self.one_more = nn.Parameter(torch.ones(width)), one_more

    def forward(self, x: Tensor) -> Tensor:
        full = x.float()
        normed = full * torch.rsqrt(full.square().mean(-1, keepdim=True) + 1e-6)
        if self.one_more:
            return (normed * (1.0 + self.weight.float())).type_as(x)
        return self.weight * normed.type_as(x)


class T5Attention(nn.Module):
    """Attention without biases and scale; a bias by distance is added to the scores."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, of: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (
            split_heads(f(a), self.heads) for f, a in ((self.q, x), (self.k, of), (self.v, of))
        )
        p = DROPOUT if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, bias.expand(len(q), -1, -1, -1), p, scale=1.0)
        result: Tensor = self.out(merge_heads(y))
        return result


class T5Block(nn.Module):
    """Attention to itself, in the decoder attention to the encoder, and a gated MLP."""

    def __init__(self, width: int, heads: int, hidden: int, decodes: bool) -> None:
        super().__init__()
        self.attention = T5Attention(width, heads)
        self.cross = T5Attention(width, heads) if decodes else None
        self.norms = nn.ModuleList(Scale(width) for _ in range(2 + decodes))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down, self.drop = nn.Linear(hidden, width, bias=False), nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.norms[0](x)
        x = x + self.drop(self.attention(y, y, bias))
        if self.cross is not None and memory is not None:
            none = x.new_zeros(1, self.attention.heads, x.shape[1], memory.shape[1])
            x = x + self.drop(self.cross(self.norms[1](x), memory, none))
        y = self.norms[-1](x)
        y = F.gelu(self.gate(y), approximate="tanh") * self.up(y)
        result: Tensor = x + self.drop(self.down(self.drop(y)))
        return result


class T5Stack(nn.Module):
    """The blocks of the encoder or of the decoder, and their bias by distance."""

    def __init__(self, width: int, heads: int, hidden: int, layers: int, decodes: bool) -> None:
        super().__init__()
        self.decodes = decodes
        self.blocks = nn.ModuleList(T5Block(width, heads, hidden, decodes) for _ in range(layers))
        self.distance, self.norm = nn.Embedding(32, heads), Scale(width)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        bias = self.distance(self.buckets(x.shape[1], x.device)).permute(2, 0, 1)[None]
        if self.decodes:
            later = torch.full(bias.shape[-2:], -torch.inf, dtype=x.dtype, device=x.device).triu(1)
            bias = bias + later
        x = self.drop(x)
        for block in self.blocks:
            x = block(x, bias, memory)
        result: Tensor = self.drop(self.norm(x))
        return result

    def buckets(self, length: int, device: torch.device) -> Tensor:
        """The number of the distance between each two places: exact up to 8 or 16, then coarser."""
        places = torch.arange(length, device=device)
        distance = places[None, :] - places[:, None]
        count = 32 if self.decodes else 16
        base = torch.zeros_like(distance) if self.decodes else (distance > 0).long() * count
        distance = -distance.clamp(max=0) if self.decodes else distance.abs()
        exact = count // 2
        far = (distance.float() / exact).log() / math.log(128 / exact) * (count - exact)
        large = (exact + far.long()).clamp(max=count - 1)
        return base + torch.where(distance < exact, distance, large)


class T5(nn.Module):
    """T5 1.1: an encoder and a decoder; the head has weights of its own."""

    def __init__(self, width: int, heads: int, hidden: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.encoder = T5Stack(width, heads, hidden, layers, decodes=False)
        self.decoder = T5Stack(width, heads, hidden, layers, decodes=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.scale = width**-0.5

    def forward(self, text: Tensor, targets: Tensor) -> Tensor:
        memory = self.encoder(self.tokens(text))
        before = F.pad(targets[:, :-1], (1, 0))
        x = self.decoder(self.tokens(before), memory)
        return token_loss(self.head(x * self.scale), targets)


def t5() -> Made:
    """8 + 8 layers of 768, 16 texts of 512 words and 128 to write."""
    model = T5(768, 12, 2048, 8, 32128).to(torch.bfloat16)
    return model, (words(32000, 16, 512), words(32000, 16, 128))


class Adapted(nn.Module):
    """LoRA (Hu et al. 2022): a linear layer that stays, and a narrow one beside it that learns."""

    def __init__(self, linear: nn.Linear, rank: int = 16, dropout: float = 0.05) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        self.drop, self.scale = nn.Dropout(dropout), 8 / rank

    def forward(self, x: Tensor) -> Tensor:
        beside = self.up(self.down(self.drop(x.to(self.down.weight.dtype)))) * self.scale
        result: Tensor = self.linear(x) + beside
        return result.to(x.dtype)


class GroupedAttention(nn.Module):
    """Causal, with rotary positions; groups of heads share keys and values.

    With a ``cap`` the scores are bounded by it, and attention is written in plain ops.
    """

    def __init__(self, width: int, heads: int, shared: int, size: int, cap: float | None) -> None:
        super().__init__()
        self.heads, self.shared, self.cap = heads, shared, cap
        self.q = nn.Linear(width, heads * size, bias=False)
        self.k, self.v = (nn.Linear(width, shared * size, bias=False) for _ in range(2))
        self.out = nn.Linear(heads * size, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        q, k = (
            rotate(split_heads(one(x), heads), cosine, sine)
            for one, heads in ((self.q, self.heads), (self.k, self.shared))
        )
        v = split_heads(self.v(x), self.shared)
        if self.cap is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            y = self.capped(q, k, v, self.cap)
        result: Tensor = self.out(merge_heads(y))
        return result

    def capped(self, q: Tensor, k: Tensor, v: Tensor, cap: float) -> Tensor:
        """Scores between minus and plus ``cap``; a softmax in float32."""
        k, v = (x.repeat_interleave(self.heads // self.shared, dim=1) for x in (k, v))
        scores = torch.tanh(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 / cap) * cap
        least = torch.finfo(q.dtype).min
        length = q.shape[2]
        scores = scores + torch.full((length, length), least, dtype=q.dtype, device=q.device).triu(
            1
        )
        mixed: Tensor = scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
        return mixed


class DecoderBlock(nn.Module):
    """A block of Llama, or, with norms behind attention and MLP too, of Gemma-2."""

    def __init__(self, width: int, hidden: int, attention: nn.Module, gemma: bool) -> None:
        super().__init__()
        self.attention, self.gemma = attention, gemma
        self.norms = nn.ModuleList(Scale(width, gemma) for _ in range(4 if gemma else 2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        norms = list(self.norms)
        y = self.attention(norms.pop(0)(x), cosine, sine)
        x = x + (norms.pop(0)(y) if self.gemma else y)
        y = norms.pop(0)(x)
        gate = self.gate(y)
        gate = F.gelu(gate, approximate="tanh") if self.gemma else F.silu(gate)
        y = self.down(gate * self.up(y))
        result: Tensor = x + (norms.pop(0)(y) if self.gemma else y)
        return result


class Decoder(nn.Module):
    """Llama; or Gemma-2, whose head is tied, and whose logits are bounded."""

    def __init__(
        self, layers: int, width: int, hidden: int, heads: int, shared: int, size: int,
        vocabulary: int, gemma: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.size, self.gemma, cap = size, gemma, 50.0 if gemma else None
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            DecoderBlock(width, hidden, GroupedAttention(width, heads, shared, size, cap), gemma)
            for _ in range(layers)
        )
        self.norm, self.head = Scale(width, gemma), nn.Linear(width, vocabulary, bias=False)
        if gemma:
            self.head.weight = self.tokens.weight

    def forward(self, text: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(text)
        if self.gemma:
            x = x * x.shape[-1] ** 0.5
        tables = rotary_tables(text.shape[1], self.size, text.device)
        cosine, sine = (table.to(x.dtype) for table in tables)
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits = self.head(self.norm(x))
        if self.gemma:
            logits = torch.tanh(logits / 30.0) * 30.0
        return token_loss(logits.float(), F.pad(targets, (0, 1), value=-100)[:, 1:])


def _llama(batch: int) -> tuple[nn.Module, Tensor]:
    return Decoder(8, 2048, 8192, 32, 8, 64, 32000), words(32000, batch, 2048)


def llama() -> Made:
    """8 layers of 2,048, 8 texts of 2,048 words."""
    model, text = _llama(8)
    return model.to(torch.bfloat16), (text, text.clone())


def lora() -> Made:
    """The same with 4 texts, adapted in all its blocks by what is kept in float32."""
    model, text = _llama(4)
    model = model.to(torch.bfloat16).requires_grad_(False)
    for block in model.get_submodule("blocks").modules():
        for name, child in list(block.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(block, Adapted):
                setattr(block, name, Adapted(child))
    return model, (text, text.clone())


def gemma2() -> Made:
    """8 layers of 1,024, 4 texts of 1,024 words, attention in plain ops."""
    model = Decoder(8, 1024, 4096, 8, 4, 128, 64000, gemma=True).to(torch.bfloat16)
    text = words(64000, 4, 1024)
    return model, (text, text.clone())


class Disentangled(nn.Module):
    """DeBERTa's attention: of contents to contents, to distances, and back."""

    def __init__(self, width: int, heads: int, span: int) -> None:
        super().__init__()
        self.heads, self.span = heads, span
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, mask: Tensor, distance: Tensor, embedded: Tensor) -> Tensor:
        q, k, v = (
            split_heads(one(x), self.heads).flatten(0, 1) for one in (self.q, self.k, self.v)
        )
        scale = math.sqrt(q.shape[-1] * 3)
        embedded = self.drop(embedded)[None]
        far_q, far_k = (
            split_heads(one(embedded), self.heads).flatten(0, 1).repeat(len(x), 1, 1)
            for one in (self.q, self.k)
        )
        shape = len(q), x.shape[1], x.shape[1]
        there = (distance + self.span).clamp(0, 2 * self.span - 1).expand(shape)
        back = (self.span - distance).clamp(0, 2 * self.span - 1).expand(shape)
        scores = q @ (k.transpose(-1, -2) / scale)
        beside = (q @ far_k.transpose(-1, -2)).gather(-1, there) / scale
        beside = beside + (k @ far_q.transpose(-1, -2)).gather(-1, back).transpose(-1, -2) / scale
        scores = (scores + beside).view(len(x), self.heads, *scores.shape[1:])
        least = torch.finfo(scores.dtype).min
        weights = self.drop(scores.masked_fill(~mask, least).softmax(-1))
        y = (weights.flatten(0, 1) @ v).view(len(x), self.heads, x.shape[1], -1)
        result: Tensor = self.out(merge_heads(y))
        return result


class Deberta(nn.Module):
    """DeBERTa v3, which sorts texts."""

    def __init__(self, width: int, heads: int, layers: int, vocabulary: int, span: int) -> None:
        super().__init__()
        self.embedded, self.span = Embedded(vocabulary, width, 512, 0), span
        self.blocks = nn.ModuleList(
            BertBlock(width, heads, Disentangled(width, heads, span)) for _ in range(layers)
        )
        self.distances, self.norm = nn.Embedding(2 * span, width), nn.LayerNorm(width)
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 2)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, text: Tensor, there: Tensor, classes: Tensor) -> Tensor:
        x = self.embedded(text) * there[..., None]
        mask = (there[:, None, None, :] * there[:, None, :, None]).bool()
        embedded = self.norm(self.distances.weight)
        distance = self.distance(text.shape[1], text.device)[None]
        for block in self.blocks:
            x = block(x, mask, distance, embedded)
        pooled = F.gelu(self.pooler(self.drop(x[:, 0])))
        return F.cross_entropy(self.head(self.drop(pooled)), classes)

    def distance(self, length: int, device: torch.device) -> Tensor:
        """Between each two places: exact up to half the span, then coarser."""
        places = torch.arange(length, device=device)
        exact, half = places[:, None] - places[None, :], self.span // 2
        size = torch.where(exact.abs() < half, half - 1, exact.abs())
        far = ((size / half).log() / math.log(511 / half) * (half - 1)).ceil() + half
        return torch.where(size <= half, exact, far * exact.sign()).long()


def deberta() -> Made:
    """6 layers of 768, 16 texts of 384 words, low precision."""
    text = words(32000, 16, 384)
    model = Deberta(768, 12, 6, 32000, 256)
    return Low(model), (text, torch.ones_like(text), torch.randint(0, 2, (16,)))

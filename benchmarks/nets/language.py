"""Networks over tokens: GPT, BERT, Llama, an encoder-decoder Transformer, an unrolled LSTM."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import (
    MLP,
    Batch,
    Block,
    Blocks,
    CrossAttention,
    Network,
    SelfAttention,
    Spelling,
    TokenHead,
    children_of,
    dropout_layer,
    merge_heads,
    random_tokens,
    split_heads,
    token_loss,
)


class GPT(Network):
    """GPT-2: learned positions, LayerNorm, GELU, causal attention; an untied head.

    Attention may be written in plain ops, with a mask or an added bias (as ALiBi's, Press et al.
    2022).
    """

    bias: Tensor | None

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        length: int,
        vocabulary: int,
        dropout: float = 0.0,
        spelling: Spelling = "fused",
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.length, self.vocabulary = length, vocabulary
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.drop = dropout_layer(dropout)
        self.blocks = nn.ModuleList(
            Block(width, heads, True, dropout, spelling, norm) for _ in range(layers)
        )
        added = distance_bias(heads, length) if spelling == "biased" else None
        self.register_buffer("bias", added, persistent=False)
        self.head = TokenHead(norm(width), nn.Linear(width, vocabulary, bias=False))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.head(self.features(inputs), targets)
        return loss

    def features(self, inputs: Tensor) -> Tensor:
        """What the blocks make: (B, T, width)."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x: Tensor = self.drop(self.tokens(inputs) + self.positions(places))
        for block in self.blocks:
            x = block(x) if self.bias is None else block(x, self.bias)
        return x

    def sample(self, batch: int, generator: torch.Generator) -> Batch:
        text = random_tokens((batch, self.length + 1), self.vocabulary, generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def checkpoint_blocks(self) -> Blocks:
        return children_of(self.blocks)


def distance_bias(heads: int, length: int) -> Tensor:
    """ALiBi's (heads, length, length): less for each place back, nothing for what comes later."""
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
    places = torch.arange(length)
    distance = (places - places[:, None]).to(slopes.dtype)
    later = torch.full((length, length), -torch.inf).triu(1)
    return slopes[:, None, None] * distance.clamp(max=0) + later


class PostNormBlock(nn.Module):
    """Transformer block as Vaswani et al. (2017) have it: LayerNorm after each sum."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, causal=False, dropout=dropout)
        self.mlp = MLP(width, 4 * width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.drop = dropout_layer(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.drop(self.attention(x)))
        result: Tensor = self.norm2(x + self.drop(self.mlp(x)))
        return result


class BERT(Network):
    """BERT (Devlin et al. 2019): learned positions, dropout, and a head tied to the embedding.

    Its loss is that of the tokens to be guessed; all others have the target -100.
    """

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        length: int,
        vocabulary: int,
        dropout: float = 0.1,
        guessed: float = 0.15,
    ) -> None:
        super().__init__()
        self.length, self.vocabulary, self.guessed = length, vocabulary, guessed
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.drop = dropout_layer(dropout)
        self.blocks = nn.ModuleList(PostNormBlock(width, heads, dropout) for _ in range(layers))
        self.transform, self.head_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.tokens.weight

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.drop(self.norm(self.tokens(inputs) + self.positions.weight))
        for block in self.blocks:
            x = block(x)
        return token_loss(self.head(self.head_norm(F.gelu(self.transform(x)))), targets)

    def sample(self, batch: int, generator: torch.Generator) -> Batch:
        text = random_tokens((batch, self.length), self.vocabulary, generator)
        is_guessed = torch.rand(text.shape, generator=generator) < self.guessed
        return text.masked_fill(is_guessed, 0), text.masked_fill(~is_guessed, -100)

    def checkpoint_blocks(self) -> Blocks:
        return children_of(self.blocks)


def rotary_tables(
    length: int, size: int, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (length, size) of the rotary position embedding."""
    frequency = 10_000.0 ** (-torch.arange(0, size, 2, device=device) / size)
    angle = torch.outer(torch.arange(length, device=device), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (i, i + size/2) of the last dimension by their angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class GroupedAttention(nn.Module):
    """Causal attention with rotary positions, where groups of heads share keys and values.

    Queries and keys of each head may be ``normed``, as Qwen3's are.
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int, head_width: int, normed: bool
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.q = nn.Linear(width, heads * head_width, bias=False)
        self.k = nn.Linear(width, kv_heads * head_width, bias=False)
        self.v = nn.Linear(width, kv_heads * head_width, bias=False)
        self.out = nn.Linear(heads * head_width, width, bias=False)
        self.norm_q, self.norm_k = (
            nn.RMSNorm(head_width) if normed else nn.Identity() for _ in range(2)
        )

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        q = rotate(self.norm_q(split_heads(self.q(x), self.heads)), cosine, sine)
        k = rotate(self.norm_k(split_heads(self.k(x), self.kv_heads)), cosine, sine)
        v = split_heads(self.v(x), self.kv_heads)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(merge_heads(y))
        return result


class LlamaBlock(nn.Module):
    """RMSNorm, grouped-query attention, RMSNorm, SwiGLU."""

    def __init__(
        self, width: int, heads: int, kv_heads: int, hidden: int, head_width: int, normed: bool
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = GroupedAttention(width, heads, kv_heads, head_width, normed)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cosine, sine)
        y = self.norm2(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class Llama(Network):
    """Llama: RMSNorm, SwiGLU, grouped-query attention, rotary positions.

    With ``normed`` queries and keys, heads of any ``head_width`` and a ``tied`` head it is Qwen3.
    For texts of ``any_length`` each step makes its tables of positions anew.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        length: int,
        vocabulary: int,
        head_width: int | None = None,
        normed: bool = False,
        tied: bool = False,
        any_length: bool = False,
    ) -> None:
        super().__init__()
        self.length, self.vocabulary, self.any_length = length, vocabulary, any_length
        self.head_width = head_width = head_width or width // heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            LlamaBlock(width, heads, kv_heads, hidden, head_width, normed) for _ in range(layers)
        )
        self.head = TokenHead(nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False))
        if tied:
            self.head.linear.weight = self.tokens.weight
        if not any_length:
            cosine, sine = rotary_tables(length, head_width)
            self.register_buffer("cosine", cosine)
            self.register_buffer("sine", sine)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs)
        cosine, sine = self._tables(x)
        for block in self.blocks:
            x = block(x, cosine, sine)
        loss: Tensor = self.head(x, targets)
        return loss

    def _tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self.any_length:
            return self.cosine, self.sine
        cosine, sine = rotary_tables(x.shape[1], self.head_width, x.device)
        return cosine.to(x.dtype), sine.to(x.dtype)

    def sample(self, batch: int, generator: torch.Generator) -> Batch:
        text = random_tokens((batch, self.length + 1), self.vocabulary, generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def checkpoint_blocks(self) -> Blocks:
        return children_of(self.blocks)


class DecoderBlock(nn.Module):
    """Causal self-attention, cross-attention over the encoder's result, MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attention = SelfAttention(width, heads, causal=True)
        self.cross = CrossAttention(width, heads)
        self.mlp = MLP(width, 4 * width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.cross(self.norm2(x), memory)
        result: Tensor = x + self.mlp(self.norm3(x))
        return result


class EncoderDecoder(Network):
    """The Transformer of machine translation: the encoder's result lives through the decoder."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.length, self.vocabulary = length, vocabulary
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.encoder = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderBlock(width, heads) for _ in range(layers))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        places = self.positions.weight
        memory = self.source(inputs) + places
        for block in self.encoder:
            memory = block(memory)
        memory = self.norm1(memory)
        x = self.target(targets[:, :-1]) + places
        for block in self.decoder:
            x = block(x, memory)
        return token_loss(self.head(self.norm2(x)), targets[:, 1:])

    def sample(self, batch: int, generator: torch.Generator) -> Batch:
        source = random_tokens((batch, self.length), self.vocabulary, generator)
        return source, random_tokens((batch, self.length + 1), self.vocabulary, generator)

    def checkpoint_blocks(self) -> Blocks:
        return children_of(self.encoder, self.decoder)


class LSTMSegment(nn.Module):
    """Several LSTM layers run over a few time steps, written out in Python."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.Linear(2 * width, 4 * width) for _ in range(layers))

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, memory, outputs = list(h.unbind()), list(c.unbind()), []
        for step in x.unbind(1):
            for layer, cell in enumerate(self.cells):
                i, f, g, o = cell(torch.cat((step, hidden[layer]), dim=-1)).chunk(4, dim=-1)
                memory[layer] = f.sigmoid() * memory[layer] + i.sigmoid() * g.tanh()
                step = hidden[layer] = o.sigmoid() * memory[layer].tanh()
            outputs.append(step)
        return torch.stack(outputs, dim=1), torch.stack(hidden), torch.stack(memory)


class LSTM(Network):
    """A language model over an unrolled LSTM: a long chain with weights used at every step."""

    def __init__(self, layers: int, width: int, length: int, segment: int, vocabulary: int) -> None:
        super().__init__()
        self.layers, self.width, self.length = layers, width, length
        self.segment_length, self.vocabulary = segment, vocabulary
        self.tokens = nn.Embedding(vocabulary, width)
        self.segment = LSTMSegment(layers, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs)
        h = c = x.new_zeros(self.layers, inputs.shape[0], self.width)
        outputs = []
        for part in x.split(self.segment_length, dim=1):
            y, h, c = self.segment(part, h, c)
            outputs.append(y)
        return token_loss(self.head(torch.cat(outputs, dim=1)), targets)

    def sample(self, batch: int, generator: torch.Generator) -> Batch:
        text = random_tokens((batch, self.length + 1), self.vocabulary, generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def checkpoint_blocks(self) -> Blocks:
        return [(self, "segment")]

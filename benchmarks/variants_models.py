"""Small models for the table of variants: one for each row in which the row matters.

What a row changes makes up a good part of the step's memory: a wide hidden layer, scores of a large
vocabulary, masks. Every model takes tensors and returns the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Tensor, ...]]
"""A model and its arguments."""

WORDS = 4096


class Squared(nn.Module):
    """The mean square of what some layers give, as a loss."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y.square().mean()


class Vocabulary(nn.Module):
    """Tokens in, the loss of the next ones out: nearly all bytes are scores of words."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, width), nn.Linear(width, words)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.embedding(tokens))), targets)


class Attention(nn.Module):
    """Causal attention in plain ops, so that its scores are there."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.given, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.given(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5
        mixed = self.masked(scores).softmax(-1) @ value
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return y

    def masked(self, scores: Tensor) -> Tensor:
        """Without the keys that come later."""
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill(later, -torch.inf)


class Biased(Attention):
    """With a tensor added to the scores that is there from the beginning."""

    bias: Tensor

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__(width, heads)
        self.register_buffer("bias", torch.full((length, length), -torch.inf).triu(1))

    def masked(self, scores: Tensor) -> Tensor:
        return scores + self.bias


class RMSNorm(nn.Module):
    """Without a scale of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Sorted(nn.Module):
    """Each row in order, with a weight for each rank; where each came from is kept."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x.sort(-1).values * self.weight


def layers(*shape: int, made: Callable[[], list[nn.Module]]) -> Made:
    """Layers with random inputs of a shape."""
    return Squared(*made()), (torch.randn(shape),)


def vocabulary() -> Made:
    """Much more room for words than for all else."""
    tokens = (torch.randint(0, WORDS, (512,)), torch.randint(0, WORDS, (512,)))
    return Vocabulary(WORDS, 64), tokens


def repeated(
    count: int, width: int, between: Callable[[], nn.Module], rows: int = 2048, bias: bool = True
) -> Made:
    """Linear layers of one width with something in between."""

    def made() -> list[nn.Module]:
        pairs = [[nn.Linear(width, width, bias=bias), between()] for _ in range(count)]
        return [layer for pair in pairs for layer in pair] + [nn.Linear(width, width)]

    return layers(rows, width, made=made)


def hidden(wide: int, activation: Callable[[], nn.Module]) -> Made:
    """An MLP whose hidden layer is much wider than the rest."""
    return layers(2048, 64, made=lambda: [nn.Linear(64, wide), activation(), nn.Linear(wide, 64)])


def pictures(*made: Callable[[], nn.Module], size: int = 64) -> Made:
    """Convolutions over eight pictures."""
    first = nn.Conv2d(3, 16, 3, padding=1)
    return layers(8, 3, size, size, made=lambda: [first, *(one() for one in made)])


def double(made: Made) -> Made:
    """In float64."""
    model, arguments = made
    return model.double(), tuple(tensor.double() for tensor in arguments)


def convolution(stride: int = 1) -> Callable[[], nn.Module]:
    """Of 16 channels, three by three."""
    return partial(nn.Conv2d, 16, 16, 3, padding=1, stride=stride)


NORM: Callable[[], nn.Module] = partial(nn.BatchNorm2d, 16)
POOL: Callable[[], nn.Module] = partial(nn.MaxPool2d, 3, 2, 1)

MODELS: dict[str, Callable[[], Made]] = {
    "chunked_loss": vocabulary,
    "chunked_mlp": lambda: hidden(2048, nn.GELU),
    "chunked_attention": lambda: layers(4, 256, 64, made=lambda: [Attention(64, 8)]),
    "chunked_convolutions": lambda: pictures(NORM, nn.ReLU, convolution(), NORM, nn.ReLU, POOL),
    "fused_attention": lambda: layers(4, 256, 64, made=lambda: [Attention(64, 8)]),
    "masked_attention": lambda: layers(4, 256, 64, made=lambda: [Biased(64, 8, 256)]),
    "pool_gradient": lambda: pictures(NORM, nn.ReLU, POOL),
    "split_gradients": lambda: pictures(convolution(), convolution()),
    "convolution_workspace": lambda: double(
        pictures(nn.ReLU, convolution(), nn.ReLU, convolution(), size=32)
    ),
    "norm_from_output": lambda: repeated(4, 256, RMSNorm),
    "scaled_norm_from_output": lambda: repeated(4, 256, partial(nn.LayerNorm, 256)),
    "activation_from_output": lambda: repeated(4, 256, nn.ELU),
    "packed_masks": lambda: repeated(4, 256, partial(nn.Dropout, 0.2)),
    "sign_masks": lambda: pictures(NORM, nn.ReLU, partial(nn.AvgPool2d, 2), convolution()),
    "narrow_indices": lambda: repeated(2, 256, partial(Sorted, 256)),
    "saved_8bit": lambda: repeated(6, 256, nn.GELU),
    "saved_4bit": lambda: pictures(NORM, nn.ReLU, convolution(), NORM, nn.ReLU, convolution()),
    "saved_fp8": lambda: repeated(6, 256, nn.SiLU),
    "saved_bf16": lambda: layers(4, 256, 64, made=lambda: [Attention(64, 8)]),
    "few_bit_activation": lambda: hidden(2048, nn.GELU),
    "random_matmul": lambda: repeated(6, 256, nn.Identity),
}


def build(name: str, device: str = "cpu", seed: int = 0) -> Made:
    """The model of a row with fixed random weights, and its arguments."""
    torch.manual_seed(seed)
    model, arguments = MODELS[name]()
    return model.to(device).train(), tuple(tensor.to(device) for tensor in arguments)

"""Small models for the tests of the whole way, and how to train them for a few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        return x + F.dropout(self.down(hidden), self.dropout, self.training)


class Stack(nn.Module):
    """Blocks one after the other; ``broken`` puts a graph break in the middle."""

    def __init__(self, depth: int = 4, width: int = 32, dropout: float = 0.0, broken: bool = False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        half = len(self.blocks) // 2
        for index in range(half):
            x = self.blocks[index](x)
        if self.broken:
            torch._dynamo.graph_break()
        for index in range(half, len(self.blocks)):
            x = self.blocks[index](x)
        return x.square().mean()


class Language(nn.Module):
    """Token embedding, residual blocks, and a head: the logits of each next word."""

    def __init__(self, words: int, depth: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Chain(Language):
    """It gives the cross entropy of each next token."""

    def __init__(self, depth: int = 8, width: int = 64, words: int = 32) -> None:
        super().__init__(words, depth, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(tokens).flatten(0, 1), tokens.flatten())


class Convolutions(nn.Module):
    """Convolutions with BatchNorm, whose running statistics are updated in each step."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 8), (8, 8), (8, 8)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.layers(x).square().mean())


class Classifier(nn.Module):
    """A few layers and a loss over many classes: the logits are most of what is there."""

    def __init__(self, width: int = 16, classes: int = 4000) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        targets = torch.zeros(x.shape[0], dtype=torch.long)
        return F.cross_entropy(self.head(self.layers(x)), targets)


class Layers(nn.Module):
    """Linear layers whose weights take many more bytes than the activations; gives a loss."""

    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x.square().mean()


class Tied(nn.Module):
    """One weight for the embedding and the last layer: its two gradients are added."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.layer(self.embedding(index))))
        return F.cross_entropy(scores, index)


def seeded(make: Callable[[], nn.Module], *shape: int) -> tuple[nn.Module, Tensor]:
    """A model and its input, the same each time."""
    torch.manual_seed(0)
    model = make()
    return model, torch.randn(*shape)


def train(
    model: nn.Module, x: Tensor, step_of: Callable[..., Any], steps: int = 3, rate: float = 0.05
) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Losses, last gradients and buffers of some SGD steps from one seed."""
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        loss = step_of(x)
        loss.backward()
        losses.append(loss.item())
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(rate * parameter.grad)
    return losses, gradients, [b.clone() for b in model.buffers()]


def stack_and_input() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """What ``python -m fxremat trace`` asks for."""
    return Stack(), (torch.randn(64, 32),)


def two_layers_in_bfloat16() -> tuple[nn.Module, Tensor]:
    """What ``python -m fxremat fit`` asks for."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    return model.to(torch.bfloat16), torch.zeros(16, 64, dtype=torch.bfloat16)

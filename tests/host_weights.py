"""A model with parameters of all kinds for tests of weights in host memory, and its training."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxremat
from benchmarks import copying
from fxremat.runtime.host_memory import is_host

CPU = torch.device("cpu")
WORDS = 11


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors here are too small for two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Each test begins without compiled code, and ends without host memory of its models."""
    counters.clear()
    before = copying.host_bytes().now_bytes
    yield
    torch._dynamo.reset()
    if copying.host_bytes().now_bytes > before:
        gc.collect()
    assert copying.host_bytes().now_bytes <= before


class Language(nn.Module):
    """An embedding, attention, an MLP, and parameters of all kinds, read in all sorts of ways."""

    def __init__(self, tied: bool = False, twice: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(2)])
        self.shifts = nn.ParameterDict({"in": nn.Parameter(torch.full((8,), 0.5))})
        self.gain = nn.Parameter(torch.ones(8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.batch_norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.twice = twice
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embedding.weight

    def block(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = self.mlp(self.attention(h, h, h)[0]) * self.gain
        y: Tensor = x + h + self.frozen(self.mlp(x) if self.twice else x)
        return y

    def forward(self, words: Tensor) -> Tensor:
        x: Tensor = self.embedding(words) * self.scales[0] + self.shifts["in"]
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        x = self.batch_norm(x.flatten(0, 1)).view(x.shape) * self.scales[1]
        logits: Tensor = F.linear(x, self.head.weight)
        return logits


def language(**options: bool) -> Language:
    torch.manual_seed(0)
    return Language(**options)


def moved(model: Any, **options: Any) -> Any:
    """The model with weights in host memory, also on machines with a GPU fetched to the CPU."""
    return fxremat.offload(model, device="cpu", **options)


def in_host_memory(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if is_host(parameter)]


def gradients_elsewhere(model: nn.Module) -> list[str]:
    """Parameters whose gradients are not in host memory."""
    named = model.named_parameters()
    return [name for name, p in named if p.grad is not None and not is_host(p.grad)]


Step = Callable[[Tensor, Tensor], Tensor]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))


def loss_of(model: Callable[[Tensor], Tensor]) -> Step:
    return lambda words, next_words: F.cross_entropy(model(words).flatten(0, 1), next_words)


def aot(function: Any) -> Any:
    """Compiled as one graph, whose ops run as they are."""
    return torch.compile(function, backend="aot_eager", fullgraph=True)


WAYS: dict[str, Callable[[nn.Module], Step]] = {
    "eager": lambda model: loss_of(model),
    "model": lambda model: loss_of(aot(model)),
    "function": lambda model: cast("Step", aot(loss_of(model))),
    "forward": lambda model: loss_of(aot(model.forward)),
}


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        words = torch.randint(0, WORDS, (2, 6), generator=generator)
        yield words[:, :-1], words[:, 1:].flatten()


def training(
    model: nn.Module, step: Step, steps: int = 3, optimizer: Any = None, accumulate: int = 1
) -> list[Tensor]:
    """Losses of some AdamW steps, and gradients, parameters and buffers after them."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for number, (words, next_words) in enumerate(batches(steps * accumulate)):
        if number % accumulate == 0:
            optimizer.zero_grad()
        loss = step(words, next_words)
        torch.autograd.backward(loss)
        losses.append(loss.detach())
        if (number + 1) % accumulate == 0:
            optimizer.step()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    state = [value.detach().clone() for value in (*model.parameters(), *model.buffers())]
    return [*losses, *gradients, *state]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))

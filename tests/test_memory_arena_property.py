"""Random small models in random loops: the same to the bit with the arena on, off and poisoned."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fxremat.step import scope
from tests.placing import Trial, trial

OPTIONS: dict[str, Any] = {"memory_budget": "1GiB", "solver": "greedy", "variants": "none"}


class Random(nn.Module):
    """Layers of one width, with or without a norm; gives a loss and a value on the way."""

    def __init__(self, depth: int, width: int, normed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(
            nn.LayerNorm(width) if normed else nn.Identity() for _ in range(depth)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return x.square().mean(), x.sum(dim=1)


class Compiled:
    """A model that has run once, and its weights as they were."""

    def __init__(self, depth: int, width: int, normed: bool) -> None:
        torch.manual_seed(0)
        self.model, self.x = Random(depth, width, normed), torch.randn(8, width)
        self.call = torch.compile(self.model, backend="fxremat", options=OPTIONS)
        self.weights: list[Any] = list(self.model.parameters())
        self.before = [one.detach().clone() for one in self.weights]
        self.step()

    def step(self) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        loss = self.call(self.x)[0]
        loss.backward()
        made: Tensor = loss.detach()
        return made


compiled = cache(Compiled)


class Loop:
    """What a loop holds; each method does one thing that loops do, with what it holds."""

    def __init__(self, small: Compiled) -> None:
        self.small = small
        self.waiting: list[Any] = []
        self.kept: list[Tensor] = []
        self.seen: list[Tensor] = []
        self.count = 0
        small.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for one, value in zip(small.weights, small.before, strict=True):
                one.copy_(value)

    def forward(self) -> None:
        self.count += 1
        loss, _ = self.small.call(self.small.x + self.count)
        self.waiting.append(loss)

    def backward(self) -> None:
        if self.waiting:
            loss = self.waiting.pop()
            loss.backward()
            self.seen.append(loss.detach().clone())

    def backward_of_the_first(self) -> None:
        if self.waiting:
            self.waiting.pop(0).backward()

    def drop(self) -> None:
        if self.waiting:
            self.waiting.pop()

    def no_gradients(self) -> None:
        self.small.model.zero_grad(set_to_none=True)

    def zero_gradients(self) -> None:
        self.small.model.zero_grad(set_to_none=False)

    def sgd(self) -> None:
        with torch.no_grad():
            for one in self.small.weights:
                if one.grad is not None:
                    one.sub_(one.grad, alpha=1e-3)

    def keep_gradients(self) -> None:
        grads = [one.grad for one in self.small.weights if one.grad is not None]
        self.kept += grads[:: 1 + self.count % 3]

    def keep_results(self) -> None:
        self.kept += self.small.call(self.small.x)

    def grad(self) -> None:
        if self.waiting:
            self.kept += torch.autograd.grad(self.waiting.pop(), self.small.weights)

    def let_go(self) -> None:
        del self.kept[::2]

    def evaluate(self) -> None:
        with torch.no_grad():
            self.seen.append(self.small.call(self.small.x)[0].clone())

    def fail(self) -> None:
        """The backward of the graph runs, and the next node fails; what it gave is held."""

        def hook(gradient: Tensor) -> None:
            self.kept.append(gradient)
            raise ZeroDivisionError

        handle = self.small.weights[0].register_hook(hook)
        self.forward()
        with pytest.raises(ZeroDivisionError):
            self.waiting.pop().backward()
        handle.remove()

    def outcome(self) -> list[Tensor]:
        grads = [one.grad for one in self.small.weights if one.grad is not None]
        tensors = [*self.seen, *self.kept, *grads, *self.small.weights]
        return [one.detach().clone() for one in tensors]


DEEDS = [name for name in vars(Loop) if name not in ("__init__", "outcome") and name[0] != "_"]


@pytest.fixture(autouse=True, scope="module")
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    scope.forget()
    yield
    compiled.cache_clear()
    torch._dynamo.reset()


def run(small: Compiled, deeds: list[str]) -> list[Tensor]:
    loop = Loop(small)
    for deed in deeds:
        getattr(loop, deed)()
    return loop.outcome()


def in_arena(found: Trial, small: Compiled, deeds: list[str], poison: bool) -> list[Tensor]:
    found.arena.poison = poison
    return run(small, deeds)


@pytest.mark.parametrize("reuse", [False, True])
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from([(1, 16, True), (3, 16, False), (2, 32, True)]),
    st.lists(st.sampled_from(DEEDS), min_size=4, max_size=40),
)
def test_loops(reuse: bool, shape: tuple[int, int, bool], deeds: list[str]) -> None:
    small = compiled(*shape)
    expected = run(small, deeds)
    with trial() as found:
        found.record(small.step, small.model, reuse=reuse)
        for poison in (False, True):
            given = in_arena(found, small, deeds, poison)
            assert len(given) == len(expected)
            assert all(map(torch.equal, expected, given))
        small.model.zero_grad(set_to_none=True)

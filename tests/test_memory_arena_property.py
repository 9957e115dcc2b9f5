"""Random loops, threads and long runs: the same to the bit with the arena on, off and poisoned."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tests.examples import examples
from tests.placing import Small, trial


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


@cache
def compiled(depth: int, width: int, normed: bool) -> tuple[Small, list[Tensor]]:
    """A model that has run once, and its weights as they were."""
    small = Small(lambda: Random(depth, width, normed), 8, width)
    before = [one.detach().clone() for one in small.weights]
    small.step()
    return small, before


class Loop:
    """What a loop holds; each method does one thing that loops do, with what it holds."""

    def __init__(self, small: Small, before: list[Tensor]) -> None:
        self.small = small
        self.waiting: list[Any] = []
        self.kept: list[Tensor] = []
        self.seen: list[Tensor] = []
        self.count = 0
        small.model.zero_grad(set_to_none=True)
        small.restore(before)

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
def _fresh(stack: Small) -> Iterator[None]:
    """Nothing else was compiled before, and nothing is left."""
    yield
    compiled.cache_clear()


def run(small: Small, before: list[Tensor], deeds: list[str]) -> list[Tensor]:
    loop = Loop(small, before)
    for deed in deeds:
        getattr(loop, deed)()
    return loop.outcome()


@examples(30)
@given(
    st.sampled_from([(1, 16, True), (3, 16, False), (2, 32, True)]),
    st.lists(st.sampled_from(DEEDS), min_size=4, max_size=40),
)
def test_loops(shape: tuple[int, int, bool], deeds: list[str]) -> None:
    small, before = compiled(*shape)
    expected = run(small, before, deeds)
    with trial() as found:
        found.record(small.step, small.model)
        for found.arena.poison in (False, True):
            given = run(small, before, deeds)
            assert len(given) == len(expected)
            assert all(map(torch.equal, expected, given))
        small.model.zero_grad(set_to_none=True)


def test_threads(stack: Small) -> None:
    """Eight of them, in one arena: those that find it taken have places elsewhere."""
    inputs = [torch.randn(16, 32) for _ in range(8)]

    def run(k: int) -> None:
        for _ in range(20):
            loss = stack.call(inputs[k])
            results[k] = loss.detach(), *torch.autograd.grad(loss, stack.weights)

    with trial() as found:
        found.record(stack.step, stack.model)
        results: dict[int, Any] = {}
        with found.running("as ever"):
            for k in range(8):
                run(k)
        expected, results = results, {}
        threads = [Thread(target=run, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(results) == list(range(8))
        for k in range(8):
            assert all(map(torch.equal, expected[k], results[k]))


@pytest.mark.slow
def test_two_thousand_steps_take_no_more_than_twenty(stack: Small) -> None:
    """Of tensors, of slots, and of conflicts there are no more in the end."""

    def counts() -> tuple[int, int, int]:
        gc.collect()
        tensors = sum(isinstance(one, Tensor) for one in gc.get_objects())
        return tensors, len(found.arena._slots), found.arena.conflicts

    with trial() as found:
        found.record(stack.step, stack.model)
        loss = stack.step()
        for _ in range(20):
            stack.step()
        before = counts()
        for _ in range(2000):
            last = stack.step()
        del last
        assert torch.equal(stack.step(), loss)
        assert counts() == before

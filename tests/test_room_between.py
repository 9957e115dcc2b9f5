"""Blocks that are compiled one by one, and a head and a loss that are compiled by themselves.

They run while all blocks wait. When they are compiled, the blocks have planned to take all of the
budget; so they are planned anew, to leave as much as is needed there.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxremat
from fxremat.sizes import MIB
from tests.ranks import OPTIONS, PLAIN, least_named
from tests.small import Block

WIDTH, WORDS = 64, 512


pytestmark = pytest.mark.usefixtures("fresh")


class Worded(nn.Module):
    """Its logits take as much as several blocks save."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Step:
    """Of a model whose parts are compiled, forward and backward, with the loss outside of it."""

    def __init__(self, **how: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model, self.tokens = Worded(), torch.randint(WORDS, (8, 129))
        for block in (*self.model.blocks, self.model.head):
            block.compile(**how)
        self.loss: Any = torch.compile(F.cross_entropy, **how)

    def __call__(self) -> None:
        self.model.zero_grad(set_to_none=True)
        logits = self.model(self.tokens[:, :-1]).flatten(0, 1)
        loss = self.loss(logits, self.tokens[:, 1:].flatten())
        del logits
        loss.backward()

    def gradients(self) -> list[Tensor | None]:
        self()
        return [parameter.grad for parameter in self.model.parameters()]

    def peak_bytes(self) -> int:
        for _ in range(2):
            self()
        self.model.zero_grad(set_to_none=True)
        return fxremat.measure_peak(self, held=(self.model, self.tokens)).peak_bytes


def ours(budget: int) -> Step:
    return Step(backend="fxremat", options={**OPTIONS, "memory_budget": budget})


def least_budget() -> int:
    """What is named is asked for, until nothing is refused."""
    budget, least = 0, MIB
    while least > budget:
        budget = least
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fxremat.PromiseBroken)
            try:
                ours(budget)()
            except torch._dynamo.exc.BackendCompilerFailed as refused:
                least = least_named(refused)
    return budget


@pytest.mark.parametrize("percent", [80, 60, pytest.param(None, marks=pytest.mark.slow)])
def test_blocks_leave_room_for_what_runs_while_they_wait(percent: int | None) -> None:
    plain = Step(**PLAIN)
    expected, peak = plain.gradients(), plain.peak_bytes()
    budget = least_budget() if percent is None else peak * percent // 100
    step = ours(budget)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.testing.assert_close(step.gradients(), expected)
    told = [each.message for each in caught if isinstance(each.message, fxremat.PromiseBroken)]
    for one in told:  # the first step tells how much more the next ones leave to the head
        assert one.left_bytes
        assert "from then on the others leave" in str(one)
        assert "fxremat.prepare" in str(one)
    assert told
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxremat.PromiseBroken)
        torch.testing.assert_close(step.gradients(), expected)
        assert step.peak_bytes() <= budget

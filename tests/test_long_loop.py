"""Fifty steps of a loop that does what loops do between two backwards: within the budget."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.memory.measured_peak import held_bytes
from tests.small import Stack, seeded

STEPS = 50
SMALL = 2**16
"""Losses, norms, scales, and what a step makes for one weight."""


pytestmark = pytest.mark.usefixtures("fresh")


class Loop:
    """Micro-batches, clipping, a scaler, averaged weights, evaluation and saving."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        self.model, self.x = model, x
        self.average = copy.deepcopy(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.losses: list[float] = []

    def held(self) -> list[Any]:
        """What stays from step to step."""
        return [self.model, self.average, self.optimizer, self.x]

    def run(self, compiled: Any, steps: int) -> None:
        for step in range(steps):
            self.model.train()
            for _ in range(2):
                loss = compiled(self.x) / 2
                self.scaler.scale(loss).backward()
            self.losses.append(float(loss))
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            with torch.no_grad():
                mean, now = (tuple(one.parameters()) for one in (self.average, self.model))
                torch._foreach_lerp_(mean, now, 0.1)
            if step % 10 == 0:
                self.model.eval()
                with torch.no_grad():
                    self.losses.append(float(compiled(self.x[:32])))
                torch.save(self.model.state_dict(), io.BytesIO())


def trained(options: dict[str, Any] | None) -> tuple[list[float], int]:
    """The losses, and the measured peak of fifty steps, after a few that compile."""
    model, x = seeded(lambda: Stack(2, 64), 2048, 64)
    loop = Loop(model, x)
    compiled: Any = model
    if options is not None:
        fxremat.accumulate_in_backward(model)
        beside = fxremat.optimizer_state_bytes(loop.optimizer) + held_bytes(loop.average)
        reserved = {"reserve": beside + SMALL, **options}
        compiled = torch.compile(model, backend="fxremat", options=reserved)
    loop.run(compiled, 2)
    peak = fxremat.measure_peak(lambda: loop.run(compiled, STEPS), held=loop.held()).peak_bytes
    return loop.losses, peak


@pytest.mark.slow
def test_fifty_steps_stay_within_the_budget() -> None:
    expected, plain = trained(None)
    budget = int(0.6 * plain)
    losses, peak = trained({"memory_budget": budget})
    assert peak <= budget
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-3)


def functional(options: dict[str, Any] | None) -> tuple[list[float], int]:
    """Losses, and the peak, of steps with weights that are given to a model that has none left."""
    model, x = seeded(Stack, 1024, 32)
    weights = {name: w.detach().clone().requires_grad_() for name, w in model.named_parameters()}
    model.to("meta")

    def loss_of(weights: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        return torch.func.functional_call(model, weights, (x,))

    compiled: Any = loss_of
    if options is not None:
        compiled = torch.compile(loss_of, backend="fxremat", options=options)
    losses = []

    def run(steps: int) -> None:
        for _ in range(steps):
            loss = compiled(weights, x)
            losses.append(float(loss.detach()))
            found = torch.autograd.grad(loss, list(weights.values()))
            with torch.no_grad():
                torch._foreach_sub_(list(weights.values()), found)

    run(2)
    peak = fxremat.measure_peak(lambda: run(STEPS), held=(weights, x)).peak_bytes
    whole = torch.func.grad(compiled)(weights, x)  # inside of a transform nothing is compiled
    torch.testing.assert_close(whole, torch.func.grad(loss_of)(weights, x))
    return losses, peak


def test_steps_of_a_functional_call_stay_within_the_budget() -> None:
    expected, plain = functional(None)
    budget = plain // 2
    losses, peak = functional({"executor": "aot_eager", "memory_budget": budget, "reserve": SMALL})
    assert peak <= budget
    assert losses[-1] < losses[0]
    torch.testing.assert_close(losses, expected)

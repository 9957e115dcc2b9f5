"""Training loops as they are written, for `benchmarks.loops`: each says when a step begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

STEPS = 6
"""Of each loop, after which none reserves more than before."""
MICRO_BATCHES = 4
NORM = 1.0
RATE = 1e-4

NextStep = Callable[[], None]
Loop = Callable[[nn.Module, Sequence[Any], Sequence[Any], NextStep], None]
"""Runs a model on its inputs, or on others of another shape; calls the last one between steps."""


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, RATE, fused=True)


def foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, RATE, foreach=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, RATE, momentum=0.9)


def _steps(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    batch: Callable[[int], Sequence[Any]],
    next_step: NextStep,
    after: Callable[[int], None] = lambda step: None,
) -> None:
    """Steps on the batch of each, and what comes ``after`` each."""
    for step in range(STEPS):
        if step:
            next_step()
        model(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after(step)


def adamw_fused(model: nn.Module, inputs: Any, other: Any, next_step: NextStep) -> None:
    _steps(fused(model.parameters()), model, lambda step: inputs, next_step)


def adamw_foreach(model: nn.Module, inputs: Any, other: Any, next_step: NextStep) -> None:
    _steps(foreach(model.parameters()), model, lambda step: inputs, next_step)


def sgd_momentum(model: nn.Module, inputs: Any, other: Any, next_step: NextStep) -> None:
    _steps(momentum(model.parameters()), model, lambda step: inputs, next_step)


def accumulate4(model: nn.Module, inputs: Any, other: Any, next_step: NextStep) -> None:
    optimizer = fused(model.parameters())
    for step in range(STEPS):
        if step:
            next_step()
        for _ in range(MICRO_BATCHES):
            (model(*inputs) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def zero_grad_late_and_clip(model: nn.Module, inputs: Any, other: Any, next_step: NextStep) -> None:
    """Gradients of the last step live until the forward of the next one has ended."""
    optimizer = fused(model.parameters())
    for step in range(STEPS):
        if step:
            next_step()
        loss = model(*inputs)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()


def evaluate(model: nn.Module, inputs: Any, other: Any, next_step: NextStep) -> None:
    """Every second step is followed by an evaluation of two batches."""

    def after(step: int) -> None:
        if step % 2:
            model.eval()
            with torch.no_grad():
                losses = [model(*inputs) for _ in range(2)]
            del losses
            model.train()

    _steps(fused(model.parameters()), model, lambda step: inputs, next_step, after)


def second_shape(model: nn.Module, inputs: Any, other: Any, next_step: NextStep) -> None:
    """Every third step has a batch of another shape, as the last one of an epoch."""

    def batch(step: int) -> Any:
        return other if step % 3 == 2 else inputs

    _steps(fused(model.parameters()), model, batch, next_step)


LOOPS: dict[str, Loop] = {
    one.__name__: one
    for one in (
        adamw_fused,
        adamw_foreach,
        sgd_momentum,
        accumulate4,
        zero_grad_late_and_clip,
        evaluate,
        second_shape,
    )
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **dict.fromkeys(LOOPS, fused),
    "adamw_foreach": foreach,
    "sgd_momentum": momentum,
}
"""Of each loop; whoever plans a loop is told."""

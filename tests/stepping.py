"""Training with an optimizer that steps inside of the backward, and beside it for comparison."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks.copying import CopyRecord, copy_trace
from tests.host_weights import equal, moved
from tests.small import Layers, seeded

RATE = 2e9
STEP_OPTIONS: dict[str, Any] = {"solver": "greedy", "host_bandwidth": int(RATE)}
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing that was compiled before counts, and a backward runs in one thread."""
    torch._dynamo.reset()
    several = torch.accelerator.is_available()  # threads of autograd, one for each device
    with torch.autograd.set_multithreading_enabled(False) if several else nullcontext():
        yield
    torch._dynamo.reset()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def compiled_model(model: nn.Module, executor: str = "aot_eager", **options: Any) -> Any:
    options = {**STEP_OPTIONS, "executor": executor, **options}
    return torch.compile(model, backend="fxremat", options=options)


def eager(model: nn.Module) -> Loss:
    """What ops that run as they are give, too, without a trace."""
    return model


def layers_and_input(depth: int = 4, width: int = 64) -> tuple[nn.Module, Tensor]:
    return seeded(lambda: Layers(depth, width), 8, width)


def trained(
    made: tuple[nn.Module, Tensor],
    loss_of: Callable[[nn.Module], Loss],
    optimizer: torch.optim.Optimizer | None,
    steps: int = 10,
) -> list[Tensor]:
    """Losses and parameters; with an optimizer it steps after each backward."""
    model, x = made
    loss = loss_of(model)
    losses = []
    for number in range(steps):
        value = loss(x if x.dtype == torch.int64 else x + number)
        torch.autograd.backward(value)
        losses.append(value.detach())
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def same_training(
    make: Callable[[], tuple[nn.Module, Tensor]],
    loss_of: Callable[[nn.Module], Loss] = compiled_model,
    make_optimizer: Make = adamw,
    plain_loss_of: Callable[[nn.Module], Loss] | None = None,
    **weights: Any,
) -> list[CopyRecord]:
    """Train with steps after and in the backward, and compare; the steps that began early.

    The former as ``plain_loss_of`` says, or as the latter.
    """
    plain = make()
    moved(plain[0], **weights)
    optimizer = make_optimizer(list(plain[0].parameters()))
    expected = trained(plain, plain_loss_of or loss_of, optimizer)
    ours = make()
    fxremat.step_in_backward(moved(ours[0], **weights), make_optimizer)
    with copy_trace() as records:
        found = trained(ours, loss_of, None)
    assert equal(found, expected)
    return [record for record in records if record.what == "step"]


class Slow(torch.optim.SGD):
    """Takes its time, and writes parameters in two parts."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.flatten()[::2].add_(parameter.grad.flatten()[::2], alpha=-0.1)
                time.sleep(0.003)
                parameter.flatten()[1::2].add_(parameter.grad.flatten()[1::2], alpha=-0.1)


OPTIMIZERS: dict[str, Make] = {
    "fused AdamW": adamw,
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}

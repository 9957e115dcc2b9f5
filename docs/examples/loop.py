"""Shared by the examples: command-line arguments, and a training loop that prints its peak."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fxremat

Batch = tuple[Tensor, ...]


def arguments(about: str, *names: str, **sizes: int) -> argparse.Namespace:
    """``--budget``, ``--device``, ``--steps``, and the ``names`` and ``sizes`` of the example."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--budget", help="bytes such as 8GiB; without it, plain torch.compile")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=5)
    for name in names:
        parser.add_argument(f"--{name}")
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def train(
    model: nn.Module,
    batch: Callable[[int], Batch],
    steps: int,
    budget: str | None,
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> list[float]:
    """Train ``model``, which returns its loss, with AdamW; returns the loss of each step.

    The last step is measured: it says the peak of everything that training holds.
    """
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {} if budget is None else {"memory_budget": budget}
    model.compile(backend="inductor" if budget is None else "fxremat", options=options)
    losses: list[float] = []

    def step() -> None:
        loss = model(*held)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    for k in range(steps):
        held = tuple(x.to(device) for x in batch(k))
        if k < steps - 1:
            step()
        else:
            taken = fxremat.measure_peak(step, held=(model, optimizer, *held), device=device)
            say(f"peak {taken.peak_bytes / 2**20:.1f} MiB, budget {budget or 'none'}")
        say(f"step {k}: loss {losses[-1]:.4f}")
    for report in fxremat.reports():
        say(report.summary())
    return losses

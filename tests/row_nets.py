"""Models with parts that can be computed for a few rows at a time, and inputs for them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fxremat.passes.joint_graph import JointGraph
from tests.graphs import Net
from tests.row_sites import trace

D, V = 16, 128


def rows(*shape: int) -> torch.Tensor:
    """A fixed random input that has a gradient."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(2))
    return made.requires_grad_()


def labels(*shape: int, ignored: bool = False) -> torch.Tensor:
    """Fixed random labels; with ``ignored``, a third of them is -100."""
    dice = torch.Generator().manual_seed(3)
    made = torch.randint(0, V, shape, generator=dice)
    return torch.where(torch.rand(shape, generator=dice) < 0.3, -100, made) if ignored else made


def head(bias: bool = True) -> nn.Linear:
    """A linear layer from features to logits."""
    torch.manual_seed(1)
    return nn.Linear(D, V, bias=bias)


def z_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with a penalty on the size of the logits."""
    return F.cross_entropy(logits, y) + 1e-2 * (torch.logsumexp(logits, -1) ** 2).mean()


def gated() -> Net:
    """An MLP whose hidden layer is a product."""
    torch.manual_seed(1)
    sizes = {"gate": (D, 4 * D), "up": (D, 4 * D), "down": (4 * D, D)}
    parts = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
    return Net(lambda m, x: x + m.down(F.silu(m.gate(x)) * m.up(x)), **parts)


def up_and_down(activation: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 4 * D), activation(), nn.Linear(4 * D, D))


WEIGHTS = torch.rand(V, generator=torch.Generator().manual_seed(4)) + 0.5
LOSS = Net(lambda m, x, y: F.cross_entropy(m.head(x), y), head=head())
STEPS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "loss": (LOSS, (rows(50, D), labels(50))),
    "z": (Net(lambda m, x, y: z_loss(m.head(x), y), head=head()), (rows(50, D), labels(50))),
    "mlp": (up_and_down(nn.GELU), (rows(50, D),)),
    "gated": (gated(), (rows(50, D),)),
    "norm": (
        nn.Sequential(nn.Linear(D, 4 * D), nn.BatchNorm1d(4 * D), nn.ReLU(), nn.Linear(4 * D, D)),
        (rows(50, D),),
    ),
    "weighted": (
        Net(
            lambda m, x, y: F.cross_entropy(
                m.head(x), y, weight=WEIGHTS.to(x.dtype), label_smoothing=0.1
            ),
            head=head(),
        ),
        (rows(50, D), labels(50, ignored=True)),
    ),
}


@cache
def traced_step(name: str) -> JointGraph:
    """The joint graph of a step, traced once for all tests; not to be changed."""
    return trace(*STEPS[name]).joint

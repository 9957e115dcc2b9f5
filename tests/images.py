"""Fixed random images."""

from __future__ import annotations

import torch

WIDTH = 8


def images(*shape: int) -> torch.Tensor:
    """Fixed random images that have a gradient."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).requires_grad_()

"""Models of timm: put the loss beside the model, and compile both.

python docs/trainers/timm_vit.py 60MiB
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import timm
import torch
from tiny import LOOP_BYTES, Watch, run, unwatched
from torch import nn
from torch.nn import functional as F


class Classified(nn.Module):
    """The loss of a batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(images), classes)


def train(backend: str, options: Mapping[str, Any], watch: Watch = unwatched) -> list[float]:
    """Ten steps on random images; the loss of each."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, depth=6, num_classes=100, patch_size=8
    )
    step_loss = Classified(model)
    optimizer = torch.optim.AdamW(step_loss.parameters(), lr=1e-4)
    if backend == "fxremat":
        options = {"reserve": LOOP_BYTES, **options}
    step_loss.compile(backend=backend, options=dict(options))
    made = torch.Generator().manual_seed(1)
    losses = []
    for step in range(10):
        images = torch.randn(16, 3, 64, 64, generator=made)
        classes = torch.randint(0, 100, (16,), generator=made)
        watch(step, [step_loss, optimizer])
        loss = step_loss(images, classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    run(train)

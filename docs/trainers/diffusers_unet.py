"""Diffusers: what a step of training computes is one function, and that is what is compiled.

python docs/trainers/diffusers_unet.py 100MiB
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel, UNet2DModel
from tiny import LOOP_BYTES, Watch, run, unwatched
from torch import nn
from torch.nn import functional as F


def unet() -> UNet2DModel:
    """A small U-Net for images of 32 pixels."""
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        dropout=0.0,
    )


def dit() -> DiTTransformer2DModel:
    """A small DiT for latents of 16 pixels."""
    torch.manual_seed(0)
    return DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        sample_size=16,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
    )


class Denoising(nn.Module):
    """The loss of a batch: how well the noise is told from noisy images."""

    def __init__(self, model: nn.Module, **conditions: Any) -> None:
        super().__init__()
        self.model = model
        self.scheduler = DDPMScheduler(num_train_timesteps=1000)
        self.conditions = conditions

    def forward(
        self, images: torch.Tensor, noise: torch.Tensor, times: torch.Tensor
    ) -> torch.Tensor:
        noisy = self.scheduler.add_noise(images, noise, times)
        told = self.model(noisy, times, **self.conditions).sample
        return F.mse_loss(told.float(), noise.float())


def train(
    backend: str,
    options: Mapping[str, Any],
    watch: Watch = unwatched,
    kind: str = "unet",
) -> list[float]:
    """Ten steps on random images; the loss of each."""
    made = torch.Generator().manual_seed(1)
    if kind == "unet":
        step_loss, shape = Denoising(unet()), (8, 3, 32, 32)
    else:
        labels = torch.arange(64) % 10
        step_loss, shape = Denoising(dit().eval(), class_labels=labels), (64, 4, 16, 16)
    optimizer = torch.optim.AdamW(step_loss.parameters(), lr=1e-4)
    if backend == "fxremat":
        options = {"reserve": LOOP_BYTES, **options}
    step_loss.compile(backend=backend, options=dict(options))
    losses = []
    for step in range(10):
        images, noise = (torch.randn(shape, generator=made) for _ in range(2))
        times = torch.randint(0, 1000, (shape[0],), generator=made)
        watch(step, [step_loss, optimizer])
        loss = step_loss(images, noise, times)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    run(train)

"""A 3-D U-Net that segments volumes, as for medical images: few weights, and large activations.

    python docs/examples/volumes.py --budget 26MiB
    python docs/examples/volumes.py --size 192 --width 32 --batch 2 --device cuda --budget 40GiB

The network has the levels of nnU-Net (Isensee et al., Nature Methods 18, 2021): two convolutions,
each normalised by itself, at each of four resolutions, and connections across.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from loop import Batch, arguments, train
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 3


def twice(wide_in: int, wide_out: int) -> nn.Sequential:
    """Two convolutions."""
    layers: list[nn.Module] = []
    for width in (wide_in, wide_out):
        layers += [nn.Conv3d(width, wide_out, 3, padding=1), nn.InstanceNorm3d(wide_out)]
        layers += [nn.LeakyReLU(0.01)]
    return nn.Sequential(*layers)


class Segmenter(nn.Module):
    """A U-Net that returns its loss, for volumes (batch, 1, size, size, size) and voxel classes."""

    def __init__(self, width: int = 8, levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(twice(a, b) for a, b in zip([1, *widths], widths, strict=False))
        rising = widths[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, 2) for a, b in pairwise(rising))
        self.across = nn.ModuleList(twice(2 * b, b) for b in rising[1:])
        self.head = nn.Conv3d(width, CLASSES, 1)

    def forward(self, volumes: Tensor, classes: Tensor) -> Tensor:
        seen, x = list[Tensor](), volumes
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool3d(x, 2))
            seen.append(x)
        seen.pop()
        for up, block in zip(self.up, self.across, strict=True):
            x = block(torch.cat((up(x), seen.pop()), 1))
        return F.cross_entropy(self.head(x), classes)


def balls(count: int, size: int) -> Batch:
    """Noisy volumes with a ball in each, and each voxel's class: nothing, the rim, the ball."""
    axis = torch.linspace(-1, 1, size)
    x, y, z = torch.meshgrid(axis, axis, axis, indexing="ij")
    middle = torch.rand(count, 3, 1, 1, 1) - 0.5
    apart = [(one - middle[:, k]) ** 2 for k, one in enumerate((x, y, z))]
    distance = torch.stack(apart).sum(0).sqrt()
    classes = (distance < 0.4).long() + (distance < 0.3).long()
    return (classes[:, None] + 0.5 * torch.randn(count, 1, size, size, size)), classes


def main(size: int = 32, width: int = 8, batch: int = 2, steps: int = 5, budget: str | None = None,
         device: str = "cpu") -> list[float]:  # fmt: skip
    """The loss of each step."""
    torch.manual_seed(0)
    return train(Segmenter(width), lambda step: balls(batch, size), steps, budget, device)


if __name__ == "__main__":
    main(**vars(arguments(__doc__ or "", size=32, width=8, batch=2)))

"""A Fourier neural operator that learns the next state of a field, as for weather.

    python docs/examples/weather.py --budget 34MiB
    python docs/examples/weather.py --lat 720 --lon 1440 --width 64 --batch 4 --device cuda \
        --budget 60GiB

The operator is that of Li et al., arXiv:2010.08895, section 4: it multiplies the lowest frequencies
with complex weights, and adds a local map. The field is made here: tracers that a wind carries
around the globe, and that spread.
"""

from __future__ import annotations

import torch
from loop import Batch, arguments, train
from torch import Tensor, nn
from torch.nn import functional as F

TRACERS = 4


class Spectral(nn.Module):
    """Weights for the lowest frequencies, ``modes`` of them each way."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, 2, width, width, modes, modes) / width)

    def forward(self, x: Tensor) -> Tensor:
        found, m = torch.fft.rfft2(x), self.modes
        weights = torch.complex(self.weight[0], self.weight[1])
        corners = (found[:, :, :m, :m], weights[0]), (found[:, :, -m:, :m], weights[1])
        north, south = (
            F.pad(torch.einsum("bixy,ioxy->boxy", part, weight), (0, found.shape[-1] - m))
            for part, weight in corners
        )
        between = north.new_zeros((*north.shape[:2], x.shape[-2] - 2 * m, north.shape[-1]))
        field: Tensor = torch.fft.irfft2(torch.cat((north, between, south), 2), s=x.shape[-2:])
        return field


class Operator(nn.Module):
    """Returns the loss, for a field (batch, tracers, latitudes, longitudes) and its next state."""

    def __init__(self, width: int = 24, modes: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(TRACERS, width, 1), nn.Conv2d(width, TRACERS, 1)
        self.spectral = nn.ModuleList(Spectral(width, modes) for _ in range(layers))
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))

    def forward(self, field: Tensor, following: Tensor) -> Tensor:
        x = self.up(field)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        loss: Tensor = F.mse_loss(field + self.down(x), following)
        return loss


def carried(count: int, lat: int, lon: int) -> Batch:
    """Smooth fields, and the same fields after a wind that is strongest at the equator."""
    coarse = torch.randn(count, TRACERS, lat // 8, lon // 8)
    field = F.interpolate(coarse, (lat, lon), mode="bicubic")
    wind = (3 * torch.cos(torch.linspace(-1.5, 1.5, lat))).round().long()
    moved = torch.stack(
        [row.roll(int(n), -1) for row, n in zip(field.unbind(2), wind, strict=True)], 2
    )
    return field, F.avg_pool2d(moved, 3, 1, 1)


def main(lat: int = 64, lon: int = 128, width: int = 24, batch: int = 4, steps: int = 5,
         budget: str | None = None, device: str = "cpu") -> list[float]:  # fmt: skip
    """The loss of each step."""
    torch.manual_seed(0)
    return train(Operator(width), lambda step: carried(batch, lat, lon), steps, budget, device)


if __name__ == "__main__":
    main(**vars(arguments(__doc__ or "", lat=64, lon=128, width=24, batch=4)))

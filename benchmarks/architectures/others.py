"""Architectures in plain torch: recurrent, spectral, on graphs, with derivatives, two models."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cases import Case, Cases, backward, with_loss


class Recurrent(nn.Module):
    """A language model on nn.LSTM."""

    def __init__(self, words: int = 500, width: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.cells = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.head(self.cells(self.words(tokens))[0])
        loss: Tensor = F.cross_entropy(found.flatten(0, 1), tokens.flatten())
        return loss


def lstm() -> Case:
    """nn.LSTM, which Dynamo only traces when told to."""
    torch._dynamo.config.allow_rnn = True
    return with_loss(Recurrent(), torch.randint(0, 500, (32, 12)))


class SpectralConvolution(nn.Module):
    """Multiplies the lowest frequencies with complex weights (Fourier neural operator)."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, 2, width, width, modes, modes) / width)

    def forward(self, x: Tensor) -> Tensor:
        found, m = torch.fft.rfft2(x), self.modes
        weights = torch.complex(self.weight[0], self.weight[1])
        parts = (
            torch.einsum("bixy,ioxy->boxy", found[:, :, rows, :m], weights[index])
            for index, rows in enumerate((slice(0, m), slice(-m, None)))
        )
        low, high = (F.pad(part, (0, found.shape[-1] - m)) for part in parts)
        gap = low.new_zeros((*low.shape[:2], x.shape[-2] - 2 * m, low.shape[-1]))
        field: Tensor = torch.fft.irfft2(torch.cat((low, gap, high), 2), s=x.shape[-2:])
        return field


class FourierOperator(nn.Module):
    """Maps a field to its next state (Li et al., arXiv:2010.08895, section 4)."""

    def __init__(self, width: int = 24, modes: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(3, width, 1), nn.Conv2d(width, 3, 1)
        self.spectral = nn.ModuleList(SpectralConvolution(width, modes) for _ in range(layers))
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))

    def forward(self, field: Tensor, target: Tensor) -> Tensor:
        x = self.up(field)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        loss: Tensor = F.mse_loss(self.down(x), target)
        return loss


def fno() -> Case:
    """A Fourier neural operator, with complex numbers inside."""
    return with_loss(FourierOperator(), torch.randn(8, 3, 64, 64), torch.randn(8, 3, 64, 64))


class Messages(nn.Module):
    """One round of messages along edges, normalised and added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        sent = self.edge(torch.cat((x[ends[0]], x[ends[1]]), -1))
        got: Tensor = self.norm(torch.zeros_like(x).index_add(0, ends[1], sent))
        return x + got


class GraphNetwork(nn.Module):
    """Sorts the nodes of a graph."""

    def __init__(self, width: int = 64, rounds: int = 4) -> None:
        super().__init__()
        self.rounds = nn.ModuleList(Messages(width) for _ in range(rounds))
        self.head = nn.Linear(width, 10)

    def forward(self, nodes: Tensor, ends: Tensor, classes: Tensor) -> Tensor:
        for each in self.rounds:
            nodes = each(nodes, ends)
        loss: Tensor = F.cross_entropy(self.head(nodes), classes)
        return loss


def gnn() -> Case:
    """A graph neural network: gathers and scattered sums."""
    ends = torch.randint(0, 2000, (2, 8000))
    return with_loss(GraphNetwork(), torch.randn(2000, 64), ends, torch.randint(0, 10, (2000,)))


class Physics(nn.Module):
    """u(t, x) that is to satisfy the heat equation: derivatives are taken inside of the loss."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        inner = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.Tanh())]
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), *inner, nn.Linear(width, 1))

    def forward(self, points: Tensor) -> Tensor:
        def u(point: Tensor) -> Tensor:
            result: Tensor = self.net(point).squeeze(-1)
            return result

        def u_x(point: Tensor) -> Tensor:
            slope: Tensor = torch.func.grad(u)(point)[1]
            return slope

        first = torch.func.vmap(torch.func.grad(u))(points)
        second = torch.func.vmap(torch.func.grad(u_x))(points)
        residual: Tensor = first[:, 0] - second[:, 1]
        return residual.square().mean()


def pinn() -> Case:
    """A physics-informed network: derivatives of derivatives inside of the graph."""
    return with_loss(Physics(), torch.rand(2048, 2))


def _mlp(wide_in: int, wide_out: int, width: int = 256) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(wide_in, width), nn.LeakyReLU(0.2)]
    for _ in range(2):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(width, wide_out))


def gan() -> Case:
    """Two models in turn: three backward passes in one iteration."""
    generator, critic = _mlp(32, 128), _mlp(128, 1)
    real, noise = torch.randn(1024, 128), torch.randn(1024, 32)

    def run(generator: Callable[..., Tensor], critic: Callable[..., Tensor]) -> None:
        made = generator(noise)
        backward(F.softplus(-critic(real)).mean())
        backward(F.softplus(critic(made.detach())).mean())
        backward(F.softplus(-critic(made)).mean())

    return Case((generator, critic), run, (real, noise))


class Twice(nn.Sequential):
    """Two convolutions in three dimensions."""

    def __init__(self, wide_in: int, wide_out: int) -> None:
        layers: list[nn.Module] = []
        for width in (wide_in, wide_out):
            layers += [nn.Conv3d(width, wide_out, 3, padding=1), nn.InstanceNorm3d(wide_out)]
            layers += [nn.LeakyReLU(0.01)]
        super().__init__(*layers)


class Volumes(nn.Module):
    """A U-Net on volumes, as nnU-Net has it, with one level."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.below = Twice(1, width), Twice(width, 2 * width)
        self.up = nn.ConvTranspose3d(2 * width, width, 2, 2)
        self.last, self.head = Twice(2 * width, width), nn.Conv3d(width, 3, 1)

    def forward(self, volumes: Tensor, classes: Tensor) -> Tensor:
        across = self.first(volumes)
        x = self.up(self.below(F.max_pool3d(across, 2)))
        return F.cross_entropy(self.head(self.last(torch.cat((x, across), 1))), classes)


def unet3d() -> Case:
    """A U-Net on volumes."""
    volumes, classes = torch.randn(2, 1, 32, 32, 32), torch.randint(0, 3, (2, 32, 32, 32))
    return with_loss(Volumes(), volumes, classes)


OTHERS: Cases = {one.__name__: one for one in (lstm, fno, gnn, pinn, gan, unet3d)}

"""Piecewise constant functions that come nearest to a function on a grid.

The optimum by the dynamic programme of Novikov et al. 2022 (arXiv 2202.00441, section 3.2): the
best way to cut the first j points into k parts is the best way to cut the first i into k - 1, and
a last part from i to j, for the best i. A part costs the squared error of its mean. Each boundary
is then moved within its cell of the grid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Steps:
    """A piecewise constant function: ``levels[i]`` from ``boundaries[i - 1]`` on."""

    boundaries: tuple[float, ...]
    levels: tuple[float, ...]
    mean_error: float
    """The root of the mean squared error over the grid."""


def _costs(values: torch.Tensor) -> torch.Tensor:
    """``costs[i, j]``: squared error of one level for the values from i up to, without, j."""
    zero = values.new_zeros(1)
    ones = torch.cat([zero, values.cumsum(0)])
    squares = torch.cat([zero, values.square().cumsum(0)])
    count = torch.arange(len(values) + 1, dtype=values.dtype)
    width = count[None, :] - count[:, None]
    total = ones[None, :] - ones[:, None]
    error = squares[None, :] - squares[:, None] - total.square() / width.clamp(min=1)
    return error.clamp_(min=0).masked_fill_(width <= 0, torch.inf)


def optimal_steps(grid: torch.Tensor, values: torch.Tensor, levels: int) -> Steps:
    """The best piecewise constant function of so many levels, for values on a sorted grid."""
    costs = _costs(values)
    best, cuts = costs[0], []
    for _ in range(levels - 1):  # best[j]: error of the first j values, with one level more
        best, cut = (best[:, None] + costs).min(dim=0)
        cuts.append(cut)
    ends = [len(values)]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    inner = sorted(ends[1:])
    parts = torch.tensor_split(values, inner)
    return Steps(
        boundaries=tuple(float(grid[i - 1] + grid[i]) / 2 for i in inner),
        levels=tuple(float(part.mean()) for part in parts),
        mean_error=float((best[-1] / len(values)).clamp(min=0).sqrt()),
    )


def refined(steps: Steps, grid: torch.Tensor, function: Callable[..., torch.Tensor]) -> Steps:
    """Boundaries moved to where the function is half-way between the levels beside them.

    Each stays in its cell of the grid. Where the function jumps, the boundary is then exact: the
    last number before the jump, in the precision in which the function takes its argument.
    """
    where = torch.searchsorted(grid, torch.tensor(steps.boundaries, dtype=grid.dtype))
    low, high = grid[where - 1], grid[where]
    levels = torch.tensor(steps.levels, dtype=grid.dtype)
    half = (levels[1:] + levels[:-1]) / 2
    rising = function(high) > half
    crossed = rising != (function(low) > half)
    for _ in range(60):
        middle = (low + high) / 2
        passed = (function(middle) > half) == rising
        low, high = torch.where(passed, low, middle), torch.where(passed, middle, high)
    found = torch.where(crossed, low, torch.tensor(steps.boundaries, dtype=grid.dtype))
    return replace(steps, boundaries=tuple(found.tolist()))

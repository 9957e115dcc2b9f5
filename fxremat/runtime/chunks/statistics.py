"""Mean and variance over all rows, of chunks that are seen one after the other.

Of each chunk its mean and the sum of squares around it are computed, and joined with those of the
chunks before as Chan, Golub, LeVeque show ("Algorithms for computing the sample variance", 1983,
eq. 2.1): no sum of squares is ever the difference of two large numbers.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from fxremat.runtime.chunks.buffers import VARIANCE
from fxremat.runtime.chunks.program import Instruction


class RunningStatistics:
    """Mean and variance along some dimensions, the rows among them; biased until `variance`."""

    def __init__(self, one: Instruction, number: int, device: torch.device) -> None:
        _, self.dims = one.args
        self.asked_by = number
        self.count = 0
        self.mean = torch.zeros(one.row_shape, dtype=one.dtype, device=device)
        self.squares = torch.zeros_like(self.mean)

    def add(self, given: torch.Tensor) -> None:
        """Take a chunk in; it takes memory of the chunk's size meanwhile."""
        count = prod(given.shape[dim] for dim in self.dims)
        mean = given.sum(self.dims, keepdim=True).div_(count)
        around = given - mean
        squares = around.square_().sum(self.dims)
        change = mean.view_as(self.mean).sub_(self.mean)
        total = self.count + count
        self.mean.add_(change, alpha=count / total)
        self.squares.add_(squares).add_(change.square_(), alpha=self.count * count / total)
        self.count = total

    def variance(self, correction: float) -> torch.Tensor:
        """The variance; ``correction`` is what is taken off the number of elements."""
        return self.squares.div(max(0.0, self.count - correction))


class StatisticResult:
    """One of the two as a sum of a program; the one that they were made for takes chunks in."""

    def __init__(self, both: RunningStatistics, number: int, one: Instruction) -> None:
        self.both, self.one = both, one
        self.is_first = both.asked_by == number

    def add(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Take a chunk in."""
        if self.is_first:
            self.both.add(args[0])

    def finish(self) -> torch.Tensor:
        """The result."""
        if self.one.op == VARIANCE:
            return self.both.variance(self.one.kwargs["correction"])
        return self.both.mean

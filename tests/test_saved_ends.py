"""What ends a short computation is saved in the place of what begins it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxremat.passes.recompute import apply_plan
from tests.graphs import Capture, assert_plan_changes_nothing, batch, capture, linear


class Norm(nn.Module):
    """Divides by root mean squares, or ``wide``, by roots; ``seen``: the mean is a result, too."""

    def __init__(self, *, seen: bool = False, wide: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.seen, self.wide = linear(32), linear(32), seen, wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        mean = x.square() if self.wide else x.square().mean(-1, keepdim=True)
        loss = self.last(x * torch.rsqrt(mean + 1e-5)).sum()
        return loss + mean.sum() if self.seen else loss  # type: ignore[no-any-return]


def saved(seen: Capture) -> set[str]:
    """Operators whose results the backward reads."""
    planned = apply_plan(seen.found, seen.steps)
    return {node.name.split("_")[0] for node in planned.saved}


def test_the_root_is_saved_and_not_the_mean() -> None:
    seen = capture(Norm(), [batch(8, 32)], fused=True)
    assert "rsqrt" in saved(seen)
    assert "mean" not in saved(seen)
    assert not any("rsqrt_inline" in node.name for node in seen.backward.graph.nodes)


def test_what_else_reads_the_beginning_keeps_it() -> None:
    """An elementwise op of as many elements is no statistic: its end would be another tensor."""
    seen = capture(Norm(wide=True), [batch(8, 32)], fused=True)
    assert "rsqrt" not in saved(seen)


@pytest.mark.parametrize("net", [Norm(), Norm(seen=True), nn.LayerNorm(32), nn.Softmax(-1)])
def test_gradients_are_those_of_eager(net: nn.Module) -> None:
    assert_plan_changes_nothing(nn.Sequential(linear(32), net), [batch(8, 32)], fused=True)

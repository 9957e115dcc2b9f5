"""A hypothesis strategy of random nets over square matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from tests.graphs import Net, batch

UNARY = (torch.sin, torch.tanh, torch.exp, lambda t: t.t(), lambda t: t + 1, lambda t: t.relu())
SIDE = 6


def _layers(kinds: Sequence[int], net: Any, x: torch.Tensor) -> torch.Tensor:
    values = [x]
    for index, kind in enumerate(kinds):
        last, other = values[-1], values[(index * 7 + kind) % len(values)]
        if kind < len(UNARY):
            made = UNARY[kind](last)
        elif kind == len(UNARY):
            made = last @ net.weight
        elif kind == len(UNARY) + 1:
            made = last * other
        elif kind == len(UNARY) + 2:
            made = torch.cat(torch.split(last, 2, 1)[::-1], 1) + other
        elif kind == len(UNARY) + 3:
            made = torch.softmax(last, 1)
        elif kind == len(UNARY) + 4:
            made = nn.functional.dropout(last, 0.3)
        else:
            made = last - last.mean(1, keepdim=True)
        values.append(made)
    result: torch.Tensor = values[-1] @ net.weight + values[len(values) // 2]
    return result


@st.composite
def random_nets(draw: st.DrawFn) -> Net:
    """A chain of layers with skip connections, over square matrices."""
    kinds = draw(st.lists(st.integers(0, len(UNARY) + 5), min_size=2, max_size=10))
    weight = nn.Parameter(batch(SIDE, SIDE) / SIDE)
    return Net(lambda net, x: _layers(kinds, net, x), weight=weight)

"""What a call of ``rows`` says of rows that it need not compute, as numbers to try it on.

Random labels are never the one that is ignored, and random masks are never 0. So where a call says
which number of which input makes a row ignored, part of what that input is computed from gets this
number: then rows are left out, and what is left out has to make no difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fxremat.runtime.chunks.operator import ROWS
from fxremat.runtime.chunks.program import Number, parse
from fxremat.verify.site_cuts import Part


def ignored_numbers(part: Part) -> dict[fx.Node, Number]:
    """The values that a part begins with of which some elements make rows ignored."""
    found: dict[fx.Node, Number] = {}
    for node in part.cut.nodes:
        ignored = parse(str(node.args[2])).ignored if node.target is ROWS else None
        if ignored is None:
            continue
        rows: Any = node.args[0]
        label = rows[ignored.label]
        for start in _before(part, [label]) & set(part.frontier):
            value = start.meta.get("val")
            if isinstance(value, torch.Tensor) and value.dtype == label.meta["val"].dtype:
                found[start] = ignored.number
    return found


def _before(part: Part, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All that some nodes are computed from, over both graphs, as far as the part goes back."""
    found, ends, stack = set[fx.Node](), set(part.frontier), list(nodes)
    while stack:
        node = stack.pop()
        if node in part.cut.reads:
            node = part.cut.reads[node]
        if node not in found:
            found.add(node)
            stack.extend(() if node in ends else node.all_input_nodes)
    return found


def with_number(value: torch.Tensor, number: Number, generator: torch.Generator) -> torch.Tensor:
    """The same value with the number in half of its elements."""
    chosen = torch.rand(value.shape, generator=generator) < 1 / 2
    made = torch.empty_like(value)
    return made.copy_(torch.where(chosen, torch.tensor(number, dtype=value.dtype), value))

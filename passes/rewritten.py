"""A planned joint graph as plain data, and the endings that mark its new nodes in their names."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

RECOMPUTED = "_recompute"
"""A copy of a node whose op runs again."""
INLINED = "_inline"
"""A copy inside of one op, which nothing else reads."""
WRITTEN = "_written"
"""A node that `passes.held_order` makes Inductor write to memory."""


@dataclass(frozen=True)
class Rewritten:
    """The rewritten joint graph, and the nodes of its forward that its backward reads."""

    module: fx.GraphModule
    saved: tuple[fx.Node, ...]
    recomputed: tuple[str, ...]
    moved: tuple[str, ...] = ()

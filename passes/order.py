"""Hold the planned order through Inductor.

Inductor keeps the order of a graph's nodes, but for one thing: two loops that read the same
value may be fused, and then run together where the later one can. What one of them reads, or
the other one writes, lives longer than planned. So in a backward that recomputes, every loop
whose result is written to memory, and every recomputed extern kernel, gets ordering-only
dependencies on the last extern kernel of the backward proper and the last recomputed one that
stand before it:

    conv_4_recompute ... mul_1, conv_backward_1, conv_3_recompute, mul_2 ...

`mul_2` runs after `conv_backward_1`, which reads `mul_1`: so the two cannot be fused. The
dependency also makes Inductor write the result instead of computing it again in each reader,
which would keep alive what it is computed from.

The pass runs on the backward after Inductor's own passes (inserted earlier, the dependency
would keep the graph out of Inductor's caches). It finds what to hold by name and position
alone, so that equal graph text gives equal constraints.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxremat import compat
from fxremat.passes.joint_graph import is_tensor, is_view
from fxremat.passes.materialisation import is_fusable, users_through_views
from fxremat.passes.recompute import RECOMPUTED, WRITTEN


def _is_anchor(node: fx.Node) -> bool:
    """Whether ``node`` comes out of an extern kernel and no loop will ever write over it.

    To Inductor a dependency is a use: it would keep a loop from overwriting the anchor.
    """
    call = node.all_input_nodes[0] if node.target is operator.getitem else node
    return (
        is_tensor(node)
        and not is_fusable(call)
        and all(u.op == "output" or not is_fusable(u) for u in users_through_views(node))
    )


def constraints(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Node -> the anchors it must run after; empty for a graph that recomputes nothing."""
    after: dict[fx.Node, tuple[fx.Node, ...]] = {}
    last: dict[bool, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or is_view(node) or not is_tensor(node):
            continue
        again = RECOMPUTED in node.name
        loop = is_fusable(node)
        held = again or (loop and WRITTEN in node.name)
        if held and last and not _is_item(node):
            after[node] = tuple(last.values())
        if _is_anchor(node):
            last[again] = node
    return after


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


@dataclass(frozen=True)
class HoldOrder(compat.CustomGraphPass):
    """Inductor's post-grad pass; ``then`` is what the user had configured there."""

    version: str
    then: Callable[[fx.Graph], None] | None = None

    def __call__(self, graph: fx.Graph) -> None:
        """Constrain the graph in place."""
        if self.then is not None:
            self.then(graph)
        after = constraints(graph)
        if after:
            compat.preserve_order(graph, after)

    def uuid(self) -> Any:
        """None, which keeps the graph out of the cache, where the user's pass asks for that."""
        if self.then is None:
            return f"fxremat.order {self.version}"
        theirs = getattr(self.then, "uuid", lambda: None)()
        return (f"fxremat.order {self.version}", theirs) if theirs else None

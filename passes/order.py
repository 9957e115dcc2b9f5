"""Hold the planned order through Inductor.

Inductor keeps the order of a graph's nodes, but for one thing: a loop that reads what an
early kernel reads may be fused into that kernel, and then runs early. A recomputed value
that is fused upwards like that lives from there on. So every value that is recomputed by a
loop gets an ordering-only dependency on the last extern kernel before it:

    mm_5 ... add_3_recompute          add_3_recompute runs after mm_5

The pass runs on the backward after Inductor's own passes (inserted earlier, the dependency
would keep the graph out of Inductor's caches). It finds what to hold by name and position
alone, so that equal graph text gives equal constraints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxremat import compat
from fxremat.passes.joint_graph import is_tensor, is_view
from fxremat.passes.materialisation import is_fusable
from fxremat.passes.recompute import RECOMPUTED


def constraints(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Recomputed loop -> the last extern kernel that stands before it."""
    after: dict[fx.Node, fx.Node] = {}
    last: fx.Node | None = None
    for node in graph.nodes:
        if node.op != "call_function" or is_view(node) or not is_tensor(node):
            continue
        if not is_fusable(node):
            last = node
        elif RECOMPUTED in node.name and last is not None and last not in node.all_input_nodes:
            after[node] = last
    return after


@dataclass(frozen=True)
class HoldOrder(compat.CustomGraphPass):  # type: ignore[misc]
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

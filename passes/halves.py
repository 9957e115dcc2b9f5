"""A planned joint graph, and how it is cut into the forward and the backward."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from fxremat.compat.inductor.post_grad import leave_layouts
from fxremat.compat.joint_graph import donatable, donate, extract_forward_backward
from fxremat.passes.base import Changed, Pass

RECOMPUTED = "_recompute"
"""Names of copies of nodes whose op runs again have this."""
INLINED = "_inline"
"""Names of copies that only one op reads have this."""
WRITTEN = "_written"
"""Names of nodes that `passes.fixed_order` makes Inductor write to memory have this."""
FREE = "_free"
"""Names of the other nodes of such a graph have this: their loops may be fused and moved."""

_COPIED = re.compile(f"({RECOMPUTED}|{INLINED}|{WRITTEN}|{FREE})(_.*)?$")

Halves = tuple[fx.GraphModule, fx.GraphModule]


def original(name: str) -> str:
    """The name of the node that a node of a rewritten graph is a copy of, or is itself."""
    return _COPIED.split(name, maxsplit=1)[0]


@dataclass(frozen=True)
class Rewritten:
    """The rewritten joint graph, and the nodes of its forward that its backward reads."""

    module: fx.GraphModule
    saved: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Cut(Pass):
    """Cuts a rewritten graph at what it saves; ``Changed.data`` are the two `Halves`.

    ``static`` are the names of inputs that stay where they are from step to step.
    """

    name = "cut"
    rewritten: Rewritten
    num_forward_outputs: int
    static: tuple[str, ...] = ()

    def requires(self, module: fx.GraphModule) -> None:
        there = set(module.graph.nodes)
        strange = [node.name for node in self.rewritten.saved if node not in there]
        self.demand(not strange, f"{strange} are saved, and are not of this graph")

    def call(self, module: fx.GraphModule) -> Changed:
        inputs = {n.name: n for n in module.graph.nodes if n.op == "placeholder"}
        halves = extract_forward_backward(
            module,
            list(self.rewritten.saved),
            num_fwd_outputs=self.num_forward_outputs,
            static_inputs=[inputs[name] for name in self.static],
        )
        return Changed(module, False, halves)


@dataclass(frozen=True)
class CutAsTorch(Pass):
    """Cuts a joint graph as torch's own ``partition`` does; ``Changed.data`` are the `Halves`."""

    name = "torch's partition"
    partition: Callable[[fx.GraphModule], Halves]

    def call(self, module: fx.GraphModule) -> Changed:
        return Changed(module, False, self.partition(module))


@dataclass(frozen=True)
class DonateSaved(Pass):
    """Lets the ``backward`` write over what the forward saves, as in a plain ``torch.compile``.

    It is called with the forward. Such a backward can run only once.
    """

    name = "donated buffers"
    backward: fx.GraphModule
    num_forward_outputs: int

    def call(self, module: fx.GraphModule) -> Changed:
        """Marks inputs of the backward, and the forward; both stay what they compute."""
        names = donatable(module, self.backward, self.num_forward_outputs)
        donate(self.backward, names)
        leave_layouts(module)
        return Changed(module, bool(names))

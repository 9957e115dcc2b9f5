"""Calls of `fxremat_kernels::rows` where Inductor compiles the graph around them.

What lies between two matmuls runs as one kernel; in a graph that runs eagerly, so do the calls.
And what convolutions write lies as that of the convolutions around them: Inductor may lay these
out with the channels last, and no loop writes over what lies in another order.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxremat.compat.inductor.post_grad import prefers_channels_last
from fxremat.passes.base import Changed, Pass, in_place
from fxremat.passes.joint_graph import is_tensor, reached
from fxremat.passes.nodes import work_out_result
from fxremat.runtime.chunks.buffers import places_of_images
from fxremat.runtime.chunks.call import RowsCall
from fxremat.runtime.chunks.operator import ROWS


def _lay_out(node: fx.Node) -> None:
    """Put the channels of results last that come from a convolution.

    Not of what the caller sees, nor of what another call reads as it is or after some loops: a
    call wants rows that lie densely, and what is between two calls lies as one of them has it.
    """
    images = places_of_images(str(node.args[2]))
    picked = [user for user in node.users if user.target is operator.getitem]
    if not images or any(u.args[1] in images and _is_wanted_densely(u) for u in picked):
        return
    node.kwargs = {**node.kwargs, "channels_last": True}
    work_out_result(node)
    for user in picked:
        user.meta["val"] = node.meta["val"][user.args[1]]


def _is_wanted_densely(result: fx.Node) -> bool:
    """Whether the caller sees the result, or another call reads it or what loops make of it."""
    size = result.meta["val"].numel()

    def same(node: fx.Node) -> bool:
        return is_tensor(node) and bool(node.meta["val"].numel() == size)

    looks = reached([result], lambda node: filter(same, node.users))
    is_read = any(user.target is ROWS for node in looks for user in node.users)
    return is_read or any(user.op == "output" for user in result.users)


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="call_function", target=ROWS))


@dataclass(frozen=True)
class LayOutRows(Pass):
    """Has the calls of one half run ``fused``, in the layout that Inductor gives their neighbours.

    Else they run operator by operator, and nothing is compiled for a run or two. Values change by
    rounding only.
    """

    name = "row layout"
    fused: bool = True

    def call(self, module: fx.GraphModule) -> Changed:
        channels_last = self.fused and prefers_channels_last(module)
        for node in _calls(module):
            node.kwargs = {**node.kwargs, "fused": self.fused}
            if channels_last:
                _lay_out(node)
        return in_place(module, bool(_calls(module)))

    def ensures(self, module: fx.GraphModule) -> None:
        for node in _calls(module):
            is_so = node.kwargs.get("fused") is self.fused
            self.demand(is_so, f"{node.name} does not run {'' if self.fused else 'un'}fused")


@dataclass(frozen=True)
class CompileRows(Pass):
    """Compiles the kernels that the calls of one half run, or begins to; the graph stays as it is.

    It ``waits`` until they are there, or lets them be compiled beside what Python does.
    """

    name = "row kernels"
    waits: bool = True

    def requires(self, module: fx.GraphModule) -> None:
        """The calls have their final layout: it is part of what is compiled."""
        for node in _calls(module):
            self.demand(bool(node.kwargs.get("fused")), f"{node.name} has no layout yet")

    def call(self, module: fx.GraphModule) -> Changed:
        for node in _calls(module):
            given: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
            args, kwargs = given
            for kernel in filter(None, RowsCall(*args, **kwargs).kernels):
                if self.waits:
                    kernel.compiled()
                else:
                    kernel.begin()
        return Changed(module, False)

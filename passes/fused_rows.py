"""Calls of `fxremat_kernels::rows`, told to run what lies between two matmuls as one kernel.

Only where Inductor compiles the graph: where it runs eagerly, so do the stages.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxremat.runtime.chunks import ROWS, compile_kernels


def fuse_rows(module: fx.GraphModule) -> None:
    """Have all calls of the graph run fused; values change by rounding only."""
    for node in _calls(module):
        node.kwargs = {**node.kwargs, "fused": True}


def compile_rows(module: fx.GraphModule) -> None:
    """Compile what the calls will run, while everything else is compiled too."""
    for node in _calls(module):
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        compile_kernels(*args, **kwargs)


def _calls(module: fx.GraphModule) -> Iterator[fx.Node]:
    yield from module.graph.find_nodes(op="call_function", target=ROWS)

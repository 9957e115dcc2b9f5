"""Joint graphs cut in two: at given nodes, and as plain torch.compile cuts them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxremat import compat
from tests.compat_graphs import ATEN
from tests.graphs import batch, calls, capture, everything_again, mlp


def test_default_partition() -> None:
    """torch's own partition takes the graph, and its halves train."""
    seen: list[tuple[fx.GraphModule, fx.GraphModule]] = []

    def partition(module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        seen.append(compat.torch_partition(module, inputs, **kwargs))
        return seen[0]

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return compat.compile_with_aot_eager(gm, inputs, partition)

    model = mlp()
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(batch(4, 8)).sum().backward()
    assert len(calls(seen[0][0].graph, ATEN.addmm)) == 2
    assert model[0].weight.grad is not None


def test_extract_forward_backward_cuts_at_the_nodes_given() -> None:
    seen = capture(mlp(8, 3), [batch(4, 8)], everything_again)
    read = [n.name for n in seen.backward.graph.nodes if n.op == "placeholder"]
    saved = [n.name for n in seen.rewritten.saved]
    assert sorted(read) == sorted([*saved, "tangents_1"])
    results = seen.forward.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    assert [r.name for r in results[1:]] == saved  # type: ignore[union-attr]

"""Symbolic sizes: their bounds, and the guards on them."""

from __future__ import annotations

from typing import Any

import torch

from fxremat.compat.sizes import (
    plan_for_sizes_seen,
    size_bound,
    size_ranges,
    sizes_at,
    with_settled_sizes,
)
from fxremat.passes.joint_graph import is_tensor
from tests.compat_graphs import dynamic
from tests.graphs import Capture


def sizes(seen: Capture) -> list[Any]:
    """Every symbolic size that a tensor of the graph has."""
    return [s for n in seen.joint.module.graph.nodes if is_tensor(n)
            for s in n.meta["val"].shape if isinstance(s, torch.SymInt)]  # fmt: skip


def test_the_bound_of_a_size_is_the_declared_one_or_else_the_size_seen() -> None:
    """It leaves no guard."""
    for bounds, expected in (({"min": 2, "max": 64}, 64), ({}, 6)):
        found = sizes(dynamic(**bounds))
        before = len(found[0].node.shape_env.guards)
        assert {size_bound(size) for size in found} == {expected}
        assert size_bound(found[0] * 8 + 1) == 8 * expected + 1
        assert len(found[0].node.shape_env.guards) == before


def test_plan_for_sizes_seen_guards_what_has_no_bound() -> None:
    for seen, guards in ((dynamic(), 1), (dynamic(min=2, max=64), 0)):
        env = sizes(seen)[0].node.shape_env
        before = len(env.guards)
        plan_for_sizes_seen(seen.joint.module.graph)
        assert len(env.guards) == before + guards


def test_a_symbol_that_came_to_stand_for_one_number_is_that_number() -> None:
    """As where a module is given another width than one of its class before."""
    seen: list[Any] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append([n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"])
        return gm

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight

    torch._dynamo.reset()
    compiled: Any = torch.compile(product, backend=keep)
    compiled(torch.ones(4, 3), torch.ones(3, 2))
    compiled(torch.ones(6, 5), torch.nn.Parameter(torch.ones(5, 2)))
    x, weight = (next(one for one in seen[-1] if isinstance(one, torch.Tensor) and one.is_leaf
                      and one.requires_grad is needs) for needs in (False, True))  # fmt: skip
    assert any(isinstance(size, torch.SymInt) for size in (*x.shape, *weight.shape))
    for value in (x, weight):
        found = with_settled_sizes(value)
        assert 5 in [size for size in found.shape if type(size) is int]
        assert (found.requires_grad, type(found)) == (value.requires_grad, type(value))
        assert (found.dtype, found.stride()) == (value.dtype, value.stride())
        assert with_settled_sizes(found) is found
    torch._dynamo.reset()


def test_size_ranges_are_named_by_their_source() -> None:
    """Up to what is planned for: what was declared, else what was seen."""
    for bounds, high in (({"min": 2, "max": 64}, 64), ({}, 6)):
        graph = dynamic(**bounds).joint.module.graph
        assert list(size_ranges(graph).values()) == [("args[0].size()[0]", 2, high)]
        [symbol] = size_ranges(graph)
        with sizes_at({symbol: 40}):
            assert size_ranges(graph)[symbol][1:] == (2, high)

"""Ordering through Inductor: what is held, and that the pass is good for Inductor's cache."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import fx

from fxremat.passes.order import HoldOrder, constraints
from fxremat.passes.recompute import RECOMPUTED
from tests import nets
from tests.graphs import Capture, batch, capture, everything_again, mlp


def recomputing() -> Capture:
    """An MLP, as Inductor sees it, with everything run again."""
    return capture(mlp(8, 3), [batch(4, 8)], everything_again, fused=True)


def test_a_graph_that_recomputes_nothing_is_left_alone() -> None:
    graph = nets.traced("mlp", fused=True).backward.graph
    before = str(graph)
    assert constraints(graph) == {}
    HoldOrder("1")(graph)
    assert str(graph) == before


def test_a_recomputed_loop_waits_for_a_kernel_before_it() -> None:
    graph = recomputing().backward.graph
    nodes = list(graph.nodes)
    after = constraints(graph)
    assert any(RECOMPUTED in node.name for node in after)
    for node, anchors in after.items():
        assert anchors
        assert all(nodes.index(anchor) < nodes.index(node) for anchor in anchors)


def test_constraints_follow_from_the_graph_alone() -> None:
    """Equal text gives equal constraints: Inductor's cache knows the text only."""

    def names(seen: Capture) -> dict[str, list[str]]:
        found = constraints(seen.backward.graph)
        return {node.name: [a.name for a in anchors] for node, anchors in found.items()}

    one, other = recomputing(), recomputing()
    assert str(one.backward.graph) == str(other.backward.graph)
    assert names(one) == names(other)


def test_the_pass_adds_ordering_and_nothing_else() -> None:
    seen = recomputing()
    graph = seen.backward.graph
    held = {node.name for node in constraints(graph)}
    before = [n.name for n in graph.nodes]
    HoldOrder("1")(graph)
    graph.lint()
    wrapped = {n.name for n in graph.nodes if "control_deps" in str(n.target)}
    assert wrapped == held
    assert [n.name for n in graph.nodes if n.op != "get_attr"] == before


def test_the_users_pass_runs_first() -> None:
    ran: list[bool] = []

    def theirs(graph: fx.Graph) -> None:
        ran.append(not any("control_deps" in str(n.target) for n in graph.nodes))

    graph = recomputing().backward.graph
    HoldOrder("1", theirs)(graph)
    assert ran == [True]


class Named:
    """A pass of the user's with a name for the cache."""

    def __init__(self, name: str | None) -> None:
        self.name = name

    def __call__(self, graph: fx.Graph) -> None:
        """Does nothing."""

    def uuid(self) -> Any:
        return self.name


def test_the_cache_knows_the_version_and_the_users_pass() -> None:
    assert HoldOrder("1").uuid() == HoldOrder("1").uuid()
    assert HoldOrder("1").uuid() != HoldOrder("2").uuid()
    assert HoldOrder("1", Named("a")).uuid() != HoldOrder("1", Named("b")).uuid()
    assert HoldOrder("1", Named("a")).uuid() != HoldOrder("1").uuid()


@pytest.mark.parametrize("theirs", [Named(None), lambda graph: None], ids=["none", "no name"])
def test_a_nameless_pass_of_the_users_keeps_the_graph_out_of_the_cache(theirs: Any) -> None:
    assert HoldOrder("1", theirs).uuid() is None


def test_the_pass_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(HoldOrder("1"))) == HoldOrder("1")


@pytest.mark.parametrize("name", ["dropout", "attention", "several results", "save nothing"])
def test_constraints_of_other_nets_have_no_cycles(name: str) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        seen = capture(*nets.make(name), everything_again, fused=True)
    order = {node: index for index, node in enumerate(seen.backward.graph.nodes)}
    for node, anchors in constraints(seen.backward.graph).items():
        assert all(order[anchor] < order[node] for anchor in anchors)

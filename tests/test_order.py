"""Ordering through Inductor: what is held, and that the pass is good for Inductor's cache."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from torch import fx

from fxremat.passes.order import HoldOrder, constraints
from fxremat.passes.recompute import RECOMPUTED
from tests import nets
from tests.graphs import Capture, batch, capture, everything_again, mlp
from tests.test_joint_graph import ATEN, X


def recomputing() -> Capture:
    """An MLP, as Inductor sees it, with everything run again."""
    return capture(mlp(8, 3), [batch(4, 8)], everything_again, fused=True)


def held(graph: fx.Graph) -> dict[str, list[str]]:
    """What a constrained graph holds back: node -> the nodes it must run after."""
    waits = {}
    for node in graph.nodes:
        if "control_deps" in str(node.target):
            names = fx.map_arg(node.args[0], lambda n: n.name)
            waits[node.name] = list(names)
    return waits


def constrained(seen: Capture) -> fx.Graph:
    """The backward of a traced net, constrained."""
    HoldOrder("1")(seen.backward.graph)
    return seen.backward.graph


def waits(*rows: tuple[str, Any, str]) -> dict[str, tuple[str, ...]]:
    """The constraints of a graph given as (name, op, the node it reads); "x" is its input."""
    graph = fx.Graph()
    nodes = {"x": graph.placeholder("x")}
    nodes["x"].meta["val"] = X
    for name, target, read in rows:
        reads = (nodes[read],) * (2 if target is ATEN.mm.default else 1)
        nodes[name] = graph.create_node("call_function", target, reads, name=name)
        nodes[name].meta["val"] = X
    graph.output(tuple(nodes.values()))
    after = constraints(graph)
    return {node.name: tuple(a.name for a in anchors) for node, anchors in after.items()}


MM, SIN = ATEN.mm.default, ATEN.sin.default


def test_what_is_held_and_what_is_not() -> None:
    """Written loops and all that is recomputed wait for the last anchor of either kind."""
    rows = (
        ("early_written", SIN, "x"),  # no anchor stands before it
        ("mm_1", MM, "x"),
        ("mm_2_recompute", MM, "x"),
        ("sin_written", SIN, "x"),
        ("sin_plain", SIN, "x"),  # lives in its readers' loops
        ("mm_3", MM, "x"),  # in the order of the graph anyway
        ("sin_recompute", SIN, "x"),
    )
    assert waits(*rows) == {
        "mm_2_recompute": ("mm_1",),
        "sin_written": ("mm_1", "mm_2_recompute"),
        "sin_recompute": ("mm_3", "mm_2_recompute"),
    }


def test_what_a_loop_may_overwrite_is_no_anchor() -> None:
    assert waits(("mm_1", MM, "x"), ("sin_written", SIN, "mm_1")) == {}
    through_a_view = (("mm_1", MM, "x"), ("t", ATEN.t.default, "mm_1"), ("a_written", SIN, "t"))
    assert waits(*through_a_view) == {}
    by_an_extern = (("mm_1", MM, "x"), ("mm_2", MM, "mm_1"), ("a_written", SIN, "x"))
    assert waits(*by_an_extern) == {"a_written": ("mm_2",)}


def test_a_graph_that_recomputes_nothing_is_left_alone() -> None:
    graph = nets.traced("mlp", fused=True).backward.graph
    before = str(graph)
    HoldOrder("1")(graph)
    assert str(graph) == before


def test_recomputed_values_wait_for_what_stands_before_them() -> None:
    graph = constrained(recomputing())
    nodes = [n.name for n in graph.nodes]
    waits = held(graph)
    assert any(RECOMPUTED in name for name in waits)
    for name, earlier in waits.items():
        assert earlier
        assert all(nodes.index(one) < nodes.index(name) for one in earlier)


def test_constraints_follow_from_the_graph_alone() -> None:
    """Equal text gives equal constraints: Inductor's cache knows the text only."""
    one, other = recomputing(), recomputing()
    assert str(one.backward.graph) == str(other.backward.graph)
    assert str(constrained(one)) == str(constrained(other))


@pytest.mark.parametrize("name", ["mlp", "dropout", "attention", "several results", "pieces"])
def test_the_pass_adds_to_the_graph_and_takes_nothing_away(name: str) -> None:
    seen = capture(*nets.make(name), everything_again, fused=True)
    before = [n.name for n in seen.backward.graph.nodes]
    graph = constrained(seen)
    graph.lint()  # every node stands behind what it reads: there are no cycles
    after = [n.name for n in graph.nodes]
    assert [name for name in after if name in set(before)] == before
    assert set(held(graph)) <= set(after)


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

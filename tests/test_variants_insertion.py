"""Other forms of ops: offered beside the ops of a joint graph, and taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from fxremat.core.problem import Problem
from fxremat.core.variants import take as take_alternatives
from fxremat.passes.joint_graph import JointGraph, Role, is_tensor
from fxremat.passes.memory_estimation import Estimate, estimate
from fxremat.passes.nodes import Ancestry, add_call
from fxremat.passes.variants import insertion
from fxremat.passes.variants.insertion import Rule, Site, StandIns
from tests.graphs import Capture, batch, capture, mlp, no_workspace, unit_time

aten = torch.ops.aten
Insert = Callable[[fx.Graph, Mapping[fx.Node, fx.Node]], StandIns]


def _matmuls(joint: JointGraph) -> Iterator[Site]:
    """mm(a, b) as (b^T a^T)^T."""
    for node in joint.module.graph.nodes:
        if node.target is aten.mm.default:
            yield Site("transposed", f"transposed:{node.name}", _transposed(node))


def _transposed(node: fx.Node) -> Insert:
    def insert(graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> StandIns:
        old = copies[node]
        a, b = old.args
        with graph.inserting_before(old.next):
            left = add_call(graph, aten.permute.default, (b, [1, 0]), old)
            right = add_call(graph, aten.permute.default, (a, [1, 0]), old)
            product = add_call(graph, aten.mm.default, (left, right), old)
            back = add_call(graph, aten.permute.default, (product, [1, 0]), old)
            new = add_call(graph, aten.clone.default, (back,), old)
        return {old: new}

    return insert


def _saved(joint: JointGraph) -> Iterator[Site]:
    """What the backward reads of the forward, doubled in the forward and halved again."""
    for node in joint.module.graph.nodes:
        late = [u for u in node.users if joint.role.get(u, Role.FORWARD) is not Role.FORWARD]
        is_float = is_tensor(node) and node.meta["val"].is_floating_point()
        if node.op == "call_function" and is_float and joint.role[node] is Role.FORWARD:
            late = [user for user in late if user.op != "output"]
            if late:
                yield Site("doubled", f"doubled:{node.name}", _doubled(node, late))


def _doubled(node: fx.Node, late: Sequence[fx.Node]) -> Insert:
    def insert(graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]) -> StandIns:
        old = copies[node]
        first = min((copies[user] for user in late), key=list(graph.nodes).index)
        with graph.inserting_before(old.next):
            double = add_call(graph, aten.mul.Tensor, (old, 2.0), old)
        with graph.inserting_before(first):
            new = add_call(graph, aten.mul.Tensor, (double, 0.5), old)
        return {old: new}

    return insert


RULES = (
    Rule("transposed", "a matmul of transposed operands", _matmuls),
    Rule("doubled", "saved values doubled", _saved),
)


def seen(fused: bool = False) -> Capture:
    return capture(mlp(8, 3), (batch(4, 8),), fused=fused)


def problem_of(
    joint: JointGraph, fused: bool, given: Sequence[insertion.InsertedVariant] = ()
) -> Problem:
    return estimated(joint, fused, given).problem


def estimated(
    joint: JointGraph, fused: bool, given: Sequence[insertion.InsertedVariant] = ()
) -> Estimate:
    return estimate(
        joint, unit_time, no_workspace, fused=fused, device="cpu", name="test", inserted=given
    )


def test_offering_changes_nothing() -> None:
    joint = seen().joint
    sites = insertion.find_sites(joint, RULES)
    offered = insertion.insert_all(joint, sites)
    assert len(offered.inserted) == len(sites) > 6
    plain, union = problem_of(joint, False), problem_of(offered.joint, False, offered.inserted)
    assert union.ops == plain.ops
    assert union.outputs == plain.outputs
    assert {one.name for one in union.variants} == {site.name for site in sites}
    assert str(joint.module.graph) == str(seen().joint.module.graph)


@pytest.mark.parametrize("fused", [False, True])
def test_an_alternative_says_what_the_graph_is_once_it_is_taken(fused: bool) -> None:
    joint = seen(fused).joint
    sites = insertion.find_sites(joint, RULES)
    offered = insertion.insert_all(joint, sites)
    union = problem_of(offered.joint, fused, offered.inserted)
    for one in union.variants:
        site = next(site for site in sites if site.name == one.name)
        real = problem_of(insertion.take(joint, [site]), fused)
        said = take_alternatives(union, [one.name])
        assert {(op.name, frozenset(op.reads), op.writes) for op in said.ops} == {
            (op.name, frozenset(op.reads), op.writes) for op in real.ops
        }, one.name
        assert said.outputs == real.outputs


@given(st.lists(st.lists(st.integers(0, 20), max_size=3), min_size=1, max_size=20), st.data())
def test_ancestry_is_what_a_walk_finds(reads: list[list[int]], data: st.DataObject) -> None:
    """Also of nodes that are added later."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for each in reads:
        nodes.append(graph.call_function(len, tuple(nodes[k % len(nodes)] for k in each)))
    first = data.draw(st.integers(0, len(nodes)))
    ancestry = Ancestry(nodes[:first])
    ancestry.add(nodes[first:])
    for node in nodes:
        walked, stack = {node}, [node]
        while stack:
            new = [i for i in stack.pop().all_input_nodes if i not in walked]
            walked.update(new)
            stack += new
        found = ancestry.of(node)
        assert {other for other in nodes if other in found} == walked
        assert "x" not in found

"""Other forms of ops: offered, taken, and verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from fxremat.compile.verification import taken_variant
from fxremat.core.problem import Problem
from fxremat.core.variants import take as take_alternatives
from fxremat.errors import VerificationFailed
from fxremat.passes.joint_graph import JointGraph, Role, is_tensor
from fxremat.passes.memory_estimation import estimate
from fxremat.passes.nodes import Add, Ancestry, add_call
from fxremat.passes.variants import insertion
from fxremat.passes.variants.chunks.rules import CHUNKED_MLP
from fxremat.passes.variants.insertion import Rule, Site, StandIns, Target
from fxremat.verify.taken_variants import TakenVariant, check_variants
from tests.graphs import Capture, batch, capture, mlp, no_workspace, unit_time
from tests.variants import verify

ATEN, CONTIGUOUS = torch.ops.aten, torch.contiguous_format


def _matmuls(joint: JointGraph) -> Iterator[Site]:
    """mm(a, b) as (b^T a^T)^T."""
    for node in joint.module.graph.nodes:
        if node.target is ATEN.mm.default:
            yield Site("transposed", f"transposed:{node.name}", partial(_transposed, node))


def _transposed(node: fx.Node, into: Target) -> StandIns:
    add = into.behind(into(node))
    right, left = (add(ATEN.permute.default, one, [1, 0]) for one in into(node).args)
    product = add(ATEN.mm.default, left, right)
    return {node: add(ATEN.clone.default, add(ATEN.permute.default, product, [1, 0]))}


def _saved(joint: JointGraph) -> Iterator[Site]:
    """What the backward reads of the forward, doubled in the forward and halved again."""
    for node in joint.module.graph.nodes:
        is_float = is_tensor(node) and node.meta["val"].is_floating_point()
        if node.op == "call_function" and is_float and joint.role[node] is Role.FORWARD:
            late = [u for u in node.users if joint.role[u] is not Role.FORWARD and u.op != "output"]
            if late:
                yield Site("doubled", f"doubled:{node.name}", partial(_doubled, node, min(late)))


def _doubled(node: fx.Node, reader: fx.Node, into: Target) -> StandIns:
    double = into.behind(into(node))(ATEN.mul.Tensor, into(node), 2.0)
    return {node: into.before(into(reader), into(node))(ATEN.mul.Tensor, double, 0.5)}


RULES = (
    Rule("transposed", "a matmul of transposed operands", _matmuls),
    Rule("doubled", "saved values doubled", _saved),
)


def seen(fused: bool = False) -> Capture:
    return capture(mlp(8, 3), (batch(4, 8),), fused=fused)


def problem_of(
    joint: JointGraph, fused: bool, given: Sequence[insertion.InsertedVariant] = ()
) -> Problem:
    how: dict[str, Any] = {"fused": fused, "device": "cpu", "name": "test"}
    return estimate(joint, unit_time, no_workspace, inserted=given, **how).problem


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
        assert {other for other in nodes if ancestry.depends(node, other)} == walked


# --- variants -----------------------------------------------------------------------------


@cache
def traced() -> tuple[JointGraph, Site]:
    """The joint graph of a step, and a variant of it; not to be changed."""
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    joint = capture(net, [torch.randn(32, 16, requires_grad=True)], fused=True).joint
    return joint, next(iter(CHUNKED_MLP.find(joint)))


# --- stand-ins that lie in memory otherwise -----------------------------------------------


def other_strides(add: Add, node: fx.Node) -> fx.Node:
    turned = add(ATEN.t.default, node)
    return add(ATEN.t.default, add(ATEN.clone.default, turned, memory_format=CONTIGUOUS))


OTHERWISE: dict[str, Callable[[Add, fx.Node], fx.Node]] = {
    "dtype": lambda add, node: add(torch.ops.prims.convert_element_type.default, node, torch.half),
    "size": lambda add, node: add(ATEN.slice.Tensor, node, 0, 1),
    "strides": other_strides,
    "device": lambda add, node: add(ATEN._to_copy.default, node, device=torch.device("meta")),
}


@pytest.mark.parametrize("change", OTHERWISE.values(), ids=OTHERWISE)
def test_a_stand_in_that_lies_in_memory_otherwise_is_refused(
    change: Callable[[Add, fx.Node], fx.Node],
) -> None:
    joint, site = traced()

    def insert(into: Target) -> StandIns:
        found = dict(site.insert(into))
        old = next(old for old, new in found.items() if new.meta["val"].dim() == 2)
        return {**found, old: change(into.behind(found[old]), found[old])}

    verify(joint, site)
    with pytest.raises(VerificationFailed, match=r"variant chunked_mlp.* has .*, which it stands"):
        verify(joint, replace(site, insert=insert))


# --- what depends on what -----------------------------------------------------------------


def test_a_lossy_stand_in_that_the_forward_reads_is_refused() -> None:
    """A rule that says that it is exact about the forward, and is not."""
    joint, site = traced()
    with pytest.raises(VerificationFailed, match="a result of the forward depends on"):
        verify(joint, site, lossy=("chunked_mlp",))


def writing(read: str, in_forward: bool) -> fx.Graph:
    """A statistic is overwritten with ``sine``, or with what stands for it in the backward."""
    graph = fx.Graph()

    def call(name: str, target: Any, *args: fx.Node) -> fx.Node:
        node = graph.create_node("call_function", target, args, name=name)
        node.meta["val"] = torch.empty(4)
        return node

    x, statistic, tangent = map(graph.placeholder, ("primals_1", "primals_2", "tangents_1"))
    for node in (x, statistic, tangent):
        node.meta["val"] = torch.empty(4)
    made = {"sine": call("sine", ATEN.sin.default, x)}
    made["rough"] = call("rough", ATEN.neg.default, call("other", ATEN.neg.default, made["sine"]))
    write = call("write", ATEN.copy_.default, statistic, made[read])
    write.meta["partitioner_tag"] = f"must_be_in_{'forward' if in_forward else 'backward'}"
    graph.output((x, call("gradient", ATEN.mul.Tensor, made[read], tangent)))
    if read == "sine":
        for name in ("rough", "other"):
            graph.erase_node(next(n for n in graph.nodes if n.name == name))
    return graph


@pytest.mark.parametrize("in_forward", [True, False])
def test_a_lossy_stand_in_that_the_forward_writes_into_an_input_is_refused(
    in_forward: bool,
) -> None:
    """No result depends on it, but the next step does."""
    before, after = writing("sine", in_forward), writing("rough", in_forward)
    site = TakenVariant("rule", "site", (("sine", "rough"),), lossy=True)

    with (
        pytest.raises(VerificationFailed, match="a result of the forward depends on rough")
        if in_forward
        else nullcontext()
    ):
        check_variants(before, after, [site], num_forward_outputs=1)


def test_a_node_outside_of_the_sites_may_not_change() -> None:
    joint, site = traced()
    after = insertion.take(joint, [site])
    graph = after.module.graph
    results = list(graph.output_node().args[0])  # type: ignore[arg-type]
    last = max(r for r in results if hasattr(r, "name"))
    with graph.inserting_after(last):
        twice = add_call(graph, ATEN.mul.Tensor, (last, 2), last)
    results[results.index(last)] = twice
    graph.output_node().args = (tuple(results),)
    (form,) = insertion.insert_all(joint, [site]).inserted
    variants = [taken_variant(form, lossy=False)]
    with pytest.raises(VerificationFailed, match="is computed differently"):
        check_variants(
            joint.module.graph, graph, variants, num_forward_outputs=joint.num_forward_outputs
        )

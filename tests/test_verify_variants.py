"""The verifier of variants sees where a stand-in lies in memory, and what else is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxremat.compile.verification import taken_variant
from fxremat.errors import VerificationFailed
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.nodes import add_call
from fxremat.passes.variants import insertion
from fxremat.passes.variants.chunks.rules import CHUNKED_MLP
from fxremat.passes.variants.insertion import Site
from fxremat.verify.taken_variants import TakenVariant, check_variants
from tests.graphs import capture
from tests.variants import verify

ATEN, CONTIGUOUS = torch.ops.aten, torch.contiguous_format


@cache
def traced() -> tuple[JointGraph, Site]:
    """The joint graph of a step, and a variant of it; not to be changed."""
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    joint = capture(net, [torch.randn(32, 16, requires_grad=True)], fused=True).joint
    return joint, next(iter(CHUNKED_MLP.find(joint)))


# --- stand-ins that lie in memory otherwise ------------------------------------------------------


def another_dtype(graph: fx.Graph, node: fx.Node) -> fx.Node:
    target = torch.ops.prims.convert_element_type.default
    return add_call(graph, target, (node, torch.float64), node)


def another_size(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return add_call(graph, ATEN.slice.Tensor, (node, 0, 1), node)


def other_strides(graph: fx.Graph, node: fx.Node) -> fx.Node:
    turned = add_call(graph, ATEN.t.default, (node,), node)
    made = add_call(graph, ATEN.clone.default, (turned,), node, memory_format=CONTIGUOUS)
    return add_call(graph, ATEN.t.default, (made,), node)


def another_device(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return add_call(graph, ATEN._to_copy.default, (node,), node, device=torch.device("meta"))


@pytest.mark.parametrize("change", [another_dtype, another_size, other_strides, another_device])
def test_a_stand_in_that_lies_in_memory_otherwise_is_refused(
    change: Callable[[fx.Graph, fx.Node], fx.Node],
) -> None:
    joint, site = traced()

    def insert(graph: fx.Graph, where: Any) -> dict[fx.Node, fx.Node]:
        found = dict(site.insert(graph, where))
        old = next(old for old, new in found.items() if new.meta["val"].dim() == 2)
        with graph.inserting_before(found[old].next):
            found[old] = change(graph, found[old])
        return found

    verify(joint, site)
    with pytest.raises(VerificationFailed, match=r"variant chunked_mlp.* has .*, which it stands"):
        verify(joint, replace(site, insert=insert))


# --- what depends on what ------------------------------------------------------------------------


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

    def compare() -> None:
        check_variants(before, after, [site], num_forward_outputs=1)

    if in_forward:
        with pytest.raises(VerificationFailed, match="a result of the forward depends on rough"):
            compare()
    else:
        compare()


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

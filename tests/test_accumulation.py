"""Calls that end gradients where they are added: where they stand, and what the planner sees."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import fxremat
from fxremat import runtime
from fxremat.compat.joint_graph import copy_module
from fxremat.passes.accumulation import LASTING, accumulate, name_later_reads
from fxremat.passes.joint_graph import JointGraph, read_joint_graph
from fxremat.passes.memory_estimation import estimate
from fxremat.verify.data_flow import check_arrivals
from tests import nets
from tests.conftest import Golden
from tests.graphs import no_workspace, unit_time


def joint_of(name: str) -> JointGraph:
    captured = nets.traced(name).joint
    return read_joint_graph(copy_module(captured.module), captured.num_forward_outputs)


def test_graph_with_calls_that_add_gradients(golden: Golden) -> None:
    joint = joint_of("tied")
    assert accumulate(joint, (), ()) is joint
    found = accumulate(joint, range(len(joint.primals)), ())
    lines = [node.format_node() for node in found.module.graph.nodes if node.op != "placeholder"]
    first = next(i for i, line in enumerate(lines) if line is not None and "accumulated" in line)
    golden("\n".join(map(str, lines[first - 1 :])))


def test_the_problem_ends_gradients_where_they_are_added() -> None:
    joint, other = joint_of("batch norm"), joint_of("batch norm")
    plain, ours = (
        estimate(one, unit_time, no_workspace, fused=True, device="cpu", name="one").problem
        for one in (joint, accumulate(other, range(len(other.primals)), ()))
    )
    added = {
        op.name: {*op.reads} - {*ours.resident}
        for op in ours.ops
        if op.name.startswith("accumulated")
    }
    assert len(added) == 8
    assert {*plain.outputs} - {*ours.outputs} == set[str]().union(*added.values())
    order = [op.name for op in ours.ops]
    for name, (value,) in added.items():
        readers = [op.name for op in ours.ops if value in op.reads]
        assert max(readers, key=order.index) == name


@pytest.mark.parametrize("through_view", [False, True], ids=["itself", "by a view"])
def test_verification_notices_gradients_that_are_read_too_late(through_view: bool) -> None:
    graph = fx.Graph()
    gradient, weight = graph.placeholder("gradient"), graph.placeholder("weight")
    view = graph.call_function(torch.ops.aten.view.default, (gradient, [4]))
    graph.call_function(runtime.accumulated, (view if through_view else gradient, weight, []))
    late = graph.call_function(torch.ops.aten.sin.default, (gradient,))
    graph.output((gradient, late))
    with pytest.raises(fxremat.VerificationFailed, match="uses gradient after"):
        check_arrivals(graph)
    late.replace_all_uses_with(weight)
    graph.erase_node(late)
    check_arrivals(graph)


def test_calls_name_what_is_read_later_and_stay_out_of_the_forward() -> None:
    graph = fx.Graph()
    names = ("x", "y", "weight", "module's")
    x, y, weight, own = (graph.placeholder(name) for name in names)
    for node in (x, y, weight, own):
        node.meta["val"] = torch.empty(2)
    own.meta[LASTING] = weight.meta[LASTING] = True
    early = graph.call_function(torch.ops.aten.sin.default, (x,))
    gradient = graph.call_function(torch.ops.aten.cos.default, (y,))
    call = graph.call_function(runtime.accumulated, (gradient, weight, []))
    dropped = graph.call_function(runtime.accumulated, (early, weight, []))
    seen = graph.call_function(torch.ops.aten.view.default, (x, [2]))
    late = graph.call_function(torch.ops.aten.add.Tensor, (seen, own))
    for node in (early, gradient, seen, late):
        node.meta["val"] = torch.empty(2)
    graph.output((gradient, early, late))
    name_later_reads(graph, [gradient, call, dropped, seen, late])
    assert call.args == (gradient, weight, [x])
    assert dropped not in graph.nodes

"""The contracts of passes: each accepts its own work, and refuses a graph that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxremat import VerificationFailed, runtime
from fxremat.core.schedule import store_all
from fxremat.passes.accumulation import Accumulation
from fxremat.passes.base import Changed, Pass
from fxremat.passes.gradient_sums import GradientSums
from fxremat.passes.inplace import WriteInPlace
from fxremat.passes.offload import AddBeforePutting
from fxremat.passes.recompute import ApplyPlan
from fxremat.passes.user_tags import ObeyMustRecompute, ProtectMutatedInputs
from fxremat.passes.variants.chunks.inductor_kernels import CompileRows, InterpretRows, LayOutRows
from fxremat.runtime.chunks.operator import ROWS
from fxremat.training import host_weights  # noqa: F401  (defines fetch and put)
from tests.graphs import batch, capture, mlp

ATEN = torch.ops.aten


class Small:
    """A joint graph: ``y = sin(x)`` in the forward, ``g = y * t`` in the backward."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x, self.t = self.graph.placeholder("primals_1"), self.graph.placeholder("tangents_1")
        self.x.meta["val"] = self.t.meta["val"] = torch.zeros(4, 4)
        self.y = self.call(ATEN.sin.default, self.x)
        self.g = self.call(ATEN.mul.Tensor, self.y, self.t)

    def call(self, target: Any, *args: Any) -> fx.Node:
        """A call whose result has the one shape of this graph."""
        node = self.graph.call_function(target, args)
        node.meta["val"] = torch.zeros(4, 4)
        return node

    def module(self, *results: fx.Node) -> fx.GraphModule:
        """The graph, which returns these."""
        self.graph.output(results)
        return fx.GraphModule({}, self.graph)


def refused(one: Pass, module: fx.GraphModule, part: str) -> None:
    """Fail unless the pass refuses the graph, and names itself."""
    with pytest.raises(VerificationFailed, match=f"pass {one.name}"):
        getattr(one, part)(module)


def test_calling_a_pass_checks_its_contract_too() -> None:
    changed = GradientSums()(Small().module())
    assert isinstance(changed, Changed)
    assert (changed.modified, changed.data) == (False, None)


def test_sums_are_joined_before_gradients_are_given_up() -> None:
    small = Small()
    small.graph.call_function(runtime.accumulated, (small.g, small.x, []))
    refused(GradientSums(), small.module(small.y, small.g), "requires")


def test_sums_say_what_they_give() -> None:
    small = Small()
    del small.g.meta["val"]
    refused(GradientSums(), small.module(small.y, small.g), "ensures")


def must_recompute(small: Small) -> fx.Node:
    small.y.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return small.g


def overwritten_input(small: Small) -> fx.Node:
    late = small.call(ATEN.mul.Tensor, small.g, small.x)
    small.call(ATEN.copy_.default, small.x, small.y)
    return late


def sum_of_what_left(small: Small) -> fx.Node:
    parts = [small.call(torch.ops.fxremat.put.default, small.g) for _ in range(2)]
    return small.call(ATEN.add.Tensor, *parts)


@pytest.mark.parametrize(
    ("one", "spoil"),
    [
        (ObeyMustRecompute(1), must_recompute),
        (ProtectMutatedInputs(1), overwritten_input),
        (AddBeforePutting(), sum_of_what_left),
    ],
    ids=lambda given: getattr(given, "__name__", None) or given.name,
)
def test_a_graph_is_refused_until_the_pass_has_run(
    one: Pass, spoil: Callable[[Small], fx.Node]
) -> None:
    small = Small()
    module = small.module(small.y, spoil(small))
    refused(one, module, "ensures")
    assert one.call(module).modified
    one.ensures(module)
    assert not one.call(module).modified


def test_a_gradient_is_given_up_once_and_only_if_asked_for() -> None:
    joint = capture(mlp(), (batch(2, 8),)).joint
    module, outputs = joint.module, joint.num_forward_outputs
    one = Accumulation(outputs, frozenset(range(len(joint.primals))))
    one.requires(module)
    changed = one.call(module)
    assert changed.modified
    assert changed.data.module is module
    one.ensures(module)
    refused(one, module, "requires")
    refused(Accumulation(outputs), module, "ensures")


def test_a_plan_is_for_the_graph_that_was_estimated() -> None:
    found = capture(mlp(), (batch(2, 8),)).found
    joint = found.joint
    one = ApplyPlan(found, store_all(found.problem))
    one.requires(joint.module)
    changed = one.call(joint.module)
    one.ensures(changed.graph_module)
    refused(one, changed.graph_module, "requires")
    refused(one, Small().module(), "ensures")
    refused(ApplyPlan(found, ()), joint.module, "requires")
    written = WriteInPlace(changed.data, joint.num_forward_outputs)
    written.requires(changed.graph_module)
    written.ensures(written.call(changed.graph_module).graph_module)
    refused(written, joint.module, "requires")


def test_no_input_of_the_graph_is_written_over() -> None:
    found = capture(mlp(), (batch(2, 8),)).rewritten
    small = Small()
    small.call(ATEN.index_put_.default, small.x, [small.y], small.y)._rename("it_into")
    refused(WriteInPlace(found, 1), small.module(small.y, small.g), "ensures")


def test_rows_are_laid_out_before_they_are_compiled() -> None:
    small = Small()
    small.graph.call_function(ROWS, ())
    module = small.module(small.y)
    refused(LayOutRows(), module, "ensures")
    refused(CompileRows(), module, "requires")


def test_rows_are_interpreted_where_nothing_is_compiled() -> None:
    small = Small()
    call = small.graph.call_function(ROWS, (), {"fused": True})
    module = small.module(small.y)
    assert InterpretRows().call(module).modified
    assert call.kwargs == {"fused": False}
    assert not InterpretRows().call(Small().module()).modified

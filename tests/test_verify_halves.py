"""The verifier of the two halves that a joint graph is cut into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fxremat.compat.joint_graph import torch_partition
from fxremat.errors import VerificationFailed
from fxremat.verify.data_flow import check_halves
from tests import nets
from tests.graphs import Capture, calls, capture, everything_again

ATEN = torch.ops.aten


def split(name: str) -> tuple[Capture, fx.Graph, fx.Graph]:
    seen = capture(*nets.make(name), everything_again)
    return seen, seen.forward.graph, seen.backward.graph


def verify(seen: Capture, forward: fx.Graph, backward: fx.Graph) -> None:
    check_halves(
        seen.rewritten.module.graph,
        forward,
        backward,
        num_forward_outputs=seen.joint.num_forward_outputs,
        mutated=[n.name for n in seen.joint.mutated],
    )


@pytest.mark.parametrize("name", ["mlp", "dropout", "batch norm", "old buffer", "several results"])
def test_honest_halves_pass(name: str) -> None:
    verify(*split(name))


def swap_saved(forward: fx.Graph, backward: fx.Graph) -> None:
    """The forward returns another value under the name of one that is saved."""
    results = list(forward.output_node().args[0])  # type: ignore[arg-type]
    old = next(n for n in reversed(results) if isinstance(n, fx.Node) and n.op != "placeholder")
    with forward.inserting_before(forward.output_node()):
        new = forward.call_function(ATEN.neg.default, (old,))
    new.meta = dict(old.meta)
    results[results.index(old)] = new
    forward.output_node().args = (tuple(results),)


def change_the_backward(forward: fx.Graph, backward: fx.Graph) -> None:
    node = calls(backward, ATEN.mm)[0]
    node.args = (node.args[1], node.args[0])


def change_the_forward(forward: fx.Graph, backward: fx.Graph) -> None:
    node = calls(forward, ATEN.gelu)[-1]
    node.target = ATEN.relu.default


def run_a_random_call_twice(forward: fx.Graph, backward: fx.Graph) -> None:
    node = calls(forward, ATEN.native_dropout)[0]
    with forward.inserting_after(node):
        forward.node_copy(node)


def run_a_random_call_in_both_halves(forward: fx.Graph, backward: fx.Graph) -> None:
    """It has the same name in both, and nobody reads the second."""
    node = calls(forward, ATEN.native_dropout)[0]
    given = next(iter(backward.nodes))
    with backward.inserting_before(backward.output_node()):
        assert backward.node_copy(node, lambda _: given).name == node.name


def lose_a_result(forward: fx.Graph, backward: fx.Graph) -> None:
    results = list(backward.output_node().args[0])  # type: ignore[arg-type]
    backward.output_node().args = (tuple(results[1:]),)


@pytest.mark.parametrize(
    "sabotage",
    [swap_saved, change_the_backward, change_the_forward, run_a_random_call_twice,
     run_a_random_call_in_both_halves, lose_a_result],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_sabotage_is_noticed(sabotage: Callable[[fx.Graph, fx.Graph], None]) -> None:
    seen, forward, backward = split("dropout")
    verify(seen, forward, backward)
    sabotage(forward, backward)
    with pytest.raises(VerificationFailed, match="halves"):
        verify(seen, forward, backward)


def test_the_partition_of_torch_passes() -> None:
    seen = capture(*nets.make("mlp"))
    forward, backward = torch_partition(
        seen.joint.module, (), num_fwd_outputs=seen.joint.num_forward_outputs
    )
    verify(seen, forward.graph, backward.graph)


class Written:
    """``buffer`` is written, and its sine times the tangent is a gradient."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(4)
        return node

    def call(self, target: Any, *args: fx.Node) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = torch.empty(4)
        return node

    def gradient(self, buffer: fx.Node, tangent: fx.Node) -> fx.Node:
        return self.call(ATEN.mul.Tensor, self.call(ATEN.sin.default, buffer), tangent)


def whole(write_first: bool) -> fx.Graph:
    made = Written()
    buffer, new, tangent = map(made.input, ("buffer", "new", "tangents_1"))
    gradient = None if write_first else made.gradient(buffer, tangent)
    made.call(ATEN.copy_.default, buffer, new)
    made.graph.output((new, gradient or made.gradient(buffer, tangent)))
    return made.graph


@pytest.mark.parametrize("write_first", [True, False], ids=["after the write", "before"])
def test_what_the_forward_writes_is_another_value_to_the_backward(write_first: bool) -> None:
    """The halves read the buffer after the write; the graph that was cut did, or did not."""
    forward, backward = Written(), Written()
    buffer, new = forward.input("buffer"), forward.input("new")
    forward.call(ATEN.copy_.default, buffer, new)
    forward.graph.output((new, buffer))
    given, tangent = backward.input("buffer"), backward.input("tangents_1")
    backward.graph.output((backward.gradient(given, tangent),))

    def compare() -> None:
        check_halves(
            whole(write_first), forward.graph, backward.graph,
            num_forward_outputs=1, mutated=["buffer"],
        )  # fmt: skip

    if write_first:
        compare()
    else:
        with pytest.raises(VerificationFailed, match="result 1, of the backward, is another"):
            compare()

"""What is known of the nodes of a joint graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxremat.compat.joint_graph import (
    must_be_in_backward,
    must_be_in_forward,
    mutated_input_of,
    user_tag,
    without_user_tags,
)
from tests import nets
from tests.compat_graphs import ATEN, X
from tests.graphs import Capture, batch, compiled, everything_again


def call(target: Any, *inputs: torch.Tensor) -> fx.Node:
    """A node that calls ``target``, in a graph of its own."""
    graph = fx.Graph()
    return graph.call_function(target, tuple(graph.placeholder("x") for _ in inputs))


def test_where_a_node_must_be() -> None:
    copy = call(ATEN.copy_.default, X, X.clone())
    assert must_be_in_forward(copy)
    assert not must_be_in_backward(copy)
    copy.meta["partitioner_tag"] = "is_backward"
    assert must_be_in_backward(copy)
    assert not must_be_in_forward(copy)
    plain = call(ATEN.sin.default, X)
    assert not must_be_in_forward(plain)
    plain.meta["partitioner_tag"] = "must_be_in_forward"
    assert must_be_in_forward(plain)
    plain.meta["partitioner_tag"] = "must_be_in_backward"
    assert must_be_in_backward(plain)


def overwrite_after(x: torch.Tensor) -> torch.Tensor:
    """The new content of the input has a gradient: AOTAutograd writes it after the graph."""
    result = x.exp()
    x.mul_(2)
    return result


def test_mutated_input_of_one_that_is_overwritten_after_the_graph() -> None:
    seen = Capture(everything_again)
    run = compiled(overwrite_after, seen)
    leaf = batch(4, 8).requires_grad_()
    given = leaf * 1
    (run(given).sum() + given.sum()).backward()
    torch.testing.assert_close(leaf.grad, batch(4, 8).exp() + 2)
    descriptions = seen.joint.module.graph.output_node().meta["desc"]
    assert any(mutated_input_of(d) is not None for d in descriptions)
    assert len(seen.joint.mutated) == 1


def test_tags_are_taken_off_a_copy() -> None:
    """All else is as it was, and so is the graph that they are taken off."""
    module = nets.traced("save nothing").joint.module
    tagged = [node.name for node in module.graph.nodes if user_tag(node)]
    copy = without_user_tags(module)
    assert tagged
    assert tagged == [node.name for node in module.graph.nodes if user_tag(node)]
    assert not any(user_tag(node) for node in copy.graph.nodes)
    assert copy.graph.python_code("self").src == module.graph.python_code("self").src
    for one, other in zip(module.graph.nodes, copy.graph.nodes, strict=True):
        assert one.meta.keys() - other.meta.keys() <= {"recompute", "ac_graph_id"}

"""What is known of the nodes of a joint graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxremat.compat.joint_graph import (
    input_index,
    is_opaque,
    is_symbol,
    is_tangent,
    must_be_in_backward,
    must_be_in_forward,
    mutated_input_of,
    user_tag,
    without_user_tags,
)
from tests import nets
from tests.compat_graphs import ATEN, X, dynamic
from tests.graphs import Capture, batch, compiled, everything_again


def call(target: Any, *inputs: torch.Tensor) -> fx.Node:
    """A node that calls ``target``, in a graph of its own."""
    graph = fx.Graph()
    return graph.call_function(target, tuple(graph.placeholder("x") for _ in inputs))


def test_is_tangent() -> None:
    joint = nets.traced("mlp").joint
    placeholders = [n for n in joint.module.graph.nodes if n.op == "placeholder"]
    assert [n.name for n in placeholders if is_tangent(n)] == ["tangents_1"]
    assert not any(is_tangent(n) for n in joint.module.graph.nodes if n.op != "placeholder")


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


def test_mutated_input_of() -> None:
    """Only inputs that are overwritten outside of the graph have such an output."""
    assert mutated_input_of(object()) is None
    output = nets.traced("mlp").joint.module.graph.output_node()
    assert all(mutated_input_of(d) is None for d in output.meta.get("desc") or [])


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


def test_user_tag() -> None:
    seen = nets.traced("save addmms")
    tags = {user_tag(n) for n in seen.joint.module.graph.nodes}
    assert {"MUST_SAVE", "MUST_RECOMPUTE", None} <= tags
    plain = {user_tag(n) for n in nets.traced("checkpoint").joint.module.graph.nodes}
    assert "PREFER_RECOMPUTE" in plain
    assert user_tag(call(ATEN.sin.default, X)) is None


def test_prepare_joint_graph_merges_and_drops() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        x.exp()
        return x.sin() * x.sin()

    seen = Capture()
    compiled(twice, seen)(batch(4, 8).requires_grad_()).sum().backward()
    assert "exp" not in seen.joint_text or not seen.calls(ATEN.exp)
    assert len(seen.calls(ATEN.sin)) == 1


def test_symbols_and_opaque_objects() -> None:
    seen = dynamic(min=2, max=64)
    symbols = [n for n in seen.joint.primals if is_symbol(n)]
    assert len(symbols) == 1
    assert not is_symbol(seen.node("addmm"))
    assert not any(is_opaque(n) for n in seen.joint.module.graph.nodes)


def test_inputs_of_the_joint_graph_are_arguments_of_the_compiled_one() -> None:
    captured = nets.traced("mlp")
    found = [input_index(node) for node in captured.joint.primals]
    assert found == list(range(len(found)))
    assert input_index(captured.joint.tangents[0]) is None


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

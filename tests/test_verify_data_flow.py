"""Every way to rewrite a graph wrongly that we know of is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from fxremat.compat.joint_graph import extract_forward_backward, is_tangent
from fxremat.errors import VerificationFailed
from fxremat.passes.recompute import apply_plan
from fxremat.verify.data_flow import check_data_flow, check_split
from tests import nets
from tests.graphs import Capture, batch, calls, capture, everything_again, mlp, store_all

ATEN = torch.ops.aten


def rewritten(name: str, again: bool = True) -> tuple[Capture, fx.Graph]:
    """A traced net and a fresh rewriting of it."""
    seen = capture(*nets.make(name), everything_again if again else store_all)
    return seen, apply_plan(seen.found, seen.steps).module.graph


def verify(seen: Capture, graph: fx.Graph) -> None:
    """Compare a rewriting with the joint graph."""
    check_data_flow(seen.joint.module.graph, graph, [n.name for n in seen.joint.mutated])


def one(graph: fx.Graph, target: object, which: int = 0) -> fx.Node:
    return calls(graph, target)[which]


def swap_arguments(graph: fx.Graph) -> None:
    node = one(graph, ATEN.mm)
    node.args = (node.args[1], node.args[0])


def change_a_constant(graph: fx.Graph) -> None:
    node = one(graph, ATEN.native_dropout)
    node.args = (node.args[0], 0.25, *node.args[2:])


def change_the_operation(graph: fx.Graph) -> None:
    one(graph, ATEN.gelu, -1).target = ATEN.relu.default


def read_another_value(graph: fx.Graph) -> None:
    node = one(graph, ATEN.gelu_backward)
    node.args = (node.args[0], node.args[0])


def copy_a_random_call(graph: fx.Graph) -> None:
    node = one(graph, ATEN.native_dropout)
    with graph.inserting_after(node):
        graph.node_copy(node)


def read_a_copied_random_call(graph: fx.Graph) -> None:
    node = one(graph, ATEN.native_dropout)
    with graph.inserting_after(node):
        copy = graph.node_copy(node)
    mask = next(user for user in node.users if user.args[1] == 1)
    mask.args = (copy, 1)


def drop_a_node(graph: fx.Graph) -> None:
    node = one(graph, ATEN.gelu)
    node.replace_all_uses_with(node.all_input_nodes[0])
    graph.erase_node(node)


def drop_a_random_call(graph: fx.Graph) -> None:
    node = one(graph, ATEN.native_dropout)
    for user in list(node.users):
        user.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(user)
    graph.erase_node(node)


def swap_results(graph: fx.Graph) -> None:
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    given = [i for i, r in enumerate(results) if isinstance(r, fx.Node)]
    results[given[1]], results[given[2]] = results[given[2]], results[given[1]]
    output.args = (tuple(results),)


def take_another_item(graph: fx.Graph) -> None:
    node = one(graph, ATEN.native_dropout)
    first = next(user for user in node.users if user.args[1] == 0)
    first.args = (node, 1)


SABOTAGE = (
    swap_arguments, change_a_constant, change_the_operation, read_another_value,
    copy_a_random_call, read_a_copied_random_call, drop_a_node, drop_a_random_call, swap_results,
    take_another_item,
)  # fmt: skip


@pytest.mark.parametrize("sabotage", SABOTAGE, ids=lambda f: f.__name__)
def test_sabotage_is_noticed(sabotage: Callable[[fx.Graph], None]) -> None:
    seen, graph = rewritten("dropout")
    verify(seen, graph)
    sabotage(graph)
    with pytest.raises(VerificationFailed):
        verify(seen, graph)


def update_twice(graph: fx.Graph) -> None:
    node = one(graph, ATEN.copy_)
    with graph.inserting_after(node):
        graph.node_copy(node)


def lose_an_update(graph: fx.Graph) -> None:
    node = one(graph, ATEN.copy_)
    node.replace_all_uses_with(node.all_input_nodes[0])
    graph.erase_node(node)


@pytest.mark.parametrize("sabotage", [update_twice, lose_an_update])
def test_running_statistics_are_updated_once(sabotage: Callable[[fx.Graph], None]) -> None:
    seen, graph = rewritten("batch norm")
    sabotage(graph)
    with pytest.raises(VerificationFailed, match="exactly once"):
        verify(seen, graph)


def buffer_graph(write_first: bool, through_view: bool) -> fx.Graph:
    """sin(buffer), and the buffer overwritten: before or after."""
    graph = fx.Graph()
    buffer, new = graph.placeholder("buffer"), graph.placeholder("new")
    for node in (buffer, new):
        node.meta["val"] = torch.empty(4)
    read = buffer
    if through_view:
        read = graph.call_function(ATEN.view.default, (buffer, [4]))
        read.meta["val"] = torch.empty(4)

    def write() -> None:
        copy = graph.call_function(ATEN.copy_.default, (buffer, new))
        copy.meta["val"] = torch.empty(4)

    if write_first:
        write()
    sine = graph.call_function(ATEN.sin.default, (read,))
    sine.meta["val"] = torch.empty(4)
    if not write_first:
        write()
    graph.output((sine,))
    return graph


@pytest.mark.parametrize("through_view", [False, True], ids=["itself", "by a view"])
def test_overwriting_a_buffer_before_it_is_read_is_noticed(through_view: bool) -> None:
    """The same nodes, each once: only the place of the write differs."""
    right = buffer_graph(False, through_view)
    check_data_flow(right, buffer_graph(False, through_view), ["buffer"])
    with pytest.raises(VerificationFailed, match="result 0 is computed differently"):
        check_data_flow(right, buffer_graph(True, through_view), ["buffer"])


# --- the split -----------------------------------------------------------------------------


def test_reading_what_was_not_declared_is_noticed() -> None:
    seen = capture(mlp(), [batch(4, 8)])
    names = [n.name for n in seen.rewritten.saved][1:]
    with pytest.raises(VerificationFailed, match="the backward reads"):
        check_split(seen.backward.graph, names)


def test_what_torch_runs_in_both_halves_is_noticed() -> None:
    """A saved list that is too short: torch computes what is missing a second time."""
    seen = capture(mlp(), [batch(4, 8)])
    plan = apply_plan(seen.found, seen.steps)
    short = [n for n in plan.saved if n.op == "placeholder"]
    extra = [n for n in plan.module.graph.nodes if n.op == "placeholder" and n not in short]
    inputs = short + [n for n in extra if not is_tangent(n)]
    forward, backward = extract_forward_backward(
        plan.module, inputs, num_fwd_outputs=seen.joint.num_forward_outputs, static_inputs=()
    )
    names = [n.name for n in inputs]
    check_split(backward.graph, names)
    with pytest.raises(VerificationFailed, match="run in both halves"):
        check_split(backward.graph, names, forward.graph)

"""What the verifier says of rewritten graphs and their halves: right ones, and spoilt ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fxremat import runtime
from fxremat.compat.joint_graph import extract_forward_backward, is_tangent, torch_partition
from fxremat.errors import VerificationFailed
from fxremat.passes.recompute import apply_plan
from fxremat.verify.data_flow import check_data_flow, check_halves, check_split, check_waits
from tests import graphs, nets
from tests.by_hand import ByHand

ATEN = torch.ops.aten


def rewritten(name: str, again: bool = True) -> tuple[graphs.Capture, fx.Graph]:
    """A traced net and a fresh rewriting of it."""
    seen = graphs.capture(*nets.make(name), graphs.everything_again if again else graphs.store_all)
    return seen, apply_plan(seen.found, seen.steps).module.graph


def verify(seen: graphs.Capture, graph: fx.Graph) -> None:
    """Compare a rewriting with the joint graph."""
    check_data_flow(seen.joint.module.graph, graph, [n.name for n in seen.joint.mutated])


def one(graph: fx.Graph, target: object, which: int = 0) -> fx.Node:
    return graphs.calls(graph, target)[which]


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
    graphs.copied(one(graph, ATEN.native_dropout))


def read_a_copied_random_call(graph: fx.Graph) -> None:
    node = one(graph, ATEN.native_dropout)
    mask = next(user for user in node.users if user.args[1] == 1)
    mask.args = (graphs.copied(node), 1)


def drop_a_node(graph: fx.Graph) -> None:
    node = one(graph, ATEN.gelu)
    graphs.replaced(node, node.all_input_nodes[0])


def drop_a_random_call(graph: fx.Graph) -> None:
    node = one(graph, ATEN.native_dropout)
    for user in list(node.users):
        graphs.replaced(user, node.all_input_nodes[0])
    graph.erase_node(node)


def swap_results(graph: fx.Graph) -> None:
    results = graphs.results_of(graph)
    given = [i for i, r in enumerate(results) if isinstance(r, fx.Node)]
    results[given[1]], results[given[2]] = results[given[2]], results[given[1]]
    graph.output_node().args = (tuple(results),)


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
    graphs.copied(one(graph, ATEN.copy_))


def lose_an_update(graph: fx.Graph) -> None:
    node = one(graph, ATEN.copy_)
    graphs.replaced(node, node.all_input_nodes[0])


@pytest.mark.parametrize("sabotage", [update_twice, lose_an_update])
def test_running_statistics_are_updated_once(sabotage: Callable[[fx.Graph], None]) -> None:
    seen, graph = rewritten("batch norm")
    sabotage(graph)
    with pytest.raises(VerificationFailed, match="exactly once"):
        verify(seen, graph)


def buffer_graph(write_first: bool, through_view: bool) -> fx.Graph:
    """sin(buffer), and the buffer overwritten: before or after."""
    hand = ByHand("buffer", "new")
    buffer, new = hand.inputs.values()
    read = hand.call(ATEN.view.default, buffer, [16]) if through_view else buffer
    if write_first:
        hand.call(ATEN.copy_.default, buffer, new)
    sine = hand.call(ATEN.sin.default, read)
    if not write_first:
        hand.call(ATEN.copy_.default, buffer, new)
    return hand.done(sine)


@pytest.mark.parametrize("through_view", [False, True], ids=["itself", "by a view"])
def test_overwriting_a_buffer_before_it_is_read_is_noticed(through_view: bool) -> None:
    """The same nodes, each once: only the place of the write differs."""
    right = buffer_graph(False, through_view)
    check_data_flow(right, buffer_graph(False, through_view), ["buffer"])
    with pytest.raises(VerificationFailed, match="result 0 is computed differently"):
        check_data_flow(right, buffer_graph(True, through_view), ["buffer"])


# --- the split ----------------------------------------------------------------------------


def test_reading_what_was_not_declared_is_noticed() -> None:
    seen = graphs.capture(graphs.mlp(), [graphs.batch(4, 8)])
    names = [n.name for n in seen.rewritten.saved][1:]
    with pytest.raises(VerificationFailed, match="the backward reads"):
        check_split(seen.backward.graph, names, seen.forward.graph)


def test_what_torch_runs_in_both_halves_is_noticed() -> None:
    """A saved list that is too short: torch computes what is missing a second time."""
    seen = graphs.capture(graphs.mlp(), [graphs.batch(4, 8)])
    plan = apply_plan(seen.found, seen.steps)
    short = [n for n in plan.saved if n.op == "placeholder"]
    extra = [n for n in plan.module.graph.nodes if n.op == "placeholder" and n not in short]
    inputs = short + [n for n in extra if not is_tangent(n)]
    forward, backward = extract_forward_backward(
        plan.module, inputs, num_fwd_outputs=seen.joint.num_forward_outputs, static_inputs=()
    )
    names = [n.name for n in inputs]
    check_split(backward.graph, names, fx.Graph())
    with pytest.raises(VerificationFailed, match="run in both halves"):
        check_split(backward.graph, names, forward.graph)


# --- halves -------------------------------------------------------------------------------


def split(name: str) -> tuple[graphs.Capture, fx.Graph, fx.Graph]:
    seen = graphs.capture(*nets.make(name), graphs.everything_again)
    return seen, seen.forward.graph, seen.backward.graph


def verify_split(seen: graphs.Capture, forward: fx.Graph, backward: fx.Graph) -> None:
    check_halves(
        seen.rewritten.module.graph,
        forward,
        backward,
        num_forward_outputs=seen.joint.num_forward_outputs,
        mutated=[n.name for n in seen.joint.mutated],
    )


@pytest.mark.parametrize("name", ["mlp", "dropout", "batch norm", "old buffer", "several results"])
def test_honest_halves_pass(name: str) -> None:
    verify_split(*split(name))


def swap_saved(forward: fx.Graph, backward: fx.Graph) -> None:
    """The forward returns another value under the name of one that is saved."""
    results = graphs.results_of(forward)
    old = next(n for n in reversed(results) if isinstance(n, fx.Node) and n.op != "placeholder")
    with forward.inserting_before(forward.output_node()):
        new = forward.call_function(ATEN.neg.default, (old,))
    new.meta = dict(old.meta)
    results[results.index(old)] = new
    forward.output_node().args = (tuple(results),)


def run_a_random_call_in_both_halves(forward: fx.Graph, backward: fx.Graph) -> None:
    """It has the same name in both, and nobody reads the second."""
    node = graphs.calls(forward, ATEN.native_dropout)[0]
    given = next(iter(backward.nodes))
    with backward.inserting_before(backward.output_node()):
        assert backward.node_copy(node, lambda _: given).name == node.name


def lose_a_result(forward: fx.Graph, backward: fx.Graph) -> None:
    backward.output_node().args = (tuple(graphs.results_of(backward)[1:]),)


SABOTAGE_OF_HALVES: dict[str, Callable[[fx.Graph, fx.Graph], None]] = {
    "swap saved": swap_saved,
    "change the backward": lambda forward, backward: swap_arguments(backward),
    "change the forward": lambda forward, backward: change_the_operation(forward),
    "run a random call twice": lambda forward, backward: copy_a_random_call(forward),
    "run a random call in both halves": run_a_random_call_in_both_halves,
    "lose a result": lose_a_result,
}


@pytest.mark.parametrize("sabotage", SABOTAGE_OF_HALVES.values(), ids=SABOTAGE_OF_HALVES)
def test_sabotage_of_halves_is_noticed(sabotage: Callable[[fx.Graph, fx.Graph], None]) -> None:
    seen, forward, backward = split("dropout")
    verify_split(seen, forward, backward)
    sabotage(forward, backward)
    with pytest.raises(VerificationFailed, match="halves"):
        verify_split(seen, forward, backward)


def test_the_partition_of_torch_passes() -> None:
    seen = graphs.capture(*nets.make("mlp"))
    forward, backward = torch_partition(
        seen.joint.module, (), num_fwd_outputs=seen.joint.num_forward_outputs
    )
    verify_split(seen, forward.graph, backward.graph)


def gradient(hand: ByHand) -> fx.Node:
    """The sine of ``buffer`` times the tangent."""
    sine = hand.call(ATEN.sin.default, hand.inputs["buffer"])
    return hand.call(ATEN.mul.Tensor, sine, hand.inputs["tangents_1"])


def whole(write_first: bool) -> fx.Graph:
    hand = ByHand("buffer", "new", "tangents_1")
    early = None if write_first else gradient(hand)
    hand.call(ATEN.copy_.default, hand.inputs["buffer"], hand.inputs["new"])
    return hand.done(hand.inputs["new"], early or gradient(hand))


@pytest.mark.parametrize("write_first", [True, False], ids=["after the write", "before"])
def test_what_the_forward_writes_is_another_value_to_the_backward(write_first: bool) -> None:
    """The halves read the buffer after the write; the graph that was cut did, or did not."""
    forward, backward = ByHand("buffer", "new"), ByHand("buffer", "tangents_1")
    buffer, new = forward.inputs.values()
    forward.call(ATEN.copy_.default, buffer, new)
    halves = forward.done(new, buffer), backward.done(gradient(backward))
    given: Any = {"num_forward_outputs": 1, "mutated": ["buffer"]}
    if write_first:
        check_halves(whole(write_first), *halves, **given)
    else:
        with pytest.raises(VerificationFailed, match="result 1, of the backward, is another"):
            check_halves(whole(write_first), *halves, **given)


# --- gradients that are given away --------------------------------------------------------

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("target", "more", "by_view", "used"),
    [
        (runtime.accumulated, ([],), False, "gradient"),
        (runtime.accumulated, ([],), True, "gradient"),
        (runtime.arrived, ([], CPU), False, "weight"),
    ],
    ids=["added", "added by a view", "arrived"],
)
def test_what_is_given_away_is_not_used_later(
    target: Any, more: tuple[Any, ...], by_view: bool, used: str
) -> None:
    graph = fx.Graph()
    given = {name: graph.placeholder(name) for name in ("gradient", "weight")}
    gradient, weight = given.values()
    seen = graph.call_function(ATEN.view.default, (gradient, [4])) if by_view else gradient
    graph.call_function(target, (seen, weight, *more))
    late = graph.call_function(runtime.to_device, (given.pop(used), CPU))
    graph.output((late, gradient))
    with pytest.raises(VerificationFailed, match=f"uses {used} after"):
        check_waits(graph)
    graphs.replaced(late, *given.values())
    check_waits(graph)

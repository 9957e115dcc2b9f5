"""Roles, views and what may run again, and calls that end gradients where they are added."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from fxremat import runtime
from fxremat.compat.joint_graph import copy_module
from fxremat.passes.accumulation import LASTING, accumulate, name_later_reads
from fxremat.passes.joint_graph import (
    JointGraph,
    Role,
    is_multi_output,
    is_mutating,
    is_random,
    is_repeatable,
    is_tensor,
    is_view,
    read_joint_graph,
    root,
)
from fxremat.passes.memory_estimation import estimate
from tests import nets
from tests.by_hand import ByHand
from tests.conftest import Golden
from tests.graphs import Net, batch, calls, capture, linear, mlp, no_workspace, unit_time
from tests.single_calls import ATEN, KEY, X, call, item

# --- joint graph --------------------------------------------------------------------------


def test_roles(golden: Golden) -> None:
    seen = capture(mlp(8, 1), [batch(4, 8)], fused=True)
    rows = [f"{seen.joint.role[n].value:9} {n.name}" for n in seen.joint.module.graph.nodes]
    golden("\n".join(rows))


@pytest.mark.parametrize("name", nets.NAMES)
def test_roles_follow_the_data(name: str) -> None:
    """Nothing in the forward reads what only the backward has; lazy ops read no tangent."""
    joint = nets.traced(name).joint
    for node in joint.module.graph.nodes:
        if node.op == "output":
            continue
        roles = {joint.role[i] for i in node.all_input_nodes}
        if joint.role[node] is Role.FORWARD:
            assert roles <= {Role.FORWARD}
        elif joint.role[node] is Role.LAZY:
            assert Role.BACKWARD not in roles
        elif node not in joint.tangents:
            assert Role.BACKWARD in roles or not roles
        if node.target is operator.getitem:  # there with its call, whoever reads it
            assert roles == {joint.role[node]}
    assert len(joint.forward_outputs) <= joint.num_forward_outputs
    assert all(joint.role[n] is Role.FORWARD for n in joint.forward_outputs)


VIEWS = {
    "t": call(ATEN.t.default, X),
    "view": call(ATEN.view.default, X, [16]),
    "expand": call(ATEN.expand.default, X, [2, 4, 4]),
    "unsafe view": call(ATEN._unsafe_view.default, X, [16]),
    "item of split": item(call(ATEN.split.Tensor, X, 2), 1),
    "item of unbind": item(call(ATEN.unbind.int, X), 1),
    "item of unsafe split": item(call(ATEN.unsafe_split.Tensor, X, 2), 1),
    "split": call(ATEN.split.Tensor, X, 2),
}
OTHERS = {
    "clone": call(ATEN.clone.default, X),
    "copy_": call(ATEN.copy_.default, X, X.clone()),
    "item of topk": item(call(ATEN.topk.default, X, 2), 0),
    "var_mean": call(ATEN.var_mean.correction, X, [1]),
    "zeros": call(ATEN.zeros.default, [4]),
}


@pytest.mark.parametrize("name", [*VIEWS, *OTHERS])
def test_views_and_others(name: str) -> None:
    node = {**VIEWS, **OTHERS}[name]
    assert is_view(node) == (name in VIEWS)
    assert (root(node).op == "placeholder") if name in VIEWS else (root(node) is node)
    assert is_mutating(node) == (name == "copy_")
    assert is_multi_output(node) == (name in ("var_mean", "split"))
    assert is_tensor(node) == (not is_multi_output(node))


def attention(kind: str, *more: Any, **named: Any) -> fx.Node:
    target = getattr(ATEN, f"_scaled_dot_product_{kind}").default
    graph = fx.Graph()
    node = graph.call_function(target, (*[graph.placeholder("x")] * 3, *more), named)
    node.meta["val"] = (KEY,)
    return node


RANDOM = {
    "rand_like": call(ATEN.rand_like.default, X),
    "bernoulli": call(ATEN.bernoulli.p, X, 0.5),
    "dropout": call(ATEN.native_dropout.default, X, 0.5, True),
    "randn": call(ATEN.randn.default, [4]),
    "seeds": call(torch.ops.prims.inductor_seeds.default, 2, torch.device("cpu")),
    "attention with dropout": attention("flash_attention", 0.5),
    "attention, dropout by name": attention("flash_attention", dropout_p=0.5),
}
ONCE = {
    "custom op": call(torch.ops.fxremat_tests.triple.default, X),
    "effects": OTHERS["copy_"],
    "python function": call(torch.sin, X),
}
AGAIN = {
    "flash": attention("flash_attention"),
    "efficient": attention("efficient_attention", None, False),
    "flash on a CPU": attention("flash_attention_for_cpu"),
    "numbers of a seed": call(
        torch.ops.prims.inductor_random.default, [4], torch.tensor(3), "rand"
    ),
}


@pytest.mark.parametrize("name", [*RANDOM, *ONCE, *AGAIN])
def test_calls_that_run_again_and_others(name: str) -> None:
    node = {**RANDOM, **ONCE, **AGAIN}[name]
    assert is_random(node) == (name in RANDOM)
    assert is_repeatable(node, frozenset()) == (name in AGAIN)


class _Tag:
    name = "MUST_SAVE"


@pytest.mark.parametrize(
    ("target", "meta", "repeatable"),
    [
        (ATEN.sin.default, {}, True),
        (ATEN.sin.default, {"recompute": _Tag()}, False),
        (ATEN.t.default, {"recompute": _Tag()}, True),  # a view costs nothing
        (ATEN.nonzero.default, {}, True),
        (ATEN.nonzero.default, {"unbacked_bindings": {"u0": ()}}, False),  # only running tells
    ],
)
def test_what_may_run_again(target: Any, meta: dict[str, Any], repeatable: bool) -> None:
    node = call(target, X)
    node.meta.update(meta)
    assert is_repeatable(node, frozenset()) is repeatable
    if not is_view(node):
        (source,) = node.all_input_nodes
        assert not is_repeatable(node, frozenset({source}))  # which the step overwrites


def test_assertions_stay_in_the_forward() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        torch._assert_async(x.sum() < 1e9, "too large")
        return net.linear(x).sin()  # type: ignore[no-any-return]

    seen = capture(Net(run, linear=linear()), [batch(4, 8)])
    (check,) = seen.calls(ATEN._assert_async)
    assert seen.joint.role[check] is Role.FORWARD
    assert len(calls(seen.forward.graph, ATEN._assert_async)) == 1
    assert seen.problem.op_of[check.name].phase == "forward"


# --- accumulation -------------------------------------------------------------------------


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


def test_calls_name_what_is_read_later_and_stay_out_of_the_forward() -> None:
    hand = ByHand("x", "y", "weight", "own")
    graph, (x, y, weight, own) = hand.graph, hand.inputs.values()
    own.meta[LASTING] = weight.meta[LASTING] = True
    early, gradient = hand.call(ATEN.sin.default, x), hand.call(ATEN.cos.default, y)
    call = graph.call_function(runtime.accumulated, (gradient, weight, []))
    dropped = graph.call_function(runtime.accumulated, (early, weight, []))
    seen = hand.call(ATEN.view.default, x, [4, 4])
    late = hand.call(ATEN.add.Tensor, seen, own)
    hand.done(gradient, early, late)
    name_later_reads(graph, [gradient, call, dropped, seen, late])
    assert call.args == (gradient, weight, [x])
    assert dropped not in graph.nodes

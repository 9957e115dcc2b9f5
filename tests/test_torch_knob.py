"""Torch's own option `activation_memory_budget`, and what its checkpoint policies ask for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from fxremat.passes.joint_graph import Role, read_joint_graph, root
from fxremat.passes.user_tags import ProtectMutatedInputs
from tests import graphs, nets
from tests.conftest import Golden
from tests.end_to_end import measured
from tests.ranks import least_named

LAYERS, WIDTH, HIDDEN, TOKENS = 4, 32, 96, 1024


@pytest.fixture(autouse=True)
def _uncached(fresh: None) -> Iterator[None]:
    """The option is tried at several values, and none gets what another has compiled."""
    with inductor_config.patch(force_disable_caches=True):
        yield


def blocks() -> nn.Module:
    """Gated MLPs, as in a Llama, and a loss."""

    def block(net: Any, x: Tensor) -> Tensor:
        y = net.norm(x)
        added: Tensor = net.down(F.silu(net.gate(y)) * net.up(y))
        return x + added

    def made() -> graphs.Net:
        gate, up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        down = nn.Linear(HIDDEN, WIDTH, bias=False)
        return graphs.Net(block, norm=nn.RMSNorm(WIDTH), gate=gate, up=up, down=down)

    parts = nn.Sequential(*(made() for _ in range(LAYERS)))
    return graphs.Net(lambda net, x: net.blocks(x).square().mean(), blocks=parts)


class Scaled(nn.Module):
    """A loss in proportion to one parameter: the derivative by it is the loss over it.

    So each run says what its own derivative has to be, whatever was dropped in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = F.dropout(layer(x), 0.5, training=True)
        return x.sum()


@contextmanager
def compiled(
    model: nn.Module, knob: float | None, memory_budget: int | None
) -> Iterator[nn.Module]:
    """The model, compiled with torch's option or with a budget of bytes, to be run inside."""
    assert (knob is None) != (memory_budget is None)
    torch.compiler.reset()
    if memory_budget is None:
        model.compile(backend="inductor")
    else:
        model.compile(backend="fxremat", options={"memory_budget": memory_budget})
    with functorch_config.patch(activation_memory_budget=1.0 if knob is None else knob):
        yield model


def peak_bytes(knob: float | None = None, memory_budget: int | None = None) -> int:
    torch.manual_seed(0)
    with compiled(blocks(), knob, memory_budget) as model:
        return measured(model, model, (torch.randn(TOKENS, WIDTH),))


def derivative(knob: float | None = None, memory_budget: int | None = None) -> float:
    """What a step computes for a derivative, in parts of what it has to be."""
    torch.manual_seed(0)
    with compiled(Scaled(), knob, memory_budget) as model:
        loss = model(torch.randn(4 * TOKENS, WIDTH))
        loss.backward()
    scale = model.scale
    assert isinstance(scale, nn.Parameter)
    assert scale.grad is not None
    return float(scale.grad * scale.detach() / loss.detach())


@pytest.mark.slow
def test_the_option_may_take_more_memory_than_none_of_it_and_bytes_are_kept() -> None:
    """0.1 nearly halves the peak, and 0.0 takes more than a step without any budget."""
    none, tenth, zero = (peak_bytes(knob) for knob in (1.0, 0.1, 0.0))
    assert tenth < 0.75 * none
    assert zero > 1.1 * none
    assert peak_bytes(memory_budget=tenth) <= tenth


@pytest.mark.slow
@pytest.mark.parametrize("knob", [0.5, 0.2])
def test_the_option_drops_other_numbers_in_the_backward_than_in_the_forward(knob: float) -> None:
    assert derivative(1.0) == pytest.approx(1.0, rel=1e-4)
    assert abs(derivative(knob) - 1.0) > 0.1


def test_gradients_through_dropout_are_right_within_a_budget() -> None:
    """At the least budget, so that whatever can run again does."""
    with pytest.raises(BackendCompilerFailed) as refused:
        derivative(memory_budget=2**20)
    least = least_named(refused.value)
    assert derivative(memory_budget=least) == pytest.approx(1.0, rel=1e-4)


# --- user tags ----------------------------------------------------------------------------

ATEN = torch.ops.aten


def saved(seen: graphs.Capture) -> set[str]:
    """Names of what the forward saves, inputs of the graph aside."""
    return {n.name for n in seen.rewritten.saved if n.op != "placeholder"}


def test_backward_of_a_block_that_must_be_recomputed(golden: Golden) -> None:
    model = nets.checkpointed(graphs.mlp(8, 1), nets.save_nothing)
    golden(graphs.capture(model, [graphs.batch(4, 8)]).backward.code.strip())


def test_calls_with_several_results_under_must_recompute() -> None:
    """Dropout is drawn once, a norm runs again as one call, and no result is taken twice."""
    seen = nets.traced("save nothing")
    forward, backward = seen.forward.graph, seen.backward.graph
    for target, again in ((ATEN.native_dropout, 0), (ATEN.native_layer_norm, 1)):
        assert [len(graphs.calls(graph, target)) for graph in (forward, backward)] == [1, again]
    for call in graphs.calls(seen.joint.module.graph, ATEN.native_dropout):
        indices = [user.args[1] for user in call.users]
        assert len(indices) == len(set(indices))  # else its storage would be two values


@pytest.mark.parametrize(
    ("policy", "saved_with_room", "saved_without"),
    [
        (CheckpointPolicy.MUST_SAVE, True, True),
        (CheckpointPolicy.PREFER_SAVE, True, False),
        (CheckpointPolicy.PREFER_RECOMPUTE, True, False),
        (CheckpointPolicy.MUST_RECOMPUTE, False, False),
        (None, True, False),  # a checkpoint without a policy
    ],
)
def test_each_policy_holds_for_ops_of_torch_and_of_others(
    policy: CheckpointPolicy | None, saved_with_room: bool, saved_without: bool
) -> None:
    """A must is obeyed whatever the budget is; a preference leaves the choice to the planner."""
    middle = nn.Sequential(
        graphs.linear(), graphs.Net(lambda _, x: nets.triple(x)), nn.GELU(), nn.Sigmoid()
    )
    model = nets.checkpointed(middle, None if policy is None else lambda *_, **__: policy)
    with_room = graphs.capture(model, [graphs.batch(4, 8)])
    without = graphs.capture(model, [graphs.batch(4, 8)], graphs.everything_again)
    for seen, expected in ((with_room, saved_with_room), (without, saved_without)):
        for name in ("triple", "sigmoid"):
            assert (name in saved(seen)) is expected, name


@pytest.mark.parametrize("layers", [2, 15])
def test_deep_blocks_that_must_be_recomputed(layers: int) -> None:
    model = nets.checkpointed(
        nn.Sequential(*(nn.Tanh() for _ in range(layers)), graphs.linear()), nets.save_nothing
    )
    seen = graphs.assert_plan_changes_nothing(model, [graphs.batch(4, 8)])
    assert sum("tanh" in name for name in saved(seen)) == 0


# --- inputs that are overwritten ----------------------------------------------------------


def without_clone(seen: graphs.Capture) -> Any:
    """A traced graph in which the backward reads the overwritten buffer itself."""
    graph = seen.joint.module.graph
    for clone in graphs.calls(graph, ATEN.clone):
        clone.replace_all_uses_with(clone.all_input_nodes[0])
        graph.erase_node(clone)
    return read_joint_graph(seen.joint.module, seen.joint.num_forward_outputs)


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "inductor"])
def test_the_backward_reads_a_clone_of_what_the_step_overwrites(fused: bool) -> None:
    seen = graphs.capture(*nets.make("old buffer"), fused=fused)
    joint = without_clone(seen)
    assert ProtectMutatedInputs(joint.num_forward_outputs).call(joint.module).modified
    joint.module.graph.lint()
    joint = read_joint_graph(joint.module, joint.num_forward_outputs)
    (clone,) = graphs.calls(joint.module.graph, ATEN.clone)
    assert joint.role[clone] is Role.FORWARD
    for node in joint.module.graph.nodes:
        if joint.role[node] is not Role.FORWARD and node.op != "output":
            assert not any(root(i) in joint.mutated for i in node.all_input_nodes)


def test_a_clone_stays_in_the_forward_even_if_only_the_backward_reads_it() -> None:
    """Else it would be made after the buffer has been overwritten."""
    joint = graphs.capture(*nets.make("old buffer")).joint
    for clone in graphs.calls(joint.module.graph, ATEN.clone):
        graphs.replaced(clone, clone.all_input_nodes[0])
    joint = read_joint_graph(joint.module, joint.num_forward_outputs)
    (source,) = joint.mutated
    for user in list(source.users):
        if joint.role[user] is Role.FORWARD and "copy_" not in user.name:
            user.replace_input_with(source, joint.primals[0])
    assert ProtectMutatedInputs(joint.num_forward_outputs).call(joint.module).modified
    joint = read_joint_graph(joint.module, joint.num_forward_outputs)
    (clone,) = graphs.calls(joint.module.graph, ATEN.clone)
    assert joint.role[clone] is Role.FORWARD

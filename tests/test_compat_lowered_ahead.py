"""A graph that is lowered ahead is not lowered again, and computes what it always did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._inductor.graph import GraphLowering

from fxremat.compat.configuration import inductor_config
from fxremat.compat.inductor import lowered_ahead
from fxremat.compat.inductor.generated_code import generate
from fxremat.compat.inductor.lowered_ahead import forget_lowered, hand_over
from fxremat.compat.joint_graph import torch_partition
from tests.compat_graphs import half, inductor_by
from tests.graphs import batch

Step = Callable[[fx.GraphModule, fx.GraphModule], None]


@pytest.fixture(autouse=True)
def _nothing_handed_over() -> Iterator[None]:
    torch._dynamo.reset()
    forget_lowered()
    yield
    forget_lowered()


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One for each graph that Inductor lowers from here on: whether it is a backward."""
    seen, run = [], GraphLowering.run

    def watched(self: GraphLowering, *inputs: Any) -> Any:
        seen.append(self.is_backward)
        return run(self, *inputs)

    monkeypatch.setattr(GraphLowering, "run", watched)
    return seen


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 64))


def trained(model: nn.Module, between: Step) -> list[torch.Tensor]:
    """Gradients of one step, compiled by Inductor; ``between`` sees the halves before it does."""

    def partition(module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        halves = torch_partition(module, inputs, **kwargs)
        between(*halves)
        return halves

    torch._dynamo.reset()
    torch.manual_seed(1)
    torch.compile(model, backend=inductor_by(partition))(batch(32, 64)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def ahead(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Generates both and hands them over."""
    first = generate(forward, is_backward=False, seen_outputs=1, with_kernels=True)
    names = [str(node) for node in forward.graph.output_node().args[0]]  # type: ignore[union-attr]
    strides = {n: s for n, s in zip(names, first.strides, strict=True) if s is not None}
    second = generate(backward, is_backward=True, input_strides=strides, with_kernels=True)
    for one in (first, second):
        assert one.lowered is not None
        hand_over(one.lowered)


def nothing(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    pass


@pytest.mark.parametrize("threads", [1, 2])
def test_it_is_lowered_once_and_computes_the_same(lowered: list[bool], threads: int) -> None:
    """However many threads compile kernels."""
    with inductor_config.patch(fx_graph_cache=False, compile_threads=threads):
        expected = trained(net(), nothing)
        assert lowered == [False, True]
        found = trained(net(), ahead)
    assert lowered == [False, True] * 2
    assert not lowered_ahead._ready  # each is taken once
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def other_configuration(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    with inductor_config.patch(max_fusion_size=1):
        ahead(forward, backward)


def other_graph(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    ahead(forward, backward)
    for module in (forward, backward):
        call = next(n for n in module.graph.nodes if n.op == "call_function")
        call._rename(call.name + "_other")


@pytest.mark.parametrize("other", [other_configuration, other_graph])
def test_what_is_another_is_lowered_anew(lowered: list[bool], other: Step) -> None:
    with inductor_config.patch(fx_graph_cache=False):
        trained(net(), other)
    assert lowered == [False, True] * 2


def test_who_wants_to_see_inductor_at_work_does() -> None:
    def step(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        with inductor_config.patch({"trace.enabled": True}):
            code = generate(forward, is_backward=False, with_kernels=True)
            assert code.lowered is not None
            hand_over(code.lowered)

    half(net(), step)
    assert not lowered_ahead._ready


def test_the_counters_of_inductor_are_those_of_one_compilation() -> None:
    """What was generated ahead is not counted twice."""
    with inductor_config.patch(fx_graph_cache=False):
        counters.clear()
        trained(net(), nothing)
        expected = dict(counters["inductor"])
        counters.clear()
        trained(net(), ahead)
    assert dict(counters["inductor"]) == expected


def test_inputs_that_are_checked(lowered: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the code is taken where what calls it checks, lowered anew where it does."""
    expected = trained(net(), nothing)
    lowered.clear()

    def checked(inputs: Any, static: Any) -> list[int]:
        return [k for k, x in enumerate(inputs) if isinstance(x, torch.Tensor)]

    monkeypatch.setattr("torch._inductor.compile_fx.get_input_idxs_to_check", checked)
    with inductor_config.patch(fx_graph_cache=False):
        found = trained(net(), ahead)
    assert lowered == [False, True] * (2 if lowered_ahead.checks_are_written() else 1)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)

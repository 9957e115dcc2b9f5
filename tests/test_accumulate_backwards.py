"""Gradients that are added inside of the backward, in backwards of all kinds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxremat
from fxremat.runtime import accumulation
from tests import accumulating
from tests.accumulating import (
    EAGER,
    LAYERS,
    LOSSES,
    Early,
    Refused,
    check_same,
    compiled,
    gradients,
    opted_in,
    same,
    with_input,
)
from tests.small import Stack, seeded

early = accumulating.early
_fresh = accumulating.fresh


def test_gradients_that_are_asked_for_are_not_added(early: Early) -> None:
    model, x, call = opted_in()
    parameters = list(model.parameters())
    call(x).backward()
    before = gradients(model)
    asked = torch.autograd.grad(call(x), parameters)
    assert same(gradients(model), before)
    assert same(list(asked), before)
    assert not early
    call(x).backward(inputs=parameters[:2])
    assert {id(p) for p in early} == {id(p) for p in parameters[:2]}
    expected = [g if i > 1 or g is None else 2 * g for i, g in enumerate(before)]
    assert same(gradients(model), expected)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_the_backward(caplog: pytest.LogCaptureFixture, early: Early) -> None:
    _, x, call = opted_in()
    for _ in range(2):
        call(x).backward(create_graph=True)
    assert not early
    assert "in this backward" in caplog.text


# --- other gradients, and hooks -----------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_other_gradients_of_a_parameter(
    name: str, caplog: pytest.LogCaptureFixture, early: Early
) -> None:
    def loss_of(model: Any) -> Any:
        call = compiled(model)
        return lambda x: LOSSES[name](model, call, x)

    check_same(LAYERS, loss_of)
    assert not early
    told = [r for r in caplog.records if "this graph alone has a gradient" in r.getMessage()]
    assert [r.levelno for r in told] == [logging.WARNING]


class Halves(nn.Module):
    """Two graphs; the first layer is part of both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        torch._dynamo.graph_break()
        return cast("Tensor", self.layers[0](torch.tanh(self.layers[2](x))).square().mean())


def twice(loss: Tensor) -> None:
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)


def double(weight: Any) -> None:
    weight.grad.mul_(2)


def with_hook(kind: str, hook: Callable[..., Any]) -> Callable[[Any], object]:
    """Gives the weight of a layer a hook."""
    return lambda model: getattr(model.layers[1].weight, kind)(hook)


def in_host_memory(model: Any) -> None:
    fxremat.offload(model, weights="layers.[01].weight", device="cpu")


def in_parts_of_one_tensor(model: Any) -> None:
    """Gradients that are as good as tensors of their own."""
    sizes = [p.numel() for p in model.parameters()]
    flat = torch.zeros(sum(sizes))
    for parameter, part in zip(model.parameters(), torch.split(flat, sizes), strict=True):
        parameter.grad = part.view_as(parameter)


def in_bfloat16() -> tuple[nn.Module, tuple[Tensor, ...]]:
    model, (x,) = LAYERS()
    return model.to(torch.bfloat16), (x.to(torch.bfloat16),)


def in_sizes_that_change(model: Any) -> Any:
    call: Any = torch.compile(model, backend="fxremat", options=EAGER, dynamic=True)
    sizes = iter((4, 3, 2))
    return lambda x: call(x[: next(sizes)].clone())


SAME: dict[str, tuple[dict[str, Any], int]] = {
    # what three backwards have of their own, and how many gradients are added early in them
    "graph breaks": ({"make": with_input(Halves, 4, 16)}, 2 * 4),
    "16 bits": ({"make": in_bfloat16}, 2 * 6),
    "dynamic sizes": ({"loss_of": in_sizes_that_change}, 2 * 6),
    "two through one graph": ({"backward": twice}, 5 * 6),
    "two roots": ({"backward": lambda x: torch.autograd.backward([x, x.exp()])}, 2 * 6),
    "tensor hook": ({"prepare": with_hook("register_hook", lambda g: 2 * g)}, 2 * 5),
    "late hook": ({"prepare": with_hook("register_post_accumulate_grad_hook", double)}, 2 * 5),
    "host memory": ({"prepare": in_host_memory}, 2 * 4),
    "grads there": ({"prepare": in_parts_of_one_tensor}, 3 * 6),
}


@pytest.mark.parametrize("name", SAME)
def test_backwards_of_all_kinds(name: str, early: Early) -> None:
    more, count = SAME[name]
    given: dict[str, Any] = {"make": LAYERS, **more}
    check_same(**given)
    assert len(early) == count
    assert name != "dynamic sizes" or len(fxremat.reports()) == 1


def test_a_root_that_is_a_leaf(early: Early) -> None:
    model, x, call = opted_in()
    weight = model.layers[0].weight
    call(x).backward()
    torch.autograd.backward([call(x), weight], [torch.ones(()), torch.ones_like(weight)])
    assert not early


def test_hooks_that_come_later(early: Early, caplog: pytest.LogCaptureFixture) -> None:
    """After compilation: on the parameter, on what adds its gradient, and on the graph."""
    seen: list[Any] = []

    def note(*arguments: Any) -> None:
        seen.append(arguments)

    model, x, call = opted_in()
    call(x).backward()
    first, second, *_ = model.parameters()
    edges = [torch.autograd.graph.get_gradient_edge(p).node for p in (first, second)]
    edges[0].register_prehook(note)
    edges[1].register_hook(note)
    handle = model.layers[1].weight.register_hook(note)
    call(x).backward()
    assert len(early) == 3
    assert len(seen) == 3
    assert all(torch.isfinite(g).all() for one in seen for g in one if isinstance(g, Tensor))
    handle.remove()
    early.clear()
    loss = call(x)
    loss.grad_fn.register_hook(lambda inputs, _: tuple(g if g is None else 2 * g for g in inputs))
    before = gradients(model)
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    assert not early
    found = [b + g for b, g in zip(before, expected, strict=True) if b is not None]
    assert same(gradients(model), found)
    assert "a hook" in caplog.text


# --- how the graphs and the backward are run ----------------------------------------------


def test_graphs_that_run_again_in_the_backward(
    caplog: pytest.LogCaptureFixture, early: Early
) -> None:
    """torch.utils.checkpoint gives their backward copies of the parameters."""

    def loss_of(model: Any) -> Any:
        call = compiled(model)
        again: Any = checkpoint
        return lambda x: again(call, x, use_reentrant=False)

    check_same(LAYERS, loss_of)
    assert not early
    assert "a copy of it" in caplog.text


def test_anomaly_mode(early: Early) -> None:
    with torch.autograd.set_detect_anomaly(True):
        check_same(LAYERS)
    assert not early


def test_steps_that_are_compiled_as_a_whole(early: Early) -> None:
    """The backward is called in a frame that Dynamo looks at."""
    model, x, _ = opted_in()
    call = compiled(lambda x: model(x).backward())
    for _ in range(2):
        call(x)
    assert len(early) == 6


def acting_backward(act: Callable[[], object]) -> Any:
    """Gives what it is given, and acts in its backward."""

    class Acts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            act()
            return gradient

    return Acts.apply


def test_backwards_of_several_threads(early: Early) -> None:
    """While two run, neither knows which one it is."""
    model, x, call = opted_in()
    call(x).backward()
    single = gradients(model)
    meet = acting_backward(threading.Barrier(2).wait)
    losses = [meet(call(x)) for _ in range(2)]
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for parameter, gradient in zip(model.parameters(), single, strict=True):
        torch.testing.assert_close(parameter.grad, None if gradient is None else 3 * gradient)


@pytest.mark.usefixtures("only_rank")
def test_averaging_over_processes(early: Early) -> None:
    def loss_of(model: Any) -> Any:
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        call = compiled(wrapped)

        def loss(x: Tensor) -> Any:
            with wrapped.no_sync() if len(early) < 3 else nullcontext():
                return call(x)

        return loss

    check_same(LAYERS, loss_of, in_place=False)


# --- errors -------------------------------------------------------------------------------


def test_an_error_in_the_backward(early: Early) -> None:
    """Each gradient has been added as a whole or not at all; the next backward is right."""
    refusing: list[bool] = []

    def refuse() -> None:
        if refusing:
            raise Refused("not this one")

    model, x = seeded(lambda: Stack(broken=True), 4, 32)
    fxremat.accumulate_in_backward(model)
    call = compiled(model)
    ours = acting_backward(refuse)
    call(ours(x.requires_grad_())).backward()
    first = gradients(model)
    early.clear()
    refusing.append(True)
    with pytest.raises(Refused, match="not this one"):
        call(ours(x)).backward()
    assert early
    assert same(gradients(model), [None if one is None else 2 * one for one in first])
    refusing.clear()
    model.zero_grad()
    call(ours(x)).backward()
    assert same(gradients(model), first)


def test_an_error_inside_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, call = opted_in()
    call(x).backward()
    single = gradients(model)
    reason_against, count = accumulation._reason_against, [0]

    def failing(*args: Any) -> str | None:
        count[0] += 1
        if count[0] == 4:
            raise Refused("half way")
        return reason_against(*args)

    monkeypatch.setattr(accumulation, "_reason_against", failing)
    with pytest.raises(Refused, match="half way"):
        call(x).backward()
    both = zip(gradients(model), single, strict=True)
    pairs = [(found, one) for found, one in both if found is not None and one is not None]
    added = [torch.equal(found, 2 * one) for found, one in pairs]
    kept = [torch.equal(found, one) for found, one in pairs]
    assert [a != k for a, k in zip(added, kept, strict=True)] == 6 * [True]
    assert sum(added) == 3
    monkeypatch.undo()
    model.zero_grad()
    call(x).backward()
    call(x).backward()
    assert same(gradients(model), [None if g is None else 2 * g for g in single])

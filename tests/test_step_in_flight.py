"""Forwards that wait for their backward: counted, and told where they break a budget."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import fxremat
from fxremat.step import scope
from fxremat.step.in_flight import watch_in_flight
from fxremat.step.promise import Promise, RunVersions
from tests.end_to_end import QUICK, measured, step, warned
from tests.small import Chain
from tests.test_step_planned import blocks, two_breaks

HOST = torch.device("cpu")
KIB = 1024

pytestmark = pytest.mark.usefixtures("fresh_budgets")


told = partial(warned, fxremat.PromiseBroken)


def chain(depth: int) -> tuple[Chain, Tensor, dict[str, Any]]:
    """A model, tokens for it, and options with 60 % of what it takes uncompiled."""
    torch.manual_seed(0)
    model, tokens = Chain(depth), torch.randint(32, (8, 128))
    return model, tokens, {**QUICK, "memory_budget": peak_bytes(model, tokens) * 6 // 10}


def peak_bytes(model: nn.Module, tokens: Tensor) -> int:
    """Of a step after the next one; there are no gradients before it and after it."""
    peak = measured(model, model, (tokens,))
    model.zero_grad(set_to_none=True)
    return peak


def gradients(model: nn.Module, tokens: Tensor) -> list[Tensor | None]:
    """Of a step."""
    step(model, model, (tokens,))
    return [parameter.grad for parameter in model.parameters()]


def test_blocks_compiled_by_themselves_share_the_budget() -> None:
    """From the first step on; gradients stay what they are."""
    model, tokens, given = chain(8)
    expected = gradients(model, tokens)
    for block in model.blocks:
        block.compile(backend="fxremat", options=given)
    with told() as found:
        torch.testing.assert_close(gradients(model, tokens), expected)
        torch.testing.assert_close(gradients(model, tokens), expected)
    assert peak_bytes(model, tokens) <= given["memory_budget"]
    assert found == []


def test_what_is_said_to_wait_alone_is_told_of_and_planned_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """``instances`` is wrong: the first step breaks the promise, and says so; the next keeps it."""
    model, tokens, given = chain(8)
    for block in model.blocks:
        block.compile(backend="fxremat", options={**given, "instances": 1})
    with told() as first, caplog.at_level(logging.WARNING, logger="fxremat"):
        gradients(model, tokens)
    with told() as later:
        gradients(model, tokens)
        peak = peak_bytes(model, tokens)
    assert first[-1].planned_for == 8
    assert first[-1].budget_bytes == given["memory_budget"]
    assert any("planned for 8" in each.getMessage() for each in caplog.records)
    assert later == []
    assert peak <= given["memory_budget"]


def test_inputs_are_not_kept_alive() -> None:
    model, tokens, given = chain(3)
    for block in model.blocks:
        block.compile(backend="fxremat", options=given)
    given_to_model = tokens.clone()
    gradients(model, given_to_model)
    there = weakref.ref(given_to_model)
    call = torch.compile(exponential, backend="fxremat", options={**QUICK, "memory_budget": "1MiB"})
    x = torch.linspace(0, 1, 64, requires_grad=True)
    call(x).sum().backward()  # type: ignore[no-untyped-call]
    also_there = weakref.ref(x)
    del given_to_model, x
    gc.collect()
    assert there() is None
    assert also_there() is None


def test_micro_batches_are_told_of_only_where_forwards_wait() -> None:
    model, tokens, given = chain(4)
    call = torch.compile(model, backend="fxremat", options=given)
    parts = [tokens, tokens.flip(0)]
    with told() as by_turns:
        for part in parts:
            call(part).backward()
    model.zero_grad(set_to_none=True)

    def together() -> None:
        losses = [call(part) for part in parts]
        for loss in losses:
            loss.backward()

    with told() as at_once:
        together()
    with told() as later:
        model.zero_grad(set_to_none=True)
        peak = fxremat.measure_peak(together, held=(model, parts)).peak_bytes
    assert by_turns == []
    assert [(each.in_flight, each.planned_for) for each in at_once] == [(2, 2)]
    assert peak <= given["memory_budget"]
    assert later == []


def test_without_a_budget_nothing_is_said() -> None:
    model, tokens, _ = chain(2)
    for block in model.blocks:
        block.compile(backend="fxremat", options=QUICK)
    with told() as found:
        gradients(model, tokens)
    assert found == []


# --- what counts as in flight -------------------------------------------------------------


def exponential(x: Tensor) -> Tensor:
    """Keeps its result for its backward: 8 KiB."""
    return x.exp()


def alone(promise: Promise) -> Callable[..., Any]:
    """A graph of one version, which is planned to run by itself."""
    runs = RunVersions((promise,), (0,), promise.peak_bytes)
    return watch_in_flight(runs, scope.scope_of(HOST, 40 * KIB))


def watched(
    forward: Callable[..., Any] = exponential,
    saved_bytes: int = 8 * KIB,
    peak_bytes: int = 40 * KIB,
) -> tuple[Callable[..., Any], Tensor]:
    """A compiled function that by default may have one forward in flight, and an input for it."""
    x = torch.linspace(0, 1, saved_bytes // 4, requires_grad=True)

    def backend(gm: Any, inputs: Any) -> Callable[..., Any]:
        made = torch._dynamo.lookup_backend("aot_eager")(gm, inputs)
        return alone(Promise(made, "the graph", HOST, 40 * KIB, peak_bytes, 0, 0, saved_bytes))

    return torch.compile(forward, backend=backend), x


def number_in_flight() -> int:
    return len(scope.scope_of(HOST, 40 * KIB).waiting)


def test_a_forward_is_in_flight_until_its_backward() -> None:
    call, x = watched()
    loss = call(x).sum()
    assert number_in_flight() == 1
    torch.autograd.backward(loss)
    assert number_in_flight() == 0
    with told() as found:
        other = call(x)  # while the loss of before is still there
    assert found == []
    with told() as found:
        more = call(x)
    assert number_in_flight() == 2
    assert (found[0].in_flight, found[0].expected_bytes - found[0].held_bytes) == (2, 40 * KIB)
    assert found[0].held_bytes == 8 * KIB
    del other, more


@pytest.mark.parametrize(
    ("forward", "peak_bytes", "numbers"),
    [
        (exponential, 32 * KIB, []),  # the last byte of the budget may be used
        (exponential, 32 * KIB + 1, [2]),
        (lambda x: x.square(), 40 * KIB, []),  # keeps its argument, which both hold once
    ],
)
def test_what_two_forwards_hold_is_counted(
    forward: Callable[..., Any], peak_bytes: int, numbers: list[int]
) -> None:
    call, x = watched(forward, peak_bytes=peak_bytes)
    with told() as found:
        kept = [call(x), call(x)]
    assert number_in_flight() == 2
    assert [each.in_flight for each in found] == numbers
    del kept


def test_as_many_forwards_that_hold_more_are_looked_at() -> None:
    small, x = watched(peak_bytes=16 * KIB)
    large, y = watched(lambda y: y.exp(), saved_bytes=32 * KIB, peak_bytes=16 * KIB)
    with told() as first:
        kept = [small(x), small(x)]
    del kept
    with told() as later:
        kept = [large(y), large(y)]
    assert first == []
    assert [(each.in_flight, each.held_bytes) for each in later] == [(2, 32 * KIB)]
    del kept


@pytest.mark.parametrize(("has_gradient", "held"), [(False, 8 * KIB), (True, 16 * KIB)])
def test_gradients_of_what_others_hold_are_there_too(has_gradient: bool, held: int) -> None:
    call, x = watched(lambda x: x.square())
    x.grad = torch.zeros_like(x) if has_gradient else None
    kept = [call(x)]
    with told() as found:
        kept.append(call(x.detach().clone().requires_grad_()))
    assert [each.held_bytes for each in found] == [held]


def test_a_forward_whose_graph_is_gone_holds_nothing() -> None:
    call, x = watched()
    gc.disable()
    try:
        for _ in range(3):
            with told() as found:
                call(x)
            assert number_in_flight() == 0
            assert found == []
    finally:
        gc.enable()


def test_a_graph_that_is_retained_holds_what_it_saved() -> None:
    call, x = watched()
    loss = call(x).sum()
    torch.autograd.backward(loss, retain_graph=True)
    assert number_in_flight() == 1
    torch.autograd.grad(loss, x)
    assert number_in_flight() == 0
    torch.testing.assert_close(x.grad, x.exp())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, nullcontext])
def test_without_gradients_nothing_is_counted(context: Callable[[], Any]) -> None:
    call, x = watched()
    x = x.detach() if context is nullcontext else x
    with context():
        outputs = [call(x), call(x)]
    assert number_in_flight() == 0
    del outputs


def test_results_of_all_sorts() -> None:
    """Nothing, numbers, views, an argument as it is; in tuples and dictionaries."""

    def forward(x: Tensor) -> dict[str, Any]:
        y = x.sin()
        return {"none": None, "number": 3, "argument": x, "views": (y[:8].view(2, 4), y.exp())}

    call, x = watched(forward)
    given = x * 1
    first, expected = call(given), forward(given)
    assert number_in_flight() == 1
    assert first["argument"] is given
    for mine, its in zip(first["views"], expected["views"], strict=True):
        torch.testing.assert_close(mine, its)
    sums = [found["views"][0].sum() + found["views"][1].sum() for found in (first, expected)]
    mine, its = (torch.autograd.grad(total, x, retain_graph=True)[0] for total in sums)
    torch.testing.assert_close(mine, its)


def test_an_argument_that_is_returned_is_no_second_forward() -> None:
    first, x = watched()
    second, _ = watched(lambda y: (y, y.detach() + 1))
    y = first(x)
    again, _ = second(y)
    assert again is y
    assert number_in_flight() == 1


def test_a_saved_tensor_that_was_overwritten_does_not_fail_a_forward() -> None:
    """The plan says then what the forward holds; autograd complains when its backward runs."""
    call, x = watched(lambda x: x * x.sin().exp())
    y = x * 1
    first = call(y)
    with torch.no_grad():
        y.zero_()
    with told() as found:
        second = call(y)
    assert [each.held_bytes for each in found] == [8 * KIB]
    del first, second


class Tagged(Tensor):
    """A subclass that sees what is done with it."""

    seen: int = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Tagged.seen += 1
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_subclasses_are_left_alone() -> None:
    x = torch.ones(4, requires_grad=True).sin()
    result = torch.ones(4, requires_grad=True).as_subclass(Tagged)
    call = alone(Promise(lambda y: [result], "the graph", HOST, 1, 1, 0, 0, 1))
    before = Tagged.seen
    assert call(x)[0] is result
    assert Tagged.seen == before
    assert number_in_flight() == 0


def test_attributes_of_the_compiled_function_are_kept() -> None:
    def compiled(*args: Any) -> Any:
        return args

    compiled.serialize = 1  # type: ignore[attr-defined]
    compiled._torchdynamo_orig_callable = 2  # type: ignore[attr-defined]
    call = alone(Promise(compiled, "the graph", HOST, 1, 1, 0, 0, 1))
    assert vars(call) == {"serialize": 1}


def test_reset_forgets_what_was_told() -> None:
    x = torch.ones(64 * KIB, requires_grad=True)
    numbers = []
    for _ in range(2):
        torch._dynamo.reset()
        budget = {**QUICK, "memory_budget": "1.1MiB"}
        call = torch.compile(exponential, backend="fxremat", options=budget)
        with told() as found:
            kept = [call(x), call(x)]
            del kept
            kept = [call(x), call(x)]
        numbers.append(len(found))
        del kept
    assert numbers == [1, 1]


def test_that_a_first_step_takes_too_much_is_said_once() -> None:
    """Not for each graph that joins those that wait: an error names the least for all of them."""
    case = two_breaks(partial(Broken, 6))
    case.compile("128KiB")
    with told() as found, pytest.raises(BackendCompilerFailed, match="least that fxremat can plan"):
        case.step()
    (message,) = found
    assert message.together


class Broken(nn.Module):
    """A graph for each of its blocks."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = blocks(depth)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        x = self.blocks[1](x).relu()
        torch._dynamo.graph_break()
        x = self.blocks[2](x).sin()
        torch._dynamo.graph_break()
        x = self.blocks[3](x).cos()
        torch._dynamo.graph_break()
        loss: Tensor = self.blocks[4](x).square().mean()
        return loss

"""Optimizers that step inside of the backward: the same training, beside it, in less memory."""

from __future__ import annotations

import copy
import gc
import io
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxremat
from fxremat import runtime
from fxremat.checking.data_flow import check_arrivals
from fxremat.model.stepping import StepInBackward
from fxremat.runtime import CopyRecord
from tests.small import Layers, Stack, Tied, seeded

RATE = 2e9
OPTIONS: dict[str, Any] = {"solver": "greedy", "host_bandwidth": int(RATE)}
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    several = torch.accelerator.is_available()  # threads of autograd, one for each device
    with torch.autograd.set_multithreading_enabled(False) if several else nullcontext():
        yield
    torch._dynamo.reset()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def compiled(model: nn.Module, executor: str = "aot_eager", **options: Any) -> Any:
    options = {**OPTIONS, "executor": executor, **options}
    return torch.compile(model, backend="fxremat", options=options)


def moved(model: nn.Module, **options: Any) -> nn.Module:
    return fxremat.offload(model, device="cpu", **options)


def layers(depth: int = 4, width: int = 64) -> tuple[nn.Module, Tensor]:
    return seeded(lambda: Layers(depth, width), 8, width)


def trained(
    made: tuple[nn.Module, Tensor],
    loss_of: Callable[[nn.Module], Loss],
    optimizer: torch.optim.Optimizer | None,
    steps: int = 10,
) -> list[Tensor]:
    """Losses and parameters; with an optimizer it steps after each backward."""
    model, x = made
    loss = loss_of(model)
    losses = []
    for number in range(steps):
        value = loss(x if x.dtype == torch.int64 else x + number)
        torch.autograd.backward(value)
        losses.append(value.detach())
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def same_training(
    make: Callable[[], tuple[nn.Module, Tensor]],
    loss_of: Callable[[nn.Module], Loss] = compiled,
    make_optimizer: Make = adamw,
    **weights: Any,
) -> list[CopyRecord]:
    """Train with steps after and in the backward, and compare; the steps that began early."""
    plain = make()
    moved(plain[0], **weights)
    expected = trained(plain, loss_of, make_optimizer(list(plain[0].parameters())))
    ours = make()
    fxremat.step_in_backward(moved(ours[0], **weights), make_optimizer)
    with runtime.copy_trace() as records:
        found = trained(ours, loss_of, None)
    assert equal(found, expected)
    return [record for record in records if record.what == "step"]


# --- the same training -------------------------------------------------------------------


OPTIMIZERS: dict[str, Make] = {
    "fused AdamW": adamw,
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_by_parameter(name: str) -> None:
    assert len(same_training(layers, make_optimizer=OPTIMIZERS[name])) == 80


@pytest.mark.parametrize("percent", [50, 100])
def test_through_inductor(percent: int) -> None:
    model, x = layers()
    peak = fxremat.explain(model, x, options=OPTIONS).keep_all_peak_bytes
    budget = f"{peak * percent // 100}B"
    early = same_training(
        layers, lambda m: cast("Loss", compiled(m, "inductor", memory_budget=budget))
    )
    assert len(early) == 80


@pytest.mark.parametrize("speeds", [(3e6, 1e9), (1e9, 3e6), (1e7, 1e7)], ids=str)
@pytest.mark.parametrize("executor", ["aot_eager", "inductor"])
def test_whatever_the_copies_take(speeds: tuple[float, float], executor: str) -> None:
    """Weights are fetched twice, and wait for copies of gradients, and the other way."""
    model, x = layers()
    budget = f"{fxremat.explain(model, x, options=OPTIONS).keep_all_peak_bytes // 3}B"
    with runtime.set_copy_speed(*speeds):
        loss_of = lambda m: cast("Loss", compiled(m, executor, memory_budget=budget))  # noqa: E731
        assert len(same_training(layers, loss_of)) == 80
    assert {row.times for row in fxremat.reports()[-1].moved} == {1, 2}


class Slow(torch.optim.SGD):
    """Takes its time, and writes parameters in two parts."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.flatten()[::2].add_(parameter.grad.flatten()[::2], alpha=-0.1)
                time.sleep(0.003)
                parameter.flatten()[1::2].add_(parameter.grad.flatten()[1::2], alpha=-0.1)


def test_steps_that_are_slower_than_the_backward() -> None:
    assert same_training(layers, make_optimizer=lambda p: Slow(p, lr=0.1))


def test_large_parameters_and_two_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        same_training(lambda: layers(2, 517), make_optimizer=OPTIMIZERS["AdamW"])
    finally:
        torch.set_num_threads(threads)


def test_eager_models_and_parameters_that_are_not_on_the_host() -> None:
    assert same_training(layers, lambda m: m) == []
    early = same_training(layers, weights="layers.[01].weight")
    assert len(early) == 20


def test_tied_weights() -> None:
    def make() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return Tied(), torch.arange(64) % 32

    assert len(same_training(make)) == 30


def test_graph_breaks() -> None:
    """The first graph of the backward knows which weights are those of one graph alone."""
    early = same_training(lambda: seeded(lambda: Stack(broken=True), 4, 32))
    assert len(early) == 10 * 24


# --- whole gradients ---------------------------------------------------------------------


def squares(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum() * 1e-2


LOSSES: dict[str, Callable[[nn.Module, Loss, Tensor], Tensor]] = {
    "decay added after": lambda model, call, x: call(x) + squares(model),
    "decay added before": lambda model, call, x: squares(model) + call(x),
    "two calls": lambda model, call, x: call(x) + call(2 * x),
    "loss outside": lambda model, call, x: call(x).square(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_else_reads_the_weights_is_waited_for(name: str) -> None:
    def loss_of(model: nn.Module) -> Loss:
        call = compiled(model)
        return lambda x: LOSSES[name](model, call, x)

    assert same_training(layers, loss_of) == []


@pytest.mark.parametrize("swapped", [False, True])
def test_two_losses_of_one_backward(swapped: bool) -> None:
    results = []
    for early in (False, True):
        model, x = layers()
        call = compiled(moved(model))
        optimizer = None if early else adamw(list(model.parameters()))
        if early:
            fxremat.step_in_backward(model, adamw)
        for _ in range(3):
            losses = (squares(model), call(x)) if swapped else (call(x), squares(model))
            torch.autograd.backward(losses[::-1])
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        results.append([p.detach() for p in model.parameters()])
    assert equal(*results)


def test_gradients_that_are_asked_for_are_no_steps() -> None:
    model, x = layers()
    before = [p.detach().clone() for p in model.parameters()]
    call = compiled(moved(model))
    expected = torch.autograd.grad(call(x), list(model.parameters()))
    optimizer = fxremat.step_in_backward(model, adamw)
    with runtime.copy_trace() as records:
        found = torch.autograd.grad(call(x), list(model.parameters()))
        assert equal(list(found), list(expected))
        assert equal([p.detach() for p in model.parameters()], before)
        parameters = list(model.parameters())
        call(x).backward(inputs=parameters[:1])
    assert [one.nbytes for one in records if one.what == "step"] == [parameters[0].nbytes]
    changed = [not torch.equal(p, old) for p, old in zip(parameters, before, strict=True)]
    assert changed == [True] + 7 * [False]
    optimizer.remove()
    call(x).backward()
    assert all(p.grad is not None for p in parameters)


def test_a_gradient_that_is_there_already_is_added() -> None:
    model, x = layers()
    call = compiled(moved(model))
    call(x).backward()
    weight = model.get_parameter("layers.1.weight")
    gradient, before = cast("Tensor", weight.grad).clone(), weight.detach().clone()
    fxremat.step_in_backward(model, lambda p: torch.optim.SGD(p, lr=0.5))
    call(x).backward()
    assert torch.equal(weight, before - 0.5 * (2 * gradient))


def test_hooks_see_gradients() -> None:
    """A hook on one weight: its step waits. A hook in the graph that changes gradients: refused."""
    model, x = layers()
    call = compiled(moved(model))
    seen: list[Tensor] = []
    weight: Any = model.get_parameter("layers.2.weight")
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    fxremat.step_in_backward(model, adamw)
    with runtime.copy_trace() as records:
        call(x).backward()
    assert seen[0].abs().sum() > 0
    assert sum(one.what == "step" for one in records) == 7
    loss = call(x)
    node: Any = loss.grad_fn
    node.register_hook(lambda inputs, _: tuple(g if g is None else 2 * g for g in inputs))
    with pytest.raises(RuntimeError, match="a hook has changed a gradient"):
        loss.backward()


def test_a_second_backward_does_not_read_weights_that_have_changed() -> None:
    model, x = layers()
    fxremat.step_in_backward(moved(model), OPTIMIZERS["SGD"])
    loss = compiled(model)(x)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_that_share_memory() -> None:
    """Of two in the same memory one is fetched after the gradient of the other has arrived."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16, bias=False)
            self.last = nn.Linear(16, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(self.last(F.gelu(self.first(x)))).square().mean()

    def make() -> tuple[nn.Module, Tensor]:
        model, x = seeded(Shared, 4, 16)
        moved(model)
        model.last.weight.data = model.first.weight.data  # type: ignore[union-attr]
        return model, x

    plain, ours = make(), make()
    fxremat.step_in_backward(ours[0], lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer = torch.optim.SGD(plain[0].parameters(), lr=0.1)
    with runtime.copy_trace() as records:
        found = trained(ours, compiled, None)
    assert [one for one in records if one.what == "step"] == []
    torch.testing.assert_close(found, trained(plain, compiled, optimizer))


# --- parameters of all kinds -------------------------------------------------------------


class Mixed(nn.Module):
    """A sparse embedding, frozen weights, and weights that only some inputs need."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16, sparse=True)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.skip = False

    def forward(self, index: Tensor) -> Tensor:
        x = self.frozen(self.embedding(index))
        for layer in self.layers[: 2 if self.skip else 3]:
            x = x + torch.tanh(layer(x))
        return cast("Tensor", x.square().mean())


def test_sparse_frozen_and_unused_parameters() -> None:
    def make() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        return Mixed(), torch.arange(8)

    def loss_of(model: nn.Module) -> Loss:
        inner = cast("Any", model)
        whole = compiled(inner)

        def loss(index: Tensor) -> Tensor:
            inner.skip = not inner.skip
            return cast("Tensor", whole(index))

        return loss

    assert same_training(make, loss_of, lambda p: torch.optim.SGD(p, lr=0.1))


def test_a_frozen_parameter_that_thaws() -> None:
    model, x = layers()
    weight = model.get_parameter("layers.0.weight").requires_grad_(False)
    fxremat.step_in_backward(moved(model), adamw)
    before = weight.detach().clone()
    compiled(model)(x).backward()
    assert torch.equal(weight, before)
    weight.requires_grad_(True)
    torch._dynamo.reset()  # torch 2.11 does not see that a parameter thaws
    compiled(model)(x).backward()
    assert not torch.equal(weight, before)
    assert weight.grad is None


# --- errors ------------------------------------------------------------------------------


class Refused(Exception):
    pass


def test_an_error_in_a_step_comes_out_of_the_backward() -> None:
    model, x = layers()
    moved(model)
    bad = model.get_parameter("layers.2.weight")
    refusing = [True]

    class Careful(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if refusing[0] and self.param_groups[0]["params"][0] is bad:
                raise Refused("not this one")
            return super().step(closure)

    plain = copy.deepcopy(model)
    plain(x).backward()
    before = [p.detach().clone() for p in model.parameters()]
    fxremat.step_in_backward(model, lambda p: Careful(p, lr=0.5))
    call = compiled(model)
    with pytest.raises(Refused, match="not this one"):
        call(x).backward()
    others = zip(model.parameters(), before, plain.parameters(), strict=True)
    for parameter, old, reference in others:
        gradient = cast("Tensor", reference.grad)
        if parameter is bad:
            assert torch.equal(parameter, old)
            assert torch.equal(cast("Tensor", parameter.grad), gradient)
        else:
            stepped = torch.equal(parameter, old - 0.5 * gradient)
            assert stepped or torch.equal(parameter, old)
    refusing[0] = False
    model.zero_grad()
    call(x).backward()
    assert not torch.equal(bad, before[4])


def test_a_backward_that_fails_leaves_no_step_behind() -> None:
    """The step is still running when the backward has failed; the next forward waits for it."""
    model, x = layers()
    fxremat.step_in_backward(moved(model), lambda p: Slow(p, lr=0.1))
    call = compiled(model)
    call(x).backward()
    model.zero_grad()
    loss = call(x)
    held = runtime.host_bytes().now_bytes
    with runtime.set_copy_speed(1e6), runtime.set_host_memory_cap(held + 3 * 64 * 64 * 4):
        try:
            loss.backward()
        except fxremat.FxrematError:
            failed = True
        else:
            failed = False
    value = call(x)
    assert torch.equal(value, copy.deepcopy(model)(x))
    model.zero_grad()
    value.backward()
    assert failed
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1),
        lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(1))], lr=0.1),
    ],
)
def test_optimizers_of_other_parameters_are_refused(make: Make) -> None:
    with pytest.raises(fxremat.InvalidOption, match="make_optimizer"):
        fxremat.step_in_backward(layers()[0], make)
    with pytest.raises(fxremat.InvalidOption, match="without parameters"):
        fxremat.step_in_backward(nn.ReLU(), make)


# --- saving, and learning rates ----------------------------------------------------------


def decayed(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Weights decay, biases do not: neighbours of different options."""
    decay = 0.1 if parameters[0].dim() > 1 else 0.0
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=decay, fused=True)


@pytest.mark.parametrize("make", [adamw, decayed])
def test_saved_and_restored(make: Make) -> None:
    whole = layers()
    fxremat.step_in_backward(moved(whole[0]), make)
    expected = [*trained(whole, compiled, None, 3), *trained(whole, compiled, None, 3)]
    first = layers()
    optimizer = fxremat.step_in_backward(moved(first[0]), make)
    losses = trained(first, compiled, None, 3)
    file = io.BytesIO()
    torch.save({"model": first[0].state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    again = seeded(Layers, 8, 64)
    for parameter in again[0].parameters():
        nn.init.zeros_(parameter)
    again[0].load_state_dict(saved["model"])
    optimizer = fxremat.step_in_backward(moved(again[0]), make)
    optimizer.load_state_dict(saved["optimizer"])
    assert equal([*losses, *trained((again[0], whole[1]), compiled, None, 3)], expected)


def test_parameters_are_saved_without_their_steps() -> None:
    """As torch lets anyone load them; what is loaded can get steps of its own."""
    model, x = layers()
    fxremat.step_in_backward(model, adamw)
    file = io.BytesIO()
    torch.save(dict(model.named_parameters()), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    again, _ = layers()
    for name, parameter in loaded.items():
        owner, _, last = name.rpartition(".")
        setattr(again.get_submodule(owner), last, parameter)
    again(x).square().mean().backward()
    assert all(p.grad is not None for p in again.parameters())
    again.zero_grad()
    fxremat.step_in_backward(again, adamw)
    assert equal(
        trained((again, x), lambda m: m, None, 3), trained((model, x), lambda m: m, None, 3)
    )


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("is_removed", [False, True])
def test_a_model_is_freed_with_its_optimizer(on_host: bool, is_removed: bool) -> None:
    """Nobody has to keep the optimizer, and nothing but the model keeps its parameters."""
    made = layers()
    model, _ = made
    parameters = [weakref.ref(p) for p in model.parameters()]
    optimizer = fxremat.step_in_backward(moved(model) if on_host else model, adamw)
    steps = weakref.ref(optimizer.optimizers[0])
    if is_removed:
        optimizer.remove()
    del optimizer
    gc.collect()
    if not is_removed:
        trained(made, compiled, None, 3)
    assert (steps() is None) == is_removed
    del made, model
    torch._dynamo.reset()
    gc.collect()
    assert [p() for p in parameters] == [None] * 8
    assert steps() is None


def test_states_are_those_of_one_optimizer_for_all() -> None:
    """Two steps with one, two with the other, and back."""
    plain, x = layers()
    optimizer = adamw(list(plain.parameters()))
    expected = trained((plain, x), lambda m: m, optimizer, 3)
    model, _ = layers()
    ours = fxremat.step_in_backward(model, adamw)
    assert equal(trained((model, x), lambda m: m, None, 3), expected)
    one, other = ours.state_dict(), optimizer.state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    ours.load_state_dict(other)
    optimizer.load_state_dict(one)
    expected = trained((plain, x), lambda m: m, optimizer, 3)
    assert equal(trained((model, x), lambda m: m, None, 3), expected)
    with pytest.raises(ValueError, match="of 8 parameters, not of 2"):
        fxremat.step_in_backward(nn.Linear(2, 2), adamw).load_state_dict(other)


def test_learning_rate_schedulers() -> None:
    results = []
    for early in (False, True):
        model, x = layers()
        call = compiled(moved(model))
        optimizer: torch.optim.Optimizer = (
            fxremat.step_in_backward(model, adamw) if early else adamw(list(model.parameters()))
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        for _ in range(5):
            call(x).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        assert isinstance(optimizer, StepInBackward) == early
        assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] < 1e-2
        results.append([p.detach() for p in model.parameters()])
    assert equal(*results)


# --- beside the backward, and in less memory ---------------------------------------------


def test_steps_end_before_the_backward_does() -> None:
    model, x = layers(8, 128)
    fxremat.step_in_backward(moved(model), adamw)
    call = compiled(model)
    call(x).backward()
    loss = call(x)
    with runtime.set_copy_speed(5e6, RATE), runtime.copy_trace() as records:
        loss.backward()
    steps = [one for one in records if one.what == "step"]
    waits = [one for one in records if one.what == "wait_host"]
    assert len(steps) == len(waits) == 16
    beside = [one for one in steps if one.end_s < waits[-1].end_s]
    assert len(beside) >= 12


@pytest.mark.parametrize("executor", ["aot_eager", "inductor"])
@pytest.mark.parametrize("early", [False, True])
def test_gradients_are_never_on_the_host_together(executor: str, early: bool) -> None:
    """All at once if they step after it; else no more than the plan has on their way."""
    model, x = layers(12, 256)
    budget = fxremat.explain(model, x, options=OPTIONS).keep_all_peak_bytes // 4
    moved(model)
    gradients = sum(p.nbytes for p in model.parameters())
    if early:
        fxremat.step_in_backward(model, adamw)
    call = compiled(model, executor, memory_budget=f"{budget}B")
    with runtime.set_copy_speed(RATE, RATE):
        call(x).backward()
        model.zero_grad()
        loss = call(x)
        held = runtime.host_bytes().now_bytes
        runtime.reset_host_peak()
        loss.backward()
    found = runtime.host_bytes()
    assert (found.now_bytes == held) == early
    assert (found.peak_bytes - held < gradients / 2) == early


def test_a_step_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a wait only holds the stream: the thread has to wait for what it was asked to do."""
    done: list[str] = []

    class Stream:
        def record_event(self) -> Any:
            return type("Event", (), {"synchronize": lambda self: done.append("here")})()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    runtime.gradients.optimizer_steps._now_on(torch.device("cuda", 0))()
    assert done == ["here"]


def test_verification_notices_weights_that_are_read_too_late() -> None:
    graph = fx.Graph()
    gradient, weight = graph.placeholder("gradient"), graph.placeholder("weight")
    cpu = torch.device("cpu")
    graph.call_function(runtime.arrived, (gradient, weight, [], True, cpu))
    late = graph.call_function(runtime.to_device, (weight, cpu))
    graph.output((gradient, late))
    with pytest.raises(fxremat.VerificationFailed, match="uses weight after"):
        check_arrivals(graph)
    late.replace_all_uses_with(gradient)
    graph.erase_node(late)
    check_arrivals(graph)

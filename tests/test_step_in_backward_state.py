"""Optimizers that step inside of the backward: errors, saving, and learning rates."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks import copying
from fxremat.training.step_in_backward import StepInBackward
from tests import stepping
from tests.accumulating import Refused
from tests.host_weights import equal, moved
from tests.small import Layers, seeded
from tests.stepping import Make, Slow, adamw, compiled_model, eager, layers_and_input, trained

_fresh = stepping.fresh


def test_an_error_in_a_step_comes_out_of_the_backward() -> None:
    model, x = layers_and_input()
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
    call = compiled_model(model)
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
    model, x = layers_and_input()
    fxremat.step_in_backward(moved(model), lambda p: Slow(p, lr=0.1))
    call = compiled_model(model)
    call(x).backward()
    model.zero_grad()
    loss = call(x)
    held = copying.host_bytes().now_bytes
    with (
        copying.set_copy_speed(1e6),
        copying.set_host_memory_cap(held + 3 * 64 * 64 * 4),
        pytest.raises(fxremat.FxrematError),
    ):
        loss.backward()
    value = call(x)
    assert torch.equal(value, copy.deepcopy(model)(x))
    model.zero_grad()
    value.backward()
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
        fxremat.step_in_backward(layers_and_input()[0], make)
    with pytest.raises(fxremat.InvalidOption, match="without parameters"):
        fxremat.step_in_backward(nn.ReLU(), make)


def decayed(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Weights decay, biases do not: neighbours of different options."""
    decay = 0.1 if parameters[0].dim() > 1 else 0.0
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=decay, fused=True)


def three_steps(made: tuple[nn.Module, Tensor]) -> list[Tensor]:
    return trained(made, compiled_model, None, 3)


def reloaded(state: dict[str, Any]) -> dict[str, Any]:
    """As anyone may load it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [adamw, decayed])
def test_saved_and_restored(make: Make) -> None:
    whole = layers_and_input()
    fxremat.step_in_backward(moved(whole[0]), make)
    expected = [*three_steps(whole), *three_steps(whole)]
    first = layers_and_input()
    optimizer = fxremat.step_in_backward(moved(first[0]), make)
    losses = three_steps(first)
    saved = reloaded({"model": first[0].state_dict(), "optimizer": optimizer.state_dict()})
    again = seeded(Layers, 8, 64)
    for parameter in again[0].parameters():
        nn.init.zeros_(parameter)
    again[0].load_state_dict(saved["model"])
    optimizer = fxremat.step_in_backward(moved(again[0]), make)
    optimizer.load_state_dict(saved["optimizer"])
    assert equal([*losses, *three_steps((again[0], whole[1]))], expected)


def test_parameters_are_saved_without_their_steps() -> None:
    """As torch lets anyone load them; what is loaded can get steps of its own."""
    model, x = layers_and_input()
    fxremat.step_in_backward(model, adamw)
    loaded = reloaded(dict(model.named_parameters()))
    again, _ = layers_and_input()
    for name, parameter in loaded.items():
        owner, _, last = name.rpartition(".")
        setattr(again.get_submodule(owner), last, parameter)
    again(x).square().mean().backward()
    assert all(p.grad is not None for p in again.parameters())
    again.zero_grad()
    fxremat.step_in_backward(again, adamw)
    assert equal(trained((again, x), eager, None, 3), trained((model, x), eager, None, 3))


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("is_removed", [False, True])
def test_a_model_is_freed_with_its_optimizer(on_host: bool, is_removed: bool) -> None:
    """Nobody has to keep the optimizer, and nothing but the model keeps its parameters."""
    made = layers_and_input()
    model, _ = made
    parameters = [weakref.ref(p) for p in model.parameters()]
    optimizer = fxremat.step_in_backward(moved(model) if on_host else model, adamw)
    steps = weakref.ref(optimizer.optimizers[0])
    if is_removed:
        optimizer.remove()
    del optimizer
    gc.collect()
    if not is_removed:
        three_steps(made)
    assert (steps() is None) == is_removed
    del made, model
    torch._dynamo.reset()
    gc.collect()
    assert [p() for p in parameters] == [None] * 8
    assert steps() is None


def test_states_are_those_of_one_optimizer_for_all() -> None:
    """Two steps with one, two with the other, and back."""
    plain, x = layers_and_input()
    optimizer = adamw(list(plain.parameters()))
    expected = trained((plain, x), eager, optimizer, 3)
    model, _ = layers_and_input()
    ours = fxremat.step_in_backward(model, adamw)
    assert equal(trained((model, x), eager, None, 3), expected)
    one, other = ours.state_dict(), optimizer.state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    ours.load_state_dict(other)
    optimizer.load_state_dict(one)
    expected = trained((plain, x), eager, optimizer, 3)
    assert equal(trained((model, x), eager, None, 3), expected)
    with pytest.raises(ValueError, match="of 8 parameters, not of 2"):
        fxremat.step_in_backward(nn.Linear(2, 2), adamw).load_state_dict(other)


def test_learning_rate_schedulers() -> None:
    results = []
    for early in (False, True):
        model, x = layers_and_input()
        call = compiled_model(moved(model))
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

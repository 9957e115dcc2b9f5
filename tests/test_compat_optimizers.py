"""The optimizers that live, and their steps on tensors without memory."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import optimizer as base

from fxremat.compat.optimizers import (
    live_optimizers,
    note_optimizers,
    steps_as_with,
    wrapped_by,
)
from fxremat.compat.tensors import without_memory


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(4))


@pytest.fixture(autouse=True)
def noted() -> None:
    note_optimizers()


def test_the_newest_comes_first_and_nothing_is_kept_alive() -> None:
    first, second = optim.SGD([weight()]), optim.AdamW([weight()])
    assert live_optimizers()[:2] == [second, first]
    copied = copy.deepcopy(first)
    assert live_optimizers()[0] is copied
    first.load_state_dict(copied.state_dict())
    assert live_optimizers().count(copied) == 1
    del copied, second
    assert live_optimizers()[0] is first


def test_private_names_are_as_they_were_when_this_was_written() -> None:
    assert hasattr(base.Optimizer, "_patch_step_function")
    assert base._foreach_supported_types[:2] == [torch.Tensor, nn.Parameter]
    made = base.Optimizer._patch_step_function
    note_optimizers()
    assert base.Optimizer._patch_step_function is made
    assert optim.SGD.step.hooked  # type: ignore[attr-defined]


EARLIER = """
import torch
early = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
from fxremat.compat.optimizers import live_optimizers, note_optimizers
assert live_optimizers() == [early]
note_optimizers()
late = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
assert live_optimizers() == [late, early]
"""


def test_one_that_was_made_before_is_found() -> None:
    subprocess.run([sys.executable, "-c", EARLIER], check=True)


class Wrapper(optim.Optimizer):
    """As those of trainers: it has an optimizer, and shows its groups."""

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__([{"params": group["params"]} for group in inner.param_groups], {})
        self.inner = inner


def test_of_a_wrapper_what_it_wraps_is_found() -> None:
    inner = optim.SGD([weight()])
    wrapper = Wrapper(inner)
    assert wrapped_by(wrapper) == [inner]
    assert live_optimizers()[0] is inner
    several: Any = Wrapper(inner)
    several.inner, several.all = None, [inner, {"an": "option"}]
    assert wrapped_by(several) == [inner]
    several.all = {"one": inner}
    assert wrapped_by(several) == [inner]
    del wrapper, several
    gc.collect()


def test_inside_a_step_is_one_of_many_tensors_as_with_real_ones() -> None:
    """By default on CUDA, where the step of these is taken to be."""
    seen: list[str] = []
    before = list(base._foreach_supported_types)

    def see(func: Any, *_: Any) -> None:
        seen.append(str(func))

    def step(kind: type[Any]) -> None:
        with without_memory(), steps_as_with([kind], see):
            made = torch.ones(4, device="cuda")
            made.grad = torch.ones(4, device="cuda")
            optim.SGD([made], lr=0.1).step()

    step(nn.Parameter)
    assert any("_foreach_add_" in name for name in seen)
    seen.clear()
    step(Wrapper)
    assert not any("_foreach" in name for name in seen)
    assert base._foreach_supported_types == before


def test_hooks_for_all_optimizers_are_not_told_of_steps_without_memory() -> None:
    weight, told = nn.Parameter(torch.ones(4)), list[Any]()
    weight.grad = torch.ones(4)
    handle = base.register_optimizer_step_post_hook(lambda one, *_: told.append(one))
    optimizer = optim.SGD([weight], lr=0.1)
    try:
        with without_memory(), steps_as_with([nn.Parameter], lambda *_: None):
            made = torch.ones(4)
            made.grad = torch.ones(4)
            optim.SGD([made], lr=0.1).step()
        assert not told
        optimizer.step()
        assert told == [optimizer]
    finally:
        handle.remove()


def test_inside_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    with steps_as_with([], lambda *_: None):
        assert not torch.compiler.is_compiling()
    assert torch.compiler.is_compiling()


def test_inside_a_value_that_nobody_knows_is_one() -> None:
    with without_memory() as made, steps_as_with([], lambda *_: None):
        one = made(torch.zeros(3))
        assert one.sum().item() == 1.0
        assert bool(one.isnan().any())
        assert int(made(torch.zeros(3, dtype=torch.int64)).sum()) == 1
        with pytest.raises(Exception, match="nonzero"):
            one.nonzero()

"""The examples of docs/trainers, in each framework's own loop: the budget is obeyed, losses stay.

`make test-integrations` installs the frameworks and runs this.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import fxremat
from fxremat.compat.measuring import profiler_memory_events
from fxremat.memory.measured_peak import _running_peak, held_bytes

FIRST = 3
"""Of the steps that are measured: before it everything is compiled, and states are there."""
PART = 0.6


class Watch:
    """Measures the peak of a loop from its fourth step on, whatever runs in it."""

    def __init__(self) -> None:
        self._profile: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._is_on = False
        self._held = 0

    def __call__(self, step: int, held: Any) -> None:
        if step == FIRST:
            self._held = held_bytes(held)
            self._profile.__enter__()
            self._is_on = True

    def peak_bytes(self) -> int:
        """Of all steps since."""
        assert self._is_on
        self._profile.__exit__(None, None, None)
        return self._held + _running_peak(profiler_memory_events(self._profile))


def loop(train: Any, backend: str, options: dict[str, Any]) -> tuple[list[float], int]:
    watch = Watch()
    losses = train(backend, options, watch)
    return losses, watch.peak_bytes()


def predicted_bytes() -> int:
    """Of the graphs that were compiled last, with what is reserved."""
    return max(report.predicted_peak_bytes for report in fxremat.reports())


EXAMPLE = {
    "hf_trainer": ("hf_trainer", {}),
    "accelerate": ("accelerate_loop", {}),
    "lora": ("peft_lora", {}),
    "nf4": ("torchao_nf4", {}),
    "lightning": ("lightning_trainer", {}),
    "fabric": ("lightning_fabric", {}),
    "unet": ("diffusers_unet", {}),
    "dit": ("diffusers_dit", {}),
    "timm": ("timm_vit", {}),
    "sft": ("trl_trainers", {"kind": "sft"}),
    "dpo": ("trl_trainers", {"kind": "dpo"}),
    "grpo": ("trl_trainers", {"kind": "grpo"}),
}
SMALLER = {"dpo": 1 / 3, "grpo": 1 / 3}
"""Parts of plain's peak for heads of 50,000 words."""


@pytest.mark.parametrize("name", EXAMPLE)
def test_a_loop_within_its_part_of_the_peak_has_the_losses_of_plain_compile(name: str) -> None:
    if name == "timm":
        pytest.importorskip("timm", reason="it needs a torchvision for this torch")
    module, arguments = EXAMPLE[name]
    train = partial(importlib.import_module(module).train, **arguments)
    expected, plain = loop(train, "inductor", {})
    torch._dynamo.reset()
    budget = int(SMALLER.get(name, PART) * plain)
    losses, peak = loop(train, "fxremat", {"memory_budget": budget})
    promised = predicted_bytes()
    print(f"{name}: plain {plain:,} budget {budget:,} measured {peak:,} promised {promised:,}")
    assert len(losses) == 10
    assert peak <= budget
    assert peak <= 1.01 * promised
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)

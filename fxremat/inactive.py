"""Warns where a memory budget was asked for and a model is trained outside of it.

Dynamo gives up on some functions and runs them as they are (`nn.LSTM`, a graph break in a loop),
and others it never sees. The backend is not called then, so the warning comes when an optimizer
has stepped, when reports are read, and when the process ends.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fxremat.compat.dynamo import GivenUp, frames_given_up, modules_compiled_by, options_given_to
from fxremat.options import BUDGET_VARIABLE, disabled

log = logging.getLogger(__name__)

STEPS_LOOKED_AT = 2
"""Of optimizers, before any training graph was seen: to look takes a while among many objects."""
REASONS_SHOWN = 3


@dataclass
class Watch:
    """What a process has compiled for a budget, and what it was told."""

    backend: Callable[..., Any]
    training_graphs: int = 0
    """Compiled under a budget; those that cannot be planned were warned of."""
    steps: int = 0
    told: set[GivenUp] = field(default_factory=set)
    told_of_none: bool = False

    def look(self, *, modules: bool = True) -> None:
        """Warn of what is new; ``modules``: also where Dynamo was not asked for anything."""
        given_up = [each for each in frames_given_up() if each not in self.told]
        missing = modules and not self.training_graphs and not self.told_of_none
        if not (given_up or missing) or disabled():
            return
        self.told.update(given_up)  # whether it concerns a budget is asked once: that takes a while
        if given_up and self._asked():
            log.warning(_of_given_up(given_up, self.training_graphs))
            self.told_of_none |= not self.training_graphs
        elif missing and self._has_trained():
            self.told_of_none = True
            log.warning(NOTHING_SEEN)

    def _asked(self) -> bool:
        """Whether something is compiled under a budget, or would be."""
        given = () if self.training_graphs else options_given_to(self.backend)
        return bool(self.training_graphs) or any(map(_has_budget, given))

    def _has_trained(self) -> bool:
        """Whether a module that would be compiled under a budget has gradients."""
        found = [one for one, given in modules_compiled_by(self.backend) if _has_budget(given)]
        return any(p.grad is not None for module in found for p in module.parameters())


def _has_budget(options: Mapping[str, Any]) -> bool:
    everywhere = os.environ.get(BUDGET_VARIABLE, "").strip()
    return bool(options.get("memory_budget", everywhere))


NOTHING_SEEN = (
    "fxremat: a memory budget was asked for, and a compiled module has gradients, but no training "
    "graph was seen: the budget has no effect so far. Dynamo was not asked to compile it: "
    "torch.utils.checkpoint, for one, runs a module that was compiled by module.compile() as it "
    "is. Compile what is trained as a whole by torch.compile(model, ...), without "
    "torch.utils.checkpoint around it."
)


WHAT_TO_DO = {
    "RNN": "set torch._dynamo.config.allow_rnn = True",
    "logging": "add the function that logs to torch._dynamo.config.ignore_logging_functions "
    "(fxremat.integrations.transformers.keep_whole() does so for Hugging Face's models)",
    "Data-dependent branching": "for models of Hugging Face whose layerdrop is 0, call "
    "fxremat.integrations.transformers.keep_whole(model)",
}
"""By a word of Dynamo's reason."""


def _of_given_up(frames: list[GivenUp], training_graphs: int) -> str:
    effect = "but some code is outside of it" if training_graphs else "which has no effect so far"
    told = [
        f"fxremat: a memory budget was asked for, {effect}: Dynamo gave up on these functions and "
        "runs them uncompiled; what they call may still be compiled.",
        *(f"  {each.where}: {each.reason}" for each in frames[:REASONS_SHOWN]),
    ]
    if len(frames) > REASONS_SHOWN:
        told.append(f"  and {len(frames) - REASONS_SHOWN} more")
    reasons = " ".join(each.reason for each in frames)
    advice = "TORCH_LOGS=graph_breaks shows the whole reason; fullgraph=True makes it an error."
    for word, what in WHAT_TO_DO.items():
        advice = f"{what} before the model first runs. {advice}" if word in reasons else advice
    return "\n".join([*told, "What to do: " + advice])


_WATCHES: list[Watch] = []


def watch(backend: Callable[..., Any]) -> None:
    """Look from now on, in this process, at what this backend is to compile."""
    _WATCHES.append(Watch(backend))
    register_optimizer_step_post_hook(_after_step)
    atexit.register(look)


def _after_step(*_: object) -> None:
    """An optimizer has stepped, and what it stepped with is still there.

    Dynamo traces this where a step is compiled, and sees nothing.
    """
    if not torch.compiler.is_compiling():
        newest = _WATCHES[-1]
        newest.steps += 1
        newest.look(modules=newest.steps <= STEPS_LOOKED_AT)


def look() -> None:
    """Warn now of what is new."""
    for each in _WATCHES:
        each.look()


def training_graph_seen() -> None:
    """A training graph is compiled under a budget, or it was said why its budget has no effect."""
    for each in _WATCHES:
        each.training_graphs += 1


def reset() -> None:
    """Everything is compiled anew."""
    for each in _WATCHES:
        each.told.update(frames_given_up())
        each.training_graphs, each.steps, each.told_of_none = 0, 0, False

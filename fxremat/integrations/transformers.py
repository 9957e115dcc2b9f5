"""Hugging Face's `Trainer`, and what derives from it, TRL's trainers among them.

    trainer = Trainer(model, args, train_dataset=data)
    fxremat.integrations.transformers.train_within(trainer, memory_budget="8GiB")
    trainer.train()

`TrainingArguments(torch_compile_backend=...)` takes a closed list of names. So the model is
compiled in place when training begins: by then the trainer has put it on its device, wrapped it,
and made its optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback
from transformers.utils import logging as transformers_logging

from fxremat.compat.dynamo import compile_in_training
from fxremat.compile.driver import total_bytes
from fxremat.logged_metrics import metrics
from fxremat.memory.allocator_settings import MIN_BLOCK_BYTES
from fxremat.memory.measured_peak import held_bytes
from fxremat.options import parse_options
from fxremat.training.accumulate import accumulate_in_backward
from fxremat.training.loss_only import loss_only
from fxremat.training.whole_graphs import keep_graphs_whole

log = logging.getLogger(__name__)

TRAINER_BYTES = 128 * MIN_BLOCK_BYTES
"""A trainer's own numbers on the device, losses and norms of gradients, have a block each."""


def train_within(
    trainer: Trainer,
    memory_budget: int | str | None = None,
    *,
    options: Mapping[str, Any] | None = None,
) -> Trainer:
    """Let ``trainer.train()`` train within ``memory_budget`` bytes; gives the trainer back.

    When training begins, the model is compiled in place with these ``options`` (of
    `torch.compile`; ``memory_budget`` is a shorthand, and both may come from the environment). What
    is evaluated or generated meanwhile runs uncompiled.

    * Where the trainer takes the loss that the model gives, the model returns nothing else in
      training (`fxremat.loss_only`). Evaluation gets its logits.
    * Unless the option ``optimizer`` is given, it is the trainer's. A batch that the loader has
      ready adds to ``reserve``.
    * Gradient checkpointing is switched off, and a log line says so: fxremat chooses instead.
    * Graphs do not end where models log something, or ask whether to leave a layer out
      (`keep_whole`).
    * With ``gradient_accumulation_steps`` gradients are added in the backward
      (`fxremat.accumulate_in_backward`).
    * What was planned is among the figures that the trainer logs.

    Heads that TRL gives to models are traced as plain ops (`fxremat.integrations.trl`).

    Parts of the model that are compiled already stay as they are.
    """
    given = dict(options or {})
    if memory_budget is not None:
        given["memory_budget"] = memory_budget
    if any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__):
        from fxremat.integrations.trl import use_plain_heads

        use_plain_heads()
    callbacks = trainer.callback_handler.callbacks
    callbacks.insert(0, _TrainWithin(trainer, given))  # before those that write figures
    return trainer


def keep_whole(*models: nn.Module) -> None:
    """Let graphs go on where models of transformers log something once, or ask for a layer's luck.

    From now on and in compiled code these messages are not logged. ``models`` whose LayerDrop is 0
    no longer compare it with a number that they have drawn. For models that are compiled without
    `train_within`; to be called before they first run.
    """
    keep_graphs_whole(models, transformers_logging)


@dataclass(eq=False)
class _TrainWithin(TrainerCallback):  # type: ignore[misc]
    """Compiles when training begins, and adds figures to the logs."""

    trainer: Trainer
    options: dict[str, Any]
    is_compiled: bool = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compile the model, once."""
        if self.is_compiled:
            return
        self.is_compiled = True
        model: nn.Module = kwargs["model"]
        keep_whole(model)
        _switch_off_checkpointing(model)
        if _takes_loss_of_model(self.trainer):
            loss_only(model)
        if args.gradient_accumulation_steps > 1:
            accumulate_in_backward(model)
        parsed = parse_options(self.options, device_total_bytes=total_bytes(args.device))
        own = kwargs["optimizer"] if isinstance(kwargs["optimizer"], Optimizer) else None
        options = {**self.options, "optimizer": parsed.optimizer or own}

        def how(inputs: Any) -> dict[str, Any]:
            """The loader may have the next batch ready, of the size of this one."""
            batch = held_bytes(inputs, device=args.device)
            reserve = (parsed.reserve or 0) + batch + TRAINER_BYTES
            return {"backend": "fxremat", "options": {**options, "reserve": reserve}}

        compile_in_training(model, how)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Add what was planned, and on CUDA what was taken."""
        if logs is not None and "loss" in logs:
            found = metrics()
            logs.update(found)
            state.log_history[-1].update(found)


def _switch_off_checkpointing(model: nn.Module) -> None:
    """Of each model of transformers inside of wrappers."""
    on: list[Any] = [x for x in model.modules() if getattr(x, "is_gradient_checkpointing", False)]
    for one in on:
        if one.is_gradient_checkpointing:  # not as a part of one before
            one.gradient_checkpointing_disable()
    if on:
        log.warning(
            "fxremat: gradient checkpointing is switched off: what is computed again follows from "
            "the budget, and is only as much as it needs"
        )


def _takes_loss_of_model(trainer: Trainer) -> bool:
    """Whether nothing but the loss of the model's outputs is read in training."""
    own = type(trainer).compute_loss is Trainer.compute_loss
    return own and trainer.compute_loss_func is None and trainer.label_smoother is None

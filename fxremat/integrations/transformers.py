"""Hugging Face's `Trainer`, and what derives from it, TRL's trainers among them.

    trainer = Trainer(model, args, train_dataset=data)
    fxremat.integrations.transformers.train_within(trainer, memory_budget="8GiB")
    trainer.train()

`TrainingArguments(torch_compile_backend=...)` takes a closed list of names. So the model is
compiled in place when training begins: by then the trainer has put it on its device, wrapped it,
and made its optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from fxremat.compat.dynamo import compile_in_training
from fxremat.compile.request import unseen_bytes
from fxremat.cost.cuda_scratch import allocate_cublas
from fxremat.logged_metrics import metrics
from fxremat.memory.allocator.rules import MIN_BLOCK_BYTES
from fxremat.memory.measured_peak import held_bytes
from fxremat.memory.optimizer_states import optimizer_state_bytes
from fxremat.training.accumulate import accumulate_in_backward
from fxremat.training.loss_only import loss_only

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
    * Unless ``reserve`` is given, it is what the optimizer will hold, a batch that the loader has
      ready, and on CUDA what is there already beside the model.
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


class _TrainWithin(TrainerCallback):  # type: ignore[misc]
    """Compiles when training begins, and adds figures to the logs."""

    def __init__(self, trainer: Trainer, options: dict[str, Any]) -> None:
        self._trainer = trainer
        self._options = options
        self._is_compiled = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compile the model, once."""
        if self._is_compiled:
            return
        self._is_compiled = True
        model: nn.Module = kwargs["model"]
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        if _takes_loss_of_model(self._trainer):
            loss_only(model)
        if args.gradient_accumulation_steps > 1:
            accumulate_in_backward(model)
        is_told = "reserve" in self._options or "FXREMAT_RESERVE" in os.environ
        beside = None if is_told else _beside(model, optimizer, args.device)

        def how(inputs: Any) -> dict[str, Any]:
            """The loader may have the next batch ready, of the size of this one."""
            options = dict(self._options)
            if beside is not None:
                batch = held_bytes(inputs, device=args.device)
                options["reserve"] = beside + batch + TRAINER_BYTES
            return {"backend": "fxremat", "options": options}

        compile_in_training(model, how)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Add what was planned, and on CUDA what was taken."""
        if logs is not None and "loss" in logs:
            found = metrics()
            logs.update(found)
            state.log_history[-1].update(found)


def _takes_loss_of_model(trainer: Trainer) -> bool:
    """Whether nothing but the loss of the model's outputs is read in training."""
    own = type(trainer).compute_loss is Trainer.compute_loss
    return own and trainer.compute_loss_func is None and trainer.label_smoother is None


def _beside(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """What lies beside the model when it is trained: states to come, and on CUDA what is there."""
    coming = optimizer_state_bytes(optimizer)
    if device.type != "cuda":
        return coming
    allocate_cublas(device)  # it would come later
    held = unseen_bytes([*model.parameters(), *model.buffers()], device)
    there = held_bytes(*optimizer.state.values(), device=device)
    return held + max(0, coming - there)

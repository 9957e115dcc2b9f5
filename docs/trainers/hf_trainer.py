"""Hugging Face's Trainer within a budget: `train_within`.

python docs/trainers/hf_trainer.py 100MiB
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

from tiny import Watch, language_model, run, texts, unwatched
from transformers import Trainer, TrainerCallback, TrainingArguments

from fxremat.integrations.transformers import train_within


class Watching(TrainerCallback):
    """Tells of each step."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch(state.global_step, [kwargs["model"], kwargs["optimizer"].optimizer])


def losses_of(trainer: Trainer) -> list[float]:
    """Of all steps that were logged."""
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def train(
    backend: str, options: Mapping[str, Any], watch: Watch = unwatched, **more: Any
) -> list[float]:
    """Ten steps on a small Llama; the loss of each."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            max_steps=10,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            **more,
        )
        model = language_model()
        trainer = Trainer(model, arguments, train_dataset=texts(80), callbacks=[Watching(watch)])
        if backend == "fxremat":
            train_within(trainer, options=options)
        else:
            model.compile(backend=backend)
        trainer.train()
        return losses_of(trainer)


if __name__ == "__main__":
    run(train)

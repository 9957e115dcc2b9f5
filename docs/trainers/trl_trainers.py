"""TRL's trainers within a budget: SFT, DPO and GRPO derive from Hugging Face's, and so
`train_within` is all that they need.

    python docs/trainers/trl_trainers.py 100MiB
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from hf_trainer import Watching, losses_of
from tiny import TOKENS, Watch, language_model, run, tokenizer, unwatched
from transformers import Trainer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from fxremat.compat.dynamo import compile_in_training
from fxremat.integrations.transformers import train_within

MANY_WORDS = 50_000


def _words(count: int, made: torch.Generator) -> str:
    numbers = torch.randint(3, MANY_WORDS, (count,), generator=made).tolist()
    return " ".join(map(str, numbers))


def _arguments(folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": 10,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "learning_rate": 1e-4,
    }


def sft(folder: str, **more: Any) -> Trainer:
    """Texts of 256 words."""
    made = torch.Generator().manual_seed(1)
    data = Dataset.from_list([{"text": _words(TOKENS - 1, made)} for _ in range(40)])
    config = SFTConfig(per_device_train_batch_size=4, max_length=TOKENS, **_arguments(folder))
    model = language_model(words=MANY_WORDS, width=64)
    return SFTTrainer(
        model, config, train_dataset=data, processing_class=tokenizer(MANY_WORDS), **more
    )


def dpo(folder: str, **more: Any) -> Trainer:
    """Pairs of answers of 96 words to questions of 32."""
    made = torch.Generator().manual_seed(1)
    rows = [
        {
            name: _words(count, made)
            for name, count in (("prompt", 32), ("chosen", 96), ("rejected", 96))
        }
        for _ in range(40)
    ]
    config = DPOConfig(
        per_device_train_batch_size=4,
        max_length=TOKENS // 2,
        precompute_ref_log_probs=True,  # the other model would run between forward and backward
        **_arguments(folder),
    )
    model = language_model(words=MANY_WORDS, width=64)
    return DPOTrainer(
        model,
        ref_model=language_model(words=MANY_WORDS, width=64),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(MANY_WORDS),
        **more,
    )


def _even(completions: list[str], **_: Any) -> list[float]:
    """The part of even numbers."""
    parts = [
        [int(word) % 2 == 0 for word in text.split() if word.isdigit()] for text in completions
    ]
    return [sum(part) / max(1, len(part)) for part in parts]


def grpo(folder: str, **more: Any) -> Trainer:
    """Four answers of 64 words to questions of 32."""
    made = torch.Generator().manual_seed(1)
    data = Dataset.from_list([{"prompt": _words(32, made)} for _ in range(40)])
    config = GRPOConfig(
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=64,
        **_arguments(folder),
    )
    model = language_model(words=MANY_WORDS, width=64)
    return GRPOTrainer(
        model,
        reward_funcs=_even,
        args=config,
        train_dataset=data,
        processing_class=tokenizer(MANY_WORDS),
        **more,
    )


KINDS = {"sft": sft, "dpo": dpo, "grpo": grpo}


def train(
    backend: str, options: Mapping[str, Any], watch: Watch = unwatched, kind: str = "sft"
) -> list[float]:
    """Ten steps on a small Llama with a head of 50,000 words; the loss of each."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = KINDS[kind](folder, callbacks=[Watching(watch)])
        if backend == "fxremat":
            train_within(trainer, options=options)
        else:
            compile_in_training(trainer.model, lambda _: {"backend": backend})
        trainer.train()
        return losses_of(trainer)


if __name__ == "__main__":
    for each in KINDS:
        run(partial(train, kind=each))

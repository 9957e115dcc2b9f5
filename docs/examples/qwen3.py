"""A Qwen3 with Hugging Face's Trainer, within a budget of bytes.

    python docs/examples/qwen3.py --budget 30MiB
    python docs/examples/qwen3.py --model Qwen/Qwen3-8B --length 2048 --batch 4 --device cuda \
        --budget 130GiB

Without ``--model`` the weights are random, and the model is small.
"""

from __future__ import annotations

import tempfile

import torch
from loop import arguments
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Trainer
from transformers import TrainingArguments as Arguments

import fxremat
from fxremat.integrations.transformers import train_within


def small() -> PreTrainedModel:
    """A Qwen3 of four narrow layers."""
    config = Qwen3Config(
        vocab_size=1024, hidden_size=128, intermediate_size=352, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, use_cache=False,
    )  # fmt: skip
    found: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return found


def main(length: int = 128, batch: int = 4, steps: int = 5, budget: str | None = None,
         device: str = "cpu", model: str | None = None) -> list[float]:  # fmt: skip
    """The loss of each step."""
    torch.manual_seed(0)
    network = small() if model is None else AutoModelForCausalLM.from_pretrained(model)
    words = network.config.vocab_size
    rows = torch.randint(0, words, (steps * batch, length))
    texts = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        asked = Arguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=batch, logging_steps=1,
            save_strategy="no", report_to=[], use_cpu=device == "cpu", bf16=device != "cpu",
        )  # fmt: skip
        trainer = Trainer(network, asked, train_dataset=texts)
        if budget is None:
            network.compile()
        else:
            train_within(trainer, budget)
        trainer.train()
    for report in fxremat.reports():
        print(report.summary())
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    given = arguments(__doc__ or "", "model", length=128, batch=4)
    print(*main(**vars(given)))

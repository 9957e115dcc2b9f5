"""LoRA on weights in four bits, as QLoRA does it, with torchao: a copy of a weight in full lives
for one product, and is planned like any other value.

    python docs/trainers/torchao_nf4.py 50MiB
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peft_lora import train as train_lora
from tiny import Watch, run, unwatched
from torch import nn
from torchao.quantization import to_nf4


def quantise(model: nn.Module) -> None:
    """Put the weights of all products but the last one into four bits."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight = nn.Parameter(to_nf4(module.weight.detach()), requires_grad=False)


def train(backend: str, options: Mapping[str, Any], watch: Watch = unwatched) -> list[float]:
    """Ten steps on a small Llama; the loss of each."""
    return train_lora(backend, options, watch, change=quantise)


if __name__ == "__main__":
    run(train)

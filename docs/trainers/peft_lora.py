"""PEFT's LoRA: the frozen model and its adapters are compiled together.

python docs/trainers/peft_lora.py 60MiB
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tiny import LOOP_BYTES, Watch, language_model, run, texts, unwatched
from torch import nn
from torch.utils.data import DataLoader

import fxremat


def train(
    backend: str,
    options: Mapping[str, Any],
    watch: Watch = unwatched,
    change: Callable[[nn.Module], None] = lambda model: None,
) -> list[float]:
    """Ten steps on a small Llama, ``change`` made to it before; the loss of each."""
    base = language_model()
    change(base)
    names = ["q_proj", "v_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=8, target_modules=names, task_type="CAUSAL_LM"))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    if backend == "fxremat":
        fxremat.loss_only(model)
        options = {"reserve": LOOP_BYTES, **options}
    model.compile(backend=backend, options=dict(options))
    losses = []
    for step, batch in enumerate(DataLoader(texts(40), batch_size=4)):  # type: ignore[arg-type]
        watch(step, [model, optimizer])
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    run(train)

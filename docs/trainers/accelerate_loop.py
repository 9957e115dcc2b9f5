"""A loop with accelerate: compile in place, then `prepare`.

python docs/trainers/accelerate_loop.py 100MiB
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from tiny import LOOP_BYTES, Watch, language_model, run, texts, unwatched
from torch.utils.data import DataLoader

import fxremat


def train(backend: str, options: Mapping[str, Any], watch: Watch = unwatched) -> list[float]:
    """Ten steps on a small Llama; the loss of each."""
    accelerator = Accelerator(cpu=True)
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if backend == "fxremat":
        fxremat.loss_only(model)
        options = {"reserve": LOOP_BYTES, **options}
    model.compile(backend=backend, options=dict(options))
    loader = DataLoader(texts(40), batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for step, batch in enumerate(loader):
        watch(step, [model, optimizer.optimizer])
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    run(train)

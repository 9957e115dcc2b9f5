"""Lightning's Fabric: compile, then `setup`.

python docs/trainers/lightning_fabric.py 100MiB
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning
import torch
from tiny import LOOP_BYTES, Watch, language_model, run, texts, unwatched
from torch.utils.data import DataLoader

import fxremat


def train(backend: str, options: Mapping[str, Any], watch: Watch = unwatched) -> list[float]:
    """Ten steps on a small Llama; the loss of each."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model = language_model()
    own = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if backend == "fxremat":
        fxremat.loss_only(model)
        options = {"reserve": LOOP_BYTES, **options}
    compiled: Any = torch.compile(model, backend=backend, options=dict(options))
    ready, optimizer = fabric.setup(compiled, own)
    loader: Any = fabric.setup_dataloaders(DataLoader(texts(40), batch_size=4))  # type: ignore[arg-type]
    losses = []
    for step, batch in enumerate(loader):
        watch(step, [model, own])
        loss = ready(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    run(train)

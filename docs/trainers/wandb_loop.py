"""A training loop whose charts in W&B show the planned figures beside the loss.

WANDB_MODE=offline python docs/trainers/wandb_loop.py 100MiB
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import wandb
from tiny import LOOP_BYTES, Watch, language_model, run, texts, unwatched
from torch.utils.data import DataLoader

import fxremat


def train(backend: str, options: Mapping[str, Any], watch: Watch = unwatched) -> list[float]:
    """Ten steps on a small Llama; the loss of each."""
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if backend == "fxremat":
        fxremat.loss_only(model)
        options = {"reserve": LOOP_BYTES, **options}
    model.compile(backend=backend, options=dict(options))
    loader = DataLoader(texts(40), batch_size=4)  # type: ignore[arg-type]
    losses = []
    with wandb.init(project="fxremat", config=dict(options)) as charts:
        for step, batch in enumerate(loader):
            watch(step, [model, optimizer])
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            charts.log({"loss": losses[-1], **fxremat.metrics()}, step=step)
    return losses


if __name__ == "__main__":
    run(train)

"""Lightning's Trainer: the compiled module goes to `fit`, its `training_step` is one graph.

python docs/trainers/lightning_trainer.py 100MiB
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import lightning
import torch
from tiny import LOOP_BYTES, Watch, language_model, run, texts, unwatched
from torch.utils.data import DataLoader


class Language(lightning.LightningModule):
    """A small Llama; the losses of its steps."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.model = language_model()
        self.losses: list[float] = []
        self.watch = watch

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.watch(batch_idx, [self.model, self.optimizers(use_pl_optimizer=False)])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.zero_grad()  # Lightning would keep the gradients until the next forward has run


def train(backend: str, options: Mapping[str, Any], watch: Watch = unwatched) -> list[float]:
    """Ten steps; the loss of each."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    module = Language(watch)
    if backend == "fxremat":
        options = {"reserve": LOOP_BYTES, **options}
    compiled: Any = torch.compile(module, backend=backend, options=dict(options))
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(compiled, DataLoader(texts(40), batch_size=4))  # type: ignore[arg-type]
    return module.losses


if __name__ == "__main__":
    run(train)

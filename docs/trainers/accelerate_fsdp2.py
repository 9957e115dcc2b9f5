"""accelerate with FSDP2: blocks are wrapped by a policy, and each is a graph of its own.

torchrun --nproc-per-node 2 docs/trainers/accelerate_fsdp2.py 50MiB
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from accelerate.utils.other import compile_regions_fsdp2
from tiny import LOOP_BYTES, TOKENS, Watch, language_model, run, texts, unwatched
from torch import nn

import fxremat

WORDS, WIDTH = 1024, 64
LOSS_BYTES = 3 * 4 * TOKENS * WORDS * 4
"""What an uncompiled loss makes of 4 texts: log-softmax, its gradient, and that of the logits."""


def sharding_accelerator() -> Accelerator:
    """accelerate has FSDP2 for accelerators alone: on the CPU it is told."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    if torch.cuda.is_available():
        return Accelerator(fsdp_plugin=plugin)
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def compile_model(model: nn.Module, way: str, **how: Any) -> None:
    """In place, before the model is sharded: as a whole, or its regions one by one."""
    if way == "regions":
        compile_regions_fsdp2(model, **how)
    else:
        model.compile(**how)


def train(
    backend: str, options: Mapping[str, Any], watch: Watch = unwatched, way: str = "whole"
) -> list[float]:
    """Ten steps on a small Llama; the loss of each on this rank."""
    accelerator = sharding_accelerator()
    model = language_model(words=WORDS, width=WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if backend == "fxremat":
        fxremat.loss_only(model)
        outside = LOSS_BYTES if way == "regions" else 0  # the loss is no region
        options = {"reserve": outside + LOOP_BYTES, **options}
    compile_model(model, way, backend=backend, options=dict(options))
    model, optimizer = accelerator.prepare(model, optimizer)
    data = texts(40, seed=accelerator.process_index, words=WORDS)
    losses = []
    for step in range(10):
        each = data[4 * step : 4 * step + 4]
        batch = {name: torch.stack([one[name] for one in each]) for name in each[0]}
        watch(step, [model, optimizer.optimizer])
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    run(train)

"""torchtitan: its Llama, sharded and compiled as it does that, with options in the environment.

FXREMAT_MEMORY_BUDGET=120MiB torchrun --nproc-per-node 2 docs/trainers/torchtitan_llama.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from tiny import LOOP_BYTES, Watch, run, unwatched
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

WORDS, TOKENS = 2048, 256
COMPILE = {"enable": True, "components": ["model", "loss"]}


@contextmanager
def on_any_device() -> Iterator[None]:
    """torchtitan takes CUDA to be there where no accelerator is."""
    before = parallel_dims.device_type
    parallel_dims.device_type = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        yield
    finally:
        parallel_dims.device_type = before


def sharded_model(backend: str) -> nn.Module:
    """torchtitan's model for tests; each block is compiled, then sharded, by torchtitan itself."""
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:  # FlexAttention is for its own two backends alone
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    ranks = distributed.get_world_size()
    parallelism = ParallelismConfig(
        data_parallel_shard_degree=ranks, spmd_backend="partial_dtensor"
    )
    with on_any_device():
        model: nn.Module = spec.parallelize_fn(
            spec.model.build(),
            parallel_dims=ParallelDims.from_config(parallelism, ranks),
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=parallelism,
            compile_config=CompileConfig(backend=backend, **COMPILE),
            ac_config=None,
            dump_folder="",
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):  # for gloo
            module.set_force_sum_reduction_for_comms(True)
    torch.manual_seed(0)
    model.init_states(buffer_device=torch.device("cpu"))  # type: ignore[operator]
    return model


def loss_function(backend: str) -> Any:
    """torchtitan's, compiled by itself."""
    config = CompileConfig(backend=backend, **COMPILE)
    return CrossEntropyLoss.Config(global_vocab_size=WORDS).build(compile_config=config)


def into_environment(options: Mapping[str, Any]) -> None:
    """Blocks that torchtitan compiles get no options of ours."""
    for name, value in options.items():
        if value is not None:
            os.environ[f"FXREMAT_{name.upper()}"] = str(value)


def step_loss(model: nn.Module, loss_of: Any, words: torch.Tensor, count: torch.Tensor) -> float:
    """Forward and backward; nothing of them is there afterwards but gradients."""
    predicted = model(words[:, :-1].contiguous())
    loss, _ = loss_of(predicted, words[:, 1:].contiguous(), count)
    del predicted
    loss.backward()
    return float(loss.detach())


def train(backend: str, options: Mapping[str, Any], watch: Watch = unwatched) -> list[float]:
    """Ten steps; the loss of each on this rank."""
    if not distributed.is_initialized():
        distributed.init_process_group("gloo")
    model = sharded_model(backend)
    loss_of = loss_function(backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if backend == "fxremat":
        given = {"memory_budget": os.environ.get("FXREMAT_MEMORY_BUDGET"), **options}
        into_environment({"reserve": LOOP_BYTES, **given})
    numbers = torch.Generator().manual_seed(distributed.get_rank())
    count = torch.tensor(float(4 * TOKENS * distributed.get_world_size()))
    losses = []
    for step in range(10):
        words = torch.randint(WORDS, (4, TOKENS + 1), generator=numbers)
        watch(step, [model, optimizer])
        losses.append(step_loss(model, loss_of, words, count))
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    run(train)

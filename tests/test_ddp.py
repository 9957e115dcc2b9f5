"""Models whose graphs DDP splits: they share one budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat import compat
from fxremat.sizes import MIB

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

BUDGET = 16 * MIB


class Layers(nn.Module):
    """Each layer's weights fill a bucket of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x


def test_parts_of_a_split_graph_share_the_budget(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    torch._dynamo.reset()
    try:
        model = nn.parallel.DistributedDataParallel(Layers(), bucket_cap_mb=1)
        options: dict[str, Any] = {
            "memory_budget": BUDGET,
            "executor": "aot_eager",
            "solver": "greedy",
        }
        assert not compat.splits_for_ddp()
        torch.compile(model, backend="fxremat", options=options)(torch.randn(128, 600)).sum()
    finally:
        torch.distributed.destroy_process_group()
    reports = fxremat.reports()
    assert len(reports) > 1
    own = [report.predicted_peak_bytes - report.held_bytes for report in reports]
    buckets = sum(p.nbytes for p in Layers().parameters())
    assert buckets + sum(own) <= BUDGET
    held = [buckets + sum(own[:i]) for i in range(len(own))]
    assert [report.held_bytes for report in reports] == held

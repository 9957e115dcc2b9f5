"""Models that FSDP2 shards over two ranks, compiled block by block and as a whole."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from tests.small import Block

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from torch import distributed
from torch.distributed.fsdp import fully_shard

RANKS, WIDTH, PERCENT = 2, 64, 65
OPTIONS: dict[str, Any] = {"executor": "aot_eager", "solver": "greedy", "variants": "none"}


class Blocks(nn.Module):
    """Blocks, each of which FSDP2 gathers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Sharded:
    """One rank's model, and a step of it."""

    def __init__(self, rank: int, way: str, **how: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = Blocks()
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        if way == "each block":
            for block in self.model.blocks:
                block.compile(**how)
        call: Any = self.model
        self.call = torch.compile(self.model, **how) if way == "the whole" else call
        self.x = torch.randn(16, 64, WIDTH, generator=torch.Generator().manual_seed(rank))

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.call(self.x).backward()

    def gradients(self) -> list[torch.Tensor]:
        self.step()
        found: list[Any] = [parameter.grad for parameter in self.model.parameters()]
        return [gradient.to_local().clone() for gradient in found]

    def peak_bytes(self) -> int:
        self.step()
        self.model.zero_grad(set_to_none=True)
        return fxremat.measure_peak(self.step, held=(self.model, self.x)).peak_bytes


def on_a_rank(rank: int, folder: str, way: str) -> None:
    """What is found goes into a file of the rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    plain = Sharded(rank, way, backend="aot_eager")
    expected, peak = plain.gradients(), plain.peak_bytes()
    budget = peak * PERCENT // 100
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {**OPTIONS, "memory_budget": budget}
        ours = Sharded(rank, way, backend="fxremat", options=options)
        for mine, its in zip(ours.gradients(), expected, strict=True):
            torch.testing.assert_close(mine, its)
        measured = ours.peak_bytes()
    broken = [each for each in caught if isinstance(each.message, fxremat.PromiseBroken)]
    plans = [list(map(str, report.plan.steps)) for report in fxremat.reports()]
    found: dict[str, Any] = {
        "peak": peak,
        "budget": budget,
        "measured": measured,
        "broken": len(broken),
        "plans": plans,
    }
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


@pytest.mark.parametrize("way", ["each block", "the whole"])
def test_a_budget_is_kept_on_each_rank_and_gradients_stay(tmp_path: Path, way: str) -> None:
    """Compiled as a whole, the hooks of FSDP2 break the graph, and each block is one again."""
    spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
    spawn(on_a_rank, (str(tmp_path), way), nprocs=RANKS)
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    for each in found:
        assert each["measured"] <= each["budget"]
        assert each["broken"] == 0
        assert each["plans"]
    assert found[0]["plans"] == found[1]["plans"]

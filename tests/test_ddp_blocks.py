"""DDP: its buckets are counted, whether Dynamo splits graphs for it or not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from fxremat.compat.backward import backward_drops_gradients
from tests.ranks import LEAST, PERCENTS, Blocks, Found, Trained, compared, kept, on_ranks

RANKS, WIDTH = 2, 128


class Parallel(Trained):
    """One rank's copy of a model in DDP, with small buckets."""

    def __init__(self, rank: int, way: str, split: bool, views: bool, **how: Any) -> None:
        torch._dynamo.config.optimize_ddp = split
        torch.manual_seed(0)
        self.model = Blocks(4, WIDTH)
        if way == "each block":
            for block in self.model.blocks:
                block.compile(**how)
        self.parallel = nn.parallel.DistributedDataParallel(
            self.model, bucket_cap_mb=1, gradient_as_bucket_view=views
        )
        call: Any = self.parallel
        self.call = torch.compile(call, **how) if way == "the whole" else call
        numbers = torch.Generator().manual_seed(rank)
        self.x = torch.randn(16, 32, WIDTH, generator=numbers)

    def run(self) -> None:
        self.call(self.x).backward()

    def held(self) -> Any:
        return self.model, self.x

    def beside_bytes(self) -> int:
        """Of the buckets, which hold each gradient."""
        return sum(p.nbytes for p in self.model.parameters())


def parallel(
    rank: int, way: str, split: bool, views: bool, percents: tuple[int, ...]
) -> dict[str, Found]:
    def make(**how: Any) -> Parallel:
        return Parallel(rank, way, split, views, **how)

    exactly = not split or backward_drops_gradients()
    return {way: compared(make, percents, exactly=exactly)}


SLOW: list[tuple[str, bool, bool, tuple[int, ...]]] = [
    ("the whole", False, False, PERCENTS),
    ("the whole", True, True, PERCENTS),
    ("the whole", True, False, (70,)),
    ("each block", False, True, (LEAST,)),
]


@pytest.mark.parametrize(
    ("way", "split", "views", "percents"),
    [
        ("each block", False, True, (60,)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_each_rank_keeps_its_budget_with_the_buckets(
    tmp_path: Path, way: str, split: bool, views: bool, percents: tuple[int, ...]
) -> None:
    work = partial(parallel, way=way, split=split, views=views, percents=percents)
    kept(on_ranks(RANKS, tmp_path, work))

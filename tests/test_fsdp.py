"""Models that FSDP2 shards over two ranks, compiled block by block and as a whole."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fxremat
from fxremat.compat.ranks import Shards, shards_of
from fxremat.errors import NotTraceable
from tests.ranks import PERCENTS, Blocks, Trained, in_way, kept, on_ranks
from tests.small import Chain

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS, WIDTH = 2, 64
KEPT = "each block, whole from forward to backward, in bf16"
PREPARED = "each block, looked at by prepare"
WAYS = ("each block", KEPT, PREPARED, "the whole")


class Sharded(Trained):
    """One rank's part of a model, and what it is given."""

    most_steps = 10

    def __init__(self, rank: int, way: str, **how: Any) -> None:
        torch.manual_seed(0)
        self.model = Chain(6, WIDTH)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if way == KEPT else None
        mixed: dict[str, Any] = {} if policy is None else {"mp_policy": policy}
        for block in self.model.blocks:
            fully_shard(block, reshard_after_forward=way != KEPT, **mixed)
        fully_shard(self.model, **mixed)
        self.compile(self.model, way, **how)
        self.x = torch.randint(32, (8, 128), generator=torch.Generator().manual_seed(rank))
        self.to_prepare = how.get("options") if way == PREPARED else None

    def run(self) -> None:
        if self.to_prepare is not None:
            fxremat.prepare(self.model, self.x, options=self.to_prepare)
            self.to_prepare = None
        super().run()


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize("sharded", [False, True], ids=["tensor parallel", "below FSDP2"])
def test_prepare_refuses_what_it_cannot_look_at(sharded: bool) -> None:
    """And leaves the model as it was."""
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    model: Any = Blocks(2, 16)
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["b"], plan)
        if sharded:
            fully_shard(block, mesh=mesh["a"])
    x = torch.randn(4, 8, 16)
    with pytest.raises(NotTraceable, match=r"blocks\.0\.up\.weight is sharded over ranks"):
        fxremat.prepare(model, x, memory_budget="1GiB")
    model(x).backward()


@pytest.mark.usefixtures("only_rank")
def test_bytes_of_the_parts_and_gathered() -> None:
    """Gathered, and reduced, they are as wide as the policy says."""
    narrow, half, wide = MixedPrecisionPolicy, torch.bfloat16, torch.float32
    for policy, width, sent in (
        (narrow(), 4, 4),
        (narrow(param_dtype=half), 2, 2),
        (narrow(param_dtype=half, reduce_dtype=wide), 2, 4),
    ):
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        module: Any = fully_shard(torch.nn.Linear(4, 3), mesh=mesh, mp_policy=policy)
        module(torch.ones(2, 4))
        shards = shards_of(module)
        whole = Shards(15 * 4, 15 * width, 15 * sent, kept=15 * width)
        assert shards == whole  # the outermost module keeps what it has gathered
        module.set_reshard_after_forward(True)
        assert shards_of(module) == replace(whole, kept=0)
        assert shards + shards == Shards(30 * 4, 30 * width, 30 * sent, 30 * width)


@pytest.mark.parametrize(
    ("way", "percents"),
    [("each block", (60,)), *(pytest.param(way, PERCENTS, marks=pytest.mark.slow) for way in WAYS)],
)
def test_a_budget_is_kept_on_each_rank_and_gradients_stay(
    tmp_path: Path, way: str, percents: tuple[int, ...]
) -> None:
    """Compiled as a whole, the hooks of FSDP2 break the graph, and each block is one again."""
    work = partial(in_way, model=Sharded, given=(way,), percents=percents)
    kept(on_ranks(RANKS, tmp_path, work))

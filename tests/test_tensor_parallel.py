"""Tensor parallel, alone and below FSDP2: parameters are DTensors, and graphs hold collectives.

So they do where the graph gathers its parameters itself: there a plan may gather them again.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.ranks import LEAST, PERCENTS, Blocks, Trained, in_way, kept, on_ranks

WIDTH = 64


class Parallel(Trained):
    """One rank's model; the second dimension of the ranks is that of tensor parallel."""

    most_steps = 10

    def __init__(self, rank: int, data: int, way: str, **how: Any) -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (data, 2), mesh_dim_names=("data", "tensor"))
        self.model = Blocks(4, WIDTH)
        for block in self.model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tensor"], plan)
            if data > 1:
                fully_shard(block, mesh=mesh["data"])
        if data > 1:
            fully_shard(self.model, mesh=mesh["data"])
        self.compile(self.model, way, **how)
        numbers = torch.Generator().manual_seed(rank // 2)
        self.x = torch.randn(16, 64, WIDTH, generator=numbers)


class GathersItself(nn.Linear):
    """A layer whose weight lies in parts on the ranks, and is gathered in its forward."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, bias=False)
        mesh = init_device_mesh("cpu", (2,))
        self.weight = nn.Parameter(distribute_tensor(self.weight.data, mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        part: Any = self.weight
        weight = part.redistribute(placements=[Replicate()])
        return torch.relu(x @ weight.to_local(grad_placements=[Partial()]).t())


class Gathering(Trained):
    """One rank's model, compiled whole; its batch is small beside its weights."""

    most_steps = 40

    def __init__(self, rank: int, **how: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(GathersItself(256) for _ in range(6)))
        self.call = torch.compile(self.loss, **how)
        self.x = torch.randn(16, 256, generator=torch.Generator().manual_seed(rank))

    def loss(self, x: Tensor) -> Any:
        return self.model(x).square().mean()


@pytest.mark.slow
def test_parameters_are_gathered_again_where_that_saves_bytes(tmp_path: Path) -> None:
    """What is gathered is most of what plain keeps; sums over ranks run once."""
    found = on_ranks(2, tmp_path, partial(in_way, model=Gathering, given=(), percents=(90, LEAST)))
    kept(found)
    [(high, least)] = found[0].values()
    assert least["budget"] < 0.85 * high["plain"]
    [steps] = least["plans"]
    assert sum(step.startswith("all_gather") for step in steps) > 6
    assert sum(step.startswith("reduce_scatter") for step in steps) == 6


@pytest.mark.parametrize(
    ("way", "percents"),
    [("each block", (60,)), pytest.param("the whole", PERCENTS, marks=pytest.mark.slow)],
)
def test_ranks_of_one_model_keep_their_budgets(
    tmp_path: Path, way: str, percents: tuple[int, ...]
) -> None:
    work = partial(in_way, model=Parallel, given=(1, way), percents=percents)
    kept(on_ranks(2, tmp_path, work))


@pytest.mark.slow
def test_four_ranks_keep_their_budgets_below_fsdp(tmp_path: Path) -> None:
    work = partial(in_way, model=Parallel, given=(2, "each block"), percents=PERCENTS)
    kept(on_ranks(4, tmp_path, work))

"""Stages of a pipeline: as many micro-batches are planned for as their schedule has in flight.

A schedule's step is found, with what its stages hold and the order in which they run.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fxremat.compat.pipelining import (
    RunningPipeline,
    is_stage,
    received_by,
    running_pipeline,
    shown_stages,
)
from fxremat.compat.tensors import is_fake
from tests.ranks import PERCENTS, Found, Trained, compared, kept, least_named, on_ranks
from tests.small import Block

RANKS, WIDTH, MICRO_BATCHES = 2, 64, 4
HOST = torch.device("cpu")


def part_of(depth: int) -> nn.Sequential:
    """The blocks of one stage."""
    return nn.Sequential(*(Block(WIDTH) for _ in range(depth)))


def loss_of(result: Tensor, target: Tensor) -> Tensor:
    """Saves as many bytes as it is given."""
    return (result - target).square().mean()


class Piped(Trained):
    """One rank's stages; with ``several`` there are two of them."""

    def __init__(self, rank: int, schedule: Any, way: str, several: bool = False, **how: Any):
        torch.manual_seed(rank)
        count = 2 if several else 1
        parts = [part_of(4 // count) for _ in range(count)]
        for part in parts:
            for module in part if way == "each block" else [part]:
                module.compile(**how)
        stages = [
            pipelining.PipelineStage(part, rank + RANKS * k, RANKS * count, HOST)
            for k, part in enumerate(parts)
        ]
        self.put_together(stages, schedule, first=rank == 0, seed=7)

    def put_together(self, stages: list[Any], schedule: Any, *, first: bool, seed: int) -> None:
        """The schedule of these stages, and the batch that is made of a seed."""
        self.stages, self.first = stages, first
        self.model = nn.ModuleList(stage.submod for stage in stages)
        given: Any = stages if len(stages) > 1 else stages[0]
        self.schedule = schedule(given, n_microbatches=MICRO_BATCHES, loss_fn=loss_of)
        numbers = torch.Generator().manual_seed(seed)
        self.batch = torch.randn(8 * MICRO_BATCHES, 64, WIDTH, generator=numbers)

    def run(self) -> None:
        if self.first:
            self.schedule.step(self.batch)
        else:
            self.schedule.step(target=self.batch, losses=[])

    def held(self) -> Any:
        """Without what a stage gave in the last step, which the next one drops as it begins."""
        for stage in self.stages:
            stage.clear_runtime_states()
        return self.model, self.batch, [received_by(stage) for stage in self.stages]

    def named_least(self) -> int:
        """The stage that is refused runs uncompiled: the other one waits for what it gives."""
        found: list[int] = []
        (part,) = (stage.submod for stage in self.stages)
        compiled: Any = part._compiled_call_impl
        uncompiled: Any = part._call_impl

        def call(*given: Any) -> Any:
            try:
                return compiled(*given)
            except torch._dynamo.exc.BackendCompilerFailed as refused:
                found.append(least_named(refused))
                return uncompiled(*given)

        part._compiled_call_impl = call
        self.step()
        return found[0]


def piped(rank: int, name: str, way: str, percents: tuple[int, ...]) -> dict[str, Found]:
    several = "Interleaved" in name

    def make(**how: Any) -> Piped:
        return Piped(rank, getattr(pipelining, name), way, several, **how)

    return {f"{name}, {way}": compared(make, percents, exactly=not several)}


class PipedShards(Piped):
    """FSDP2 shards each block of a stage over two ranks, and the stage: four ranks in all."""

    most_steps = 10

    def __init__(self, rank: int, schedule: Any, **how: Any):
        mesh = init_device_mesh("cpu", (2, RANKS), mesh_dim_names=("data", "stage"))
        number, data = mesh["stage"].get_local_rank(), mesh["data"]
        torch.manual_seed(number)
        part = part_of(4)
        for module in (*part, part):
            sharded: Any = fully_shard(module, mesh=data)
            sharded.set_force_sum_reduction_for_comms(True)  # for gloo
        for block in part:
            block.compile(**how)
        group = mesh["stage"].get_group()
        stage = pipelining.PipelineStage(part, number, RANKS, HOST, group=group)
        self.put_together([stage], schedule, first=number == 0, seed=data.get_local_rank())


def sharded(rank: int) -> dict[str, Found]:
    found = {}
    for name in ("ScheduleGPipe", "Schedule1F1B"):

        def make(name: str = name, **how: Any) -> PipedShards:
            return PipedShards(rank, getattr(pipelining, name), **how)

        found[name] = compared(make, (75,))
    return found


CASES: list[tuple[str, str, tuple[int, ...]]] = [
    ("ScheduleGPipe", "the whole", PERCENTS),
    ("Schedule1F1B", "the whole", PERCENTS),
    ("ScheduleGPipe", "each block", (75,)),
    ("ScheduleInterleaved1F1B", "each block", (70,)),
]


@pytest.mark.parametrize(
    ("name", "way", "percents"),
    [
        ("Schedule1F1B", "each block", (60,)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES),
    ],
)
def test_each_stage_keeps_its_budget(
    tmp_path: Path, name: str, way: str, percents: tuple[int, ...]
) -> None:
    found = on_ranks(RANKS, tmp_path, partial(piped, name=name, way=way, percents=percents))
    kept(found, alike=False)


@pytest.mark.slow
def test_each_stage_that_is_sharded_keeps_its_budget(tmp_path: Path) -> None:
    kept(on_ranks(2 * RANKS, tmp_path, sharded), alike=False)


# --- the step of a schedule ---------------------------------------------------------------


class Seen(nn.Module):
    """Notes the pipeline in which it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)
        self.found: list[RunningPipeline | None] = []

    def forward(self, x: Tensor) -> Tensor:
        if not is_fake(x) and torch.is_grad_enabled():
            self.found.append(running_pipeline())
        result: Tensor = self.layer(x)
        return result


@pytest.mark.usefixtures("only_rank")
@pytest.mark.parametrize(("name", "sent"), [("ScheduleGPipe", True), ("Schedule1F1B", False)])
def test_the_running_stage_and_its_order_are_found(name: str, sent: bool) -> None:
    module = Seen()
    stage = pipelining.PipelineStage(module, 0, 1, HOST)
    schedule: Any = getattr(pipelining, name)(stage, MICRO_BATCHES, loss_of)
    batch, target = torch.ones(8, 4), torch.ones(8, 8)
    assert running_pipeline() is None
    schedule.step(batch, target=target)
    found = module.found[-1]
    assert found is not None
    assert (found.stages, found.current, found.micro_batches) == ((stage,), 0, MICRO_BATCHES)
    forward, backward = (True, 0), (False, 0)
    by_turns = (forward, backward) * MICRO_BATCHES
    at_once = (forward,) * MICRO_BATCHES + (backward,) * MICRO_BATCHES
    assert found.order == (at_once if sent else by_turns)
    assert [tuple(x.shape) for x in found.batch] == [(8, 4), (8, 8)]
    assert (found.keeps_sent, found.keeps_outputs) == (sent, True)
    assert is_stage(found, module)
    assert not is_stage(found, module.layer)
    assert received_by(stage) == []
    (shown,) = shown_stages(found)
    assert (shown.given, shown.result) == (2 * 4 * 4, 2 * 8 * 4)
    assert (shown.loss, shown.value) == (2 * 8 * 4, 4)


@pytest.mark.usefixtures("only_rank")
def test_without_a_loss_nothing_waits() -> None:
    module = Seen()
    stage = pipelining.PipelineStage(module, 0, 1, HOST)
    schedule = pipelining.ScheduleGPipe(stage, MICRO_BATCHES)
    schedule.step(torch.ones(8, 4))
    assert set(module.found) <= {None}

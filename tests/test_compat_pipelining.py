"""A schedule's step is found, with what its stages hold and the order in which they run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from torch.distributed import pipelining

from fxremat.compat.pipelining import (
    RunningPipeline,
    is_stage,
    received_by,
    running_pipeline,
    shown_stages,
)
from fxremat.compat.tensors import is_fake

HOST, MICRO_BATCHES = torch.device("cpu"), 3


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


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


def loss_of(result: Tensor, target: Tensor) -> Tensor:
    """Saves the difference."""
    return (result - target).square().mean()


@pytest.mark.parametrize(("name", "sent"), [("ScheduleGPipe", True), ("Schedule1F1B", False)])
def test_the_running_stage_and_its_order_are_found(name: str, sent: bool) -> None:
    module = Seen()
    stage = pipelining.PipelineStage(module, 0, 1, HOST)
    schedule: Any = getattr(pipelining, name)(stage, MICRO_BATCHES, loss_of)
    batch, target = torch.ones(6, 4), torch.ones(6, 8)
    assert running_pipeline() is None
    schedule.step(batch, target=target)
    found = module.found[-1]
    assert found is not None
    assert (found.stages, found.current, found.micro_batches) == ((stage,), 0, MICRO_BATCHES)
    forward, backward = (True, 0), (False, 0)
    by_turns = (forward, backward) * MICRO_BATCHES
    at_once = (forward,) * MICRO_BATCHES + (backward,) * MICRO_BATCHES
    assert found.order == (at_once if sent else by_turns)
    assert [tuple(x.shape) for x in found.batch] == [(6, 4), (6, 8)]
    assert (found.keeps_sent, found.keeps_outputs) == (sent, True)
    assert is_stage(found, module)
    assert not is_stage(found, module.layer)
    assert received_by(stage) == []
    (shown,) = shown_stages(found)
    assert (shown.given, shown.result) == (2 * 4 * 4, 2 * 8 * 4)
    assert (shown.loss, shown.value) == (2 * 8 * 4, 4)


def test_without_a_loss_nothing_waits() -> None:
    module = Seen()
    stage = pipelining.PipelineStage(module, 0, 1, HOST)
    schedule = pipelining.ScheduleGPipe(stage, MICRO_BATCHES)
    schedule.step(torch.ones(6, 4))
    assert set(module.found) <= {None}

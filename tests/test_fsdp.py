"""Models that FSDP2 shards over two ranks, compiled block by block and as a whole."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fxremat
from fxremat.compat.distributed.ranks import Shards, shards_of
from fxremat.errors import NotTraceable
from tests.ranks import PERCENTS, Blocks, least_on_all_ranks, least_peak, spawned
from tests.test_step_in_flight import Chain

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

from torch import distributed
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

RANKS, WIDTH, MOST_STEPS = 2, 64, 10
OPTIONS: dict[str, Any] = {"executor": "aot_eager", "solver": "greedy", "variants": "none"}


KEPT = "each block, whole from forward to backward, in bf16"
PREPARED = "each block, looked at by prepare"


class Sharded:
    """One rank's model, and a step of it."""

    def __init__(self, rank: int, way: str, **how: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = Chain(6, WIDTH)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if way == KEPT else None
        mixed: dict[str, Any] = {} if policy is None else {"mp_policy": policy}
        for block in self.model.blocks:
            fully_shard(block, reshard_after_forward=way != KEPT, **mixed)
        fully_shard(self.model, **mixed)
        if way != "the whole":
            for block in self.model.blocks:
                block.compile(**how)
        call: Any = self.model
        self.call = torch.compile(self.model, **how) if way == "the whole" else call
        self.x = torch.randint(32, (8, 128), generator=torch.Generator().manual_seed(rank))
        self.prepared = how.get("options") if way == PREPARED else None
        self.prepare()

    def prepare(self) -> None:
        """Anew where Dynamo has forgotten it."""
        if self.prepared is not None:
            fxremat.prepare(self.model, self.x, options=self.prepared)

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.call(self.x).backward()

    def loss(self) -> float:
        loss: torch.Tensor = self.call(self.x)
        return loss.item()

    def gradients(self) -> list[torch.Tensor]:
        self.step()
        found: list[Any] = [parameter.grad for parameter in self.model.parameters()]
        return [gradient.to_local().clone() for gradient in found]

    def peak_bytes(self, expected: int | None = None) -> int:
        """Of a step; the least of several, until one is about as ``expected``.

        A thread of gloo may hold a result for as long as the machine lets it wait.
        """
        self.step()
        return least_peak(self._measured_bytes, expected, MOST_STEPS)

    def _measured_bytes(self) -> int:
        self.model.zero_grad(set_to_none=True)
        return fxremat.measure_peak(self.step, held=(self.model, self.x)).peak_bytes

    def train(self, steps: int = 3) -> list[torch.Tensor]:
        """The rank's parts of the parameters after some steps of AdamW."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        for _ in range(steps):
            self.step()
            optimizer.step()
        found: list[Any] = [*self.model.parameters()]
        return [parameter.to_local().detach().clone() for parameter in found]


def on_a_rank(rank: int, folder: str, way: str) -> None:
    """What is found goes into a file of the rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    plain = Sharded(rank, way, backend="aot_eager")
    expected, peak = plain.gradients(), least_on_all_ranks(plain.peak_bytes())
    trained = plain.train()

    def ours(budget: int) -> Sharded:
        options = {**OPTIONS, "memory_budget": budget}
        return Sharded(rank, way, backend="fxremat", options=options)

    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for budget in (
            *(peak * percent // 100 for percent in PERCENTS if percent),
            least_of(lambda: ours(1 << 20)),
        ):
            mine = ours(budget)
            for one, other in zip(mine.gradients(), expected, strict=True):
                torch.testing.assert_close(one, other)
            reports = fxremat.reports()
            predicted = reports[-1].step_peak_bytes
            found.append({
                "budget": budget,
                "measured": mine.peak_bytes(predicted),
                "predicted": predicted,
                "plans": [list(map(str, report.plan.steps)) for report in reports],
            })  # fmt: skip
        for one, other in zip(mine.train(), trained, strict=True):
            torch.testing.assert_close(one, other)
    state = get_model_state_dict(mine.model)
    other_model = Sharded(rank, way, backend="aot_eager")
    mine.prepare()
    set_model_state_dict(other_model.model, state)
    assert other_model.loss() == pytest.approx(mine.loss())
    set_model_state_dict(mine.model, get_model_state_dict(other_model.model))
    assert other_model.loss() == pytest.approx(mine.loss())
    broken = sum(isinstance(each.message, fxremat.PromiseBroken) for each in caught)
    text = json.dumps({"found": found, "broken": broken})
    (Path(folder) / f"rank{rank}.json").write_text(text)
    distributed.destroy_process_group()


@pytest.mark.parametrize("sharded", [False, True], ids=["tensor parallel", "below FSDP2"])
def test_prepare_refuses_what_it_cannot_look_at(tmp_path: Path, sharded: bool) -> None:
    """And leaves the model as it was."""
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        model: Any = Blocks(2, 16)
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["b"], plan)
            if sharded:
                fully_shard(block, mesh=mesh["a"])
        x = torch.randn(4, 8, 16)
        with pytest.raises(NotTraceable, match=r"blocks\.0\.up\.weight is a part of"):
            fxremat.prepare(model, x, memory_budget="1GiB")
        model(x).backward()
    finally:
        distributed.destroy_process_group()


def least_of(make: Callable[[], Sharded]) -> int:
    """The number that the error names, of `fxremat.prepare` or when it is compiled."""
    refusals = torch._dynamo.exc.BackendCompilerFailed, fxremat.InfeasibleBudget
    with pytest.raises(refusals) as refused:
        make().step()
    error: Any = getattr(refused.value, "inner_exception", refused.value)
    assert isinstance(error.minimum_bytes, int)
    return error.minimum_bytes


def test_bytes_of_the_parts_and_gathered(tmp_path: Path) -> None:
    """Gathered, and reduced, they are as wide as the policy says."""
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
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
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    "way",
    [
        "each block",
        *(pytest.param(way, marks=pytest.mark.slow) for way in (KEPT, PREPARED, "the whole")),
    ],
)
def test_a_budget_is_kept_on_each_rank_and_gradients_stay(tmp_path: Path, way: str) -> None:
    """Compiled as a whole, the hooks of FSDP2 break the graph, and each block is one again."""
    spawned(on_a_rank, str(tmp_path), way, count=RANKS)
    both = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    for rank in both:
        assert rank["broken"] == 0
        for each in rank["found"]:
            assert each["measured"] <= each["budget"]
            assert each["measured"] == pytest.approx(each["predicted"], rel=0.01)
            assert each["plans"]
    for one, other in zip(*(rank["found"] for rank in both), strict=True):
        assert one["plans"] == other["plans"]

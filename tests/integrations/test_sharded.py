"""The examples that shard a model over ranks: each of two ranks obeys its budget, losses stay."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import fxremat
from tests.ranks import OPTIONS, least_on_all_ranks, on_ranks

EXAMPLES = Path(__file__).parents[2] / "docs" / "trainers"
RANKS = 2
PARTS = {"accelerate_fsdp2 whole": 0.7, "accelerate_fsdp2 regions": 0.8, "torchtitan_llama": 0.65}
"""Of what plain takes, else 0.6. With regions no plan makes the loss smaller: it is uncompiled. Of
torchtitan's loop a ninth are states of the optimizer."""
TOO_LITTLE = 0.7
"""Of the first budget."""


def loop(train: Any, backend: str, options: dict[str, Any]) -> tuple[list[float], int]:
    """The losses, and the peak of the loop from its fourth step on."""
    torch._dynamo.reset()
    from tests.integrations.test_examples import FIRST, Watch

    watch = StepByStep(Watch, FIRST)
    losses = train(backend, options, watch)
    return losses, watch.peak_bytes()


class StepByStep:
    """Measures each step by itself; the least counts, in which gloo's threads freed little.

    The profiler does not see what they free: the more steps, the more it counts.
    """

    def __init__(self, watch: Any, first: int) -> None:
        self.watch, self.first = watch, first
        self.current: Any = None
        self.found: list[int] = []

    def __call__(self, step: int, held: Any) -> None:
        self.end()
        if step >= self.first:
            self.current = self.watch()
            self.current(self.first, held)

    def end(self) -> None:
        if self.current is not None:
            self.found.append(self.current.peak_bytes())

    def peak_bytes(self) -> int:
        self.end()
        print("steps:", *(f"{found:,}" for found in self.found))
        return min(self.found)


def least_budget(train: Any, refused_bytes: int) -> int:
    """What is named is asked for, until nothing is refused; the first number is."""
    budget, least = 0, refused_bytes
    while least > budget:
        budget = least
        try:
            loop(train, "fxremat", {**OPTIONS, "memory_budget": budget})
        except torch._dynamo.exc.BackendCompilerFailed as refused:
            error: Any = refused.inner_exception
            least += error.minimum_bytes - error.budget_bytes  # some is left to states
    assert budget > refused_bytes
    return budget


def found_on_a_rank(module: str, arguments: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    """Of plain and of each budget: the losses, and the peak."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    sys.path.insert(0, str(EXAMPLES))
    train: Any = importlib.import_module(module).train
    train = partial(train, **arguments)
    losses, peak = loop(train, "aot_eager", {})
    found = [{"losses": losses, "peak": peak}]
    peak = least_on_all_ranks(peak)
    warnings.simplefilter("ignore", fxremat.PromiseBroken)  # of the first step, which tells
    part = PARTS.get(" ".join([module, *arguments.values()]), 0.6) * peak
    for budget in (int(part), least_budget(train, int(TOO_LITTLE * part))):
        losses, measured = loop(train, "fxremat", {**OPTIONS, "memory_budget": budget})
        found.append({"budget": budget, "losses": losses, "peak": measured})
    distributed.barrier()
    return found


whole = partial(found_on_a_rank, "accelerate_fsdp2", {"way": "whole"})
regions = partial(found_on_a_rank, "accelerate_fsdp2", {"way": "regions"})
torchtitan = partial(found_on_a_rank, "torchtitan_llama", {})


@pytest.mark.parametrize("name", ["whole", "regions", "torchtitan"])
def test_each_rank_obeys_its_budget_and_has_the_losses_of_plain(name: str, tmp_path: Path) -> None:
    if name == "torchtitan" and importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed: it is not among the trainers' requirements")
    for rank in on_ranks(RANKS, tmp_path, globals()[name]):
        plain, *others = rank
        told = (f"budget {one['budget']:,} measured {one['peak']:,}" for one in others)
        print(f"{name}: plain {plain['peak']:,}", *told)
        for one in others:
            assert one["peak"] <= one["budget"]
            torch.testing.assert_close(one["losses"], plain["losses"], rtol=1e-4, atol=1e-4)

"""Ranks on this machine that train the same model without fxremat and with it, and say how it went.

Ranks find each other by a file, and talk over the loopback device alone.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import fxremat
from fxremat.sizes import MIB
from tests.examples import LONG
from tests.small import Block

OPTIONS: dict[str, Any] = {"executor": "aot_eager", "solver": "greedy", "variants": "none"}
PLAIN: dict[str, Any] = {"backend": "aot_eager"}
Found = list[dict[str, Any]]
PRELOADED = [
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "fxremat.backend",
    "fxremat.compile.partitioner",
]
"""What takes a process seconds to import: a server has it, and ranks are forked from that."""


def spawned(work: Callable[..., None], *given: Any, count: int) -> None:
    """``work(rank, *given)`` in so many processes, one for each rank; raises what one of them does.

    A module of tests that ``work`` is in is imported by each of them.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    start: Any = torch.multiprocessing.start_processes  # type: ignore[attr-defined]
    start(work, given, nprocs=count, start_method="forkserver")


class Blocks(nn.Module):
    """Blocks and a head, whose part in the peak is small."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


class Trained:
    """One rank's model, compiled as ``how`` says, with what a step of it needs."""

    model: nn.Module
    call: Any
    """The model, compiled: it gives the loss of ``x``."""
    x: Tensor
    most_steps: int = 1
    """Measured at most. Where a graph waits for collectives, a thread of gloo may hold a result for
    as long as the machine lets it wait: then the peak is that of the step that had no such one."""

    def compile(self, model: Any, way: str, **how: Any) -> None:
        """The model as a whole, or each of its blocks."""
        for block in () if way == "the whole" else self.model.blocks:  # type: ignore[union-attr]
            block.compile(**how)
        self.call = torch.compile(model, **how) if way == "the whole" else model

    def run(self) -> None:
        """Forward and backward."""
        self.call(self.x).backward()

    def held(self) -> Any:
        """What lives on the device before a step."""
        return self.model, self.x

    def step(self) -> None:
        """Gradients anew."""
        self.model.zero_grad(set_to_none=True)
        self.run()

    def gradients(self) -> list[Tensor]:
        """Of a step, those of this rank's parts of the parameters."""
        self.step()
        return [local(p.grad).clone() for p in self.model.parameters()]

    def beside_bytes(self) -> int:
        """Held, too, but by no tensor that Python sees."""
        return 0

    def peak_bytes(self, expected: int | None = None) -> int:
        """Of a step, after some; the least of several, until one is no more than ``expected``."""
        for _ in range(2):
            self.step()
        return least_peak(self._measured_bytes, expected, self.most_steps)

    def _measured_bytes(self) -> int:
        self.model.zero_grad(set_to_none=True)
        peak = fxremat.measure_peak(self.step, held=self.held()).peak_bytes
        return peak + self.beside_bytes()

    def named_least(self) -> int:
        """The bytes that the error names by which a step is refused."""
        refusals = torch._dynamo.exc.BackendCompilerFailed, fxremat.InfeasibleBudget
        with pytest.raises(refusals) as refused:
            self.step()
        return least_named(refused.value)

    def trained(self) -> list[Tensor]:
        """This rank's parts of the parameters after three steps."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        for _ in range(3):
            self.step()
            optimizer.step()
        return [local(p).detach().clone() for p in self.model.parameters()]


def local(tensor: Any) -> Tensor:
    """This rank's part of a tensor."""
    found: Tensor = getattr(tensor, "to_local", lambda: tensor)()
    return found


def least_peak(measure: Callable[[], int], expected: int | None, most: int) -> int:
    """The least of at most so many, until it is no more than expected on all ranks.

    Ranks have to run as many steps as each other: there are collectives in them.
    """
    found = [measure()]
    while len(found) < most and expected is not None:
        there = torch.tensor(min(found) <= expected, dtype=torch.int32)
        distributed.all_reduce(there, distributed.ReduceOp.MIN)
        if there:
            break
        found.append(measure())
    return min(found)


def least_on_all_ranks(nbytes: int) -> int:
    """One budget for all: gloo's threads hold results for a moment, so that peaks differ."""
    least = torch.tensor(nbytes)
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    return int(least)


def least_named(error: Any) -> int:
    """The bytes that an error about a budget names, torch.compile's or our own."""
    least: int = getattr(error, "inner_exception", error).minimum_bytes
    return least


LEAST = 0
"""Instead of percents: the budget is the least that the error names by which less is refused."""
PERCENTS = (80, 60, LEAST) if os.environ.get("HYPOTHESIS_PROFILE") == LONG else (60, LEAST)
"""Of what plain takes: the budgets, one more in the long profile."""


def compared(
    make: Callable[..., Trained], percents: tuple[int, ...], *, exactly: bool = True
) -> Found:
    """Train plain and with each budget, parts of what plain takes; gradients and parameters agree.

    State goes from one to the other and back. ``exactly`` says that the peak of the step is known.
    """
    torch._dynamo.reset()
    plain, found = make(**PLAIN), Found()
    before = _state(plain.model)
    gradients, peak, parameters = plain.gradients(), plain.peak_bytes(), plain.trained()
    if plain.most_steps > 1:
        peak = least_on_all_ranks(peak)
    for percent in percents:
        torch._dynamo.reset()
        budget = peak * percent // 100
        if percent == LEAST:
            too_little = {**OPTIONS, "memory_budget": MIB}
            budget = make(backend="fxremat", options=too_little).named_least()
            torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = make(backend="fxremat", options={**OPTIONS, "memory_budget": budget})
            torch.testing.assert_close(ours.gradients(), gradients)
            reports = fxremat.reports()
            predicted = reports[-1].step_peak_bytes
            measured = ours.peak_bytes(predicted)
            torch.testing.assert_close(ours.trained(), parameters)
        _exchange(plain.model, ours.model, before)
        broken = [str(c.message) for c in caught if isinstance(c.message, fxremat.PromiseBroken)]
        found.append({
            "percent": percent,
            "plain": peak,
            "budget": budget,
            "measured": measured,
            "predicted": predicted if exactly else None,
            "broken": broken,
            "plans": [list(map(str, report.plan.steps)) for report in reports],
        })  # fmt: skip
    return found


def _exchange(plain: nn.Module, ours: nn.Module, before: dict[str, Any]) -> None:
    """The state of each is taken by the other, as it is in a checkpoint."""
    trained = _state(ours)
    assert trained.keys() == before.keys()
    for taker, state in ((plain, trained), (ours, before)):
        set_model_state_dict(taker, {name: value.clone() for name, value in state.items()})
        for name, value in _state(taker).items():
            torch.testing.assert_close(local(value), local(state[name]))


def _state(model: nn.Module) -> dict[str, Any]:
    """As it is saved."""
    state: dict[str, Any] = get_model_state_dict(model)
    return {name: value.clone() for name, value in state.items()}


def on_ranks(ranks: int, folder: Path, what: Callable[[int], Any]) -> list[Any]:
    """What each rank finds; ``what`` has to be a function of a module."""
    spawned(_on_a_rank, ranks, str(folder), what, count=ranks)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def _on_a_rank(rank: int, ranks: int, folder: str, what: Callable[[int], Any]) -> None:
    """What is found goes into a file of the rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    found = what(rank)
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def in_way(
    rank: int, model: Callable[..., Trained], given: tuple[Any, ...], percents: tuple[int, ...]
) -> dict[str, Found]:
    """Of a rank's ``model(rank, *given)``, by what was given."""
    return {str(given): compared(partial(model, rank, *given), percents)}


def kept(found: list[dict[str, Found]], *, alike: bool = True) -> None:
    """Each rank has kept each budget, by plans, and nothing was warned of.

    What was predicted is what was measured. Ranks that are ``alike`` have the same plans.
    """
    told = "\n".join(
        f"rank {rank} {name} { ({key: each for key, each in one.items() if key != 'plans'}) }"
        for rank, of_rank in enumerate(found)
        for name, each in of_rank.items()
        for one in each
    )
    print(told)
    for of_rank in found:
        for one in (one for each in of_rank.values() for one in each):
            assert one["measured"] <= one["budget"], told
            assert one["broken"] == [], told
            assert one["plans"], told
            if one["predicted"] is not None:
                assert one["measured"] == pytest.approx(one["predicted"], rel=0.01), told
    for others in found[1:] if alike else ():
        for name, each in others.items():
            for mine, first in zip(each, found[0][name], strict=True):
                assert mine["plans"] == first["plans"], told

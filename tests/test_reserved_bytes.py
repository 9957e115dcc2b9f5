"""What graphs reserve on CUDA, and a budget as the cap of its allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fxremat
from fxremat import backend
from fxremat.core.events import Allocate, Event, Free, Given, RunEvents
from fxremat.core.layout import CodeBuffer, OwnPools
from fxremat.memory import enforced as own
from fxremat.memory.allocator_settings import AllocatorSettings
from fxremat.memory.enforced import explained, hold_cap
from fxremat.memory.reserved_bytes import CommonPool, keep_too_much, reserved, reserved_by_run
from fxremat.sizes import GIB, MIB
from tests.small import Stack, seeded

SETTINGS = AllocatorSettings()


def test_blocks_of_one_size_do_not_fit_where_others_were() -> None:
    """By hand: 30 and 40 MiB come one after the other, and fit none of each other's segments."""
    events = (Allocate("0", 30 * MIB), Free("0"), Allocate("2", 40 * MIB), Free("2"))
    assert reserved(events, SETTINGS, 0).peak_reserved_bytes == 70 * MIB


def code(name: str, mib: int) -> CodeBuffer:
    return CodeBuffer(name, (mib * MIB,), (1,), "torch.uint8", 1)


def test_what_the_code_asks_for_lies_in_the_arena() -> None:
    """The same blocks take 40 MiB there; what a library returns has a segment of its own."""
    forward: tuple[Event, ...] = (
        Allocate("0", 30 * MIB), Free("0"), Allocate("1", 40 * MIB), Allocate("2", 24 * MIB),
    )  # fmt: skip
    run = RunEvents(
        forward,
        (Allocate("4", 12 * MIB), Free("1"), Free("2")),
        (Given(4 * MIB, gradient="4"),),
        incoming=(("3", 4),),
        forward_buffers=(code("0", 30), code("1", 40)),
        backward_buffers=(code("4", 12),),
    )
    events = (Allocate("weight", 4 * MIB), *forward, Allocate("3", 4), *run.backward)
    found = reserved_by_run(events, run, SETTINGS, 10 * MIB)
    assert found.own.arena_bytes == (40 + 12) * MIB
    assert found.pools.peak_reserved_bytes == (24 + 2) * MIB  # what a library gives, small blocks
    assert found.nbytes == found.own.arena_bytes + found.pools.peak_reserved_bytes + (10 + 4) * MIB
    names = [buffer.block for buffer in found.layout.runs[0].forward.buffers]
    assert names == ["0", "1"]


def test_a_gradient_that_stays_outside_is_there_when_the_forward_begins() -> None:
    """By hand: 12 MiB of it beside 30 in the forward, whose segment has the second one later."""
    run = RunEvents(
        (Allocate("0", 30 * MIB), Free("0")),
        (Allocate("4", 12 * MIB),),
        (Given(4 * MIB, gradient="4"),),
        gradients_stay=True,
    )
    events = (*run.forward, *run.backward)
    assert reserved_by_run(events, run, SETTINGS, 0).nbytes == (30 + 12) * MIB
    freed = replace(run, gradients_stay=False)
    assert reserved_by_run(events, freed, SETTINGS, 0).nbytes == 30 * MIB


def test_graphs_that_take_turns_may_keep_more_than_each_needs() -> None:
    """By hand: 40 MiB fit into no segment of the first one, which has 30; 30 fit into 40."""
    first, second = (RunEvents((Allocate("0", size * MIB), Free("0")), ()) for size in (30, 40))
    small, large = (reserved_by_run(x.forward, x, SETTINGS, 0).own for x in (first, second))
    assert (small.pool_bytes, large.pool_bytes) == (30 * MIB, 40 * MIB)
    assert small.asked == (30 * MIB, -1, 30 * MIB, -2)
    assert keep_too_much([small, large], SETTINGS)
    assert not keep_too_much([replace(small, first_segment=40 * MIB), large], SETTINGS)
    assert not keep_too_much([small, small], SETTINGS)
    arena = OwnPools(arena_bytes=50 * MIB)
    assert keep_too_much([arena, large], SETTINGS)


def test_the_pool_that_all_share() -> None:
    """By hand: weights in segments of 20 MiB, twice as much in states, and one more in a step."""
    pool = CommonPool([12 * MIB] * 2, weights=[12 * MIB] * 2, states=48 * MIB, step=24 * MIB)
    assert pool.reserved(SETTINGS) == (2 + 4 + 2) * 12 * MIB
    tuned = CommonPool(
        [12 * MIB], workspaces=(0,), tuning=40 * MIB, weights=[12 * MIB], states=12 * MIB
    )
    assert tuned.reserved(SETTINGS) == (12 + 40) * MIB  # states are cut from what tuning left


@pytest.mark.gpu
def test_steps_with_an_optimizer_stay_within_the_budget() -> None:
    """Its states are made after the first backward, where nothing of the graph lies."""
    torch._dynamo.reset()
    sizes = (1024, 1536, 640, 2048) * 3
    pairs = zip(sizes, (*sizes[1:], 1024), strict=True)
    layers = [m for a, b in pairs for m in (torch.nn.Linear(a, b), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).cuda()
    inputs = torch.randn(10_000, 1024, device="cuda")
    budget = 1000 * MIB
    options: dict[str, Any] = {"memory_budget": budget}
    step = torch.compile(lambda x: model(x).square().mean(), backend="fxremat", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for index in range(5):
        step(inputs).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if index == 2:
            torch.cuda.empty_cache()
    assert fxremat.reports()[-1].memory.own.arena_bytes > 0
    assert torch.cuda.max_memory_reserved() <= budget


# --- enforced -----------------------------------------------------------------------------

GPU, TOTAL = torch.device("cuda", 0), 80 * GIB


class Holder:
    """What a cap lasts as long as."""


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Those of a card of 80 GiB that were allowed, one after the other."""
    allowed, cuda = [0.75], torch.cuda
    properties = SimpleNamespace(total_memory=TOTAL)
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(cuda, "get_per_process_memory_fraction", lambda device: allowed[-1])
    monkeypatch.setattr(
        cuda, "set_per_process_memory_fraction", lambda part, device: allowed.append(part)
    )
    yield allowed
    gc.collect()
    assert not own._CAPS


def test_a_cap_lasts_as_long_as_its_holder(fractions: list[float]) -> None:
    """Of several the least counts, and in the end what was allowed before."""
    first, second, third = Holder(), Holder(), Holder()
    hold_cap(GPU, 40 * GIB, first)
    hold_cap(GPU, 20 * GIB, second)
    hold_cap(GPU, 79 * GIB, third)
    del second
    del first
    del third
    assert fractions == [0.75, 0.5, 0.25, 0.25, 0.5, 0.75, 0.75]


def told() -> str:
    return "graph 0: plenty"


def call(x: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("capped", [True, False])
def test_an_error_of_the_forward_says_what_is_planned(capped: bool, fractions: list[float]) -> None:
    run = explained(call, GPU, 40 * GIB, told, capped=capped)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(torch.ones(2))
    message = str(caught.value)
    if not capped:
        said = "The memory budget is 40.00 GiB. Of it, this was planned: graph 0: plenty"
        assert said in message
        return
    assert message.startswith("CUDA out of memory.\nThe allocator was held to the memory budget of")
    assert "40.00 GiB, because of enforce=True. graph 0: plenty\nWhat to do: " in message


@torch.library.custom_op("fxremat_tests::no_memory", mutates_args=())
def no_memory(x: Tensor) -> Tensor:
    """Runs out of memory unless it is given zeros."""
    if x.any():
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return x.clone()


@torch.library.custom_op("fxremat_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


no_memory.register_fake(torch.empty_like)
twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: no_memory(gradient))


def test_an_error_of_the_backward_says_it_too(fractions: list[float]) -> None:
    compiled: Callable[[Tensor], Tensor] = torch.compile(
        lambda x: twice(x).sin(), backend="aot_eager"
    )
    run = explained(compiled, GPU, 40 * GIB, told, capped=True)
    x = torch.ones(2, requires_grad=True)
    run(x).backward(torch.zeros(2))
    with pytest.raises(torch.OutOfMemoryError, match="graph 0: plenty"):
        run(x).sum().backward()
    assert not own._IN_BACKWARD
    run(x).backward(torch.zeros(2))
    assert not own._IN_BACKWARD


def test_errors_of_other_backwards_stay_as_they_are(fractions: list[float]) -> None:
    explained(torch.sin, GPU, 40 * GIB, told, capped=True)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\.$"):
        twice(x).sum().backward()


@pytest.mark.usefixtures("fresh")
def test_a_graph_runs_under_a_cap_if_that_is_asked_for(
    fractions: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says is the table of its report."""
    model, x = seeded(Stack, 64, 32)
    found: list[Any] = []

    def under_cap(in_step: Any, call: Any) -> Any:
        in_step.graph.options = replace(in_step.graph.options, enforce=True)
        run = plain(in_step, call)
        found.append((call, run))
        return run

    plain = backend._under_cap
    monkeypatch.setattr(backend, "_under_cap", under_cap)
    options: dict[str, Any] = {"memory_budget": "8GiB", "executor": "aot_eager", "solver": "greedy"}
    torch.compile(model, backend="fxremat", options=options)(x).sum().backward()
    [(call, run)] = found
    assert run is not call
    assert fractions == [0.75, 0.1]
    cells = (cell.cell_contents for cell in run.__closure__)
    explain = next(each for each in cells if getattr(each, "__name__", "") == "explain")
    error, report = torch.OutOfMemoryError("CUDA out of memory."), fxremat.reports()[-1]
    explain(error)
    assert f"because of enforce=True. graph {report.graph}: " in str(error)
    assert report.at_peak[0].what in str(error)
    del cells, explain
    torch._dynamo.reset()
    found.clear()
    del call, run
    gc.collect()
    assert fractions[-1] == 0.75

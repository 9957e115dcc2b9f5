"""A budget as the cap of CUDA's allocator, and the errors that come of it."""

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
from fxremat.memory import enforced as own
from fxremat.memory.enforced import enforced, hold_cap
from fxremat.sizes import GIB
from tests.small import Stack, seeded

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


def test_an_error_of_the_forward_says_what_is_planned(fractions: list[float]) -> None:
    def call(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    run = enforced(call, GPU, 40 * GIB, told)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(torch.ones(2))
    message = str(caught.value)
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
    run = enforced(compiled, GPU, 40 * GIB, told)
    x = torch.ones(2, requires_grad=True)
    run(x).backward(torch.zeros(2))
    with pytest.raises(torch.OutOfMemoryError, match="graph 0: plenty"):
        run(x).sum().backward()
    assert not own._IN_BACKWARD
    run(x).backward(torch.zeros(2))
    assert not own._IN_BACKWARD


def test_errors_of_other_backwards_stay_as_they_are(fractions: list[float]) -> None:
    enforced(torch.sin, GPU, 40 * GIB, told)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\.$"):
        twice(x).sum().backward()


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
    planned = next(
        cell.cell_contents.planned()
        for cell in run.__closure__
        if isinstance(cell.cell_contents, own._Running)
    )
    report = fxremat.reports()[-1]
    assert planned.startswith(f"graph {report.graph}: ")
    assert report.at_peak[0].what in planned
    torch._dynamo.reset()
    found.clear()
    del call, run
    gc.collect()
    assert fractions[-1] == 0.75

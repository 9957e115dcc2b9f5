"""Kernels and their order in Inductor's scheduler."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import scheduler

from fxremat.compat.configuration import SCHEDULER_PASS
from fxremat.compat.inductor import generated_code, scheduling
from fxremat.compat.inductor.scheduling import (
    Footprint,
    Scheduled,
    allocate_at_places,
    names_being_scheduled,
    run_after,
    run_in_functions,
    scheduled,
)
from tests.compat_graphs import Shared
from tests.graphs import batch
from tests.small import forward_code


class Apart(nn.Module):
    """Two loops that have nothing in common."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(100))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.exp(), self.w.sin()


def test_run_in_functions() -> None:
    """Functions end where it is said, and what a loop allocates and frees is told."""
    seen: list[list[Footprint]] = []

    def functions(ends: set[int]) -> int:
        def last_of(loops: list[Footprint]) -> set[int]:
            seen.append(loops)
            return ends

        def divide(nodes: list[Any]) -> list[Any]:
            run_in_functions(nodes, last_of)
            return nodes

        code = forward_code(Apart(), batch(32, 64), **{SCHEDULER_PASS: divide})
        return code.count("async_compile.cpp_pybinding(")

    assert [functions(set()), functions({0})] == [1, 2]
    loops = [loop for loops in seen for loop in loops]
    assert {loop.allocated for loop in loops} == {32 * 64 * 4, 100 * 4}


def test_scheduled_and_run_after() -> None:
    """What kernels are, and an order that no data asks for."""
    seen: list[list[Scheduled]] = []
    names: list[str] = []

    def backwards(nodes: list[Any]) -> list[Any]:
        seen.append([scheduled(node) for node in nodes])
        names.extend(names_being_scheduled())
        run_after(nodes, {len(nodes) - 1: [0]})
        return nodes

    forward_code(Shared(), batch(32, 64), **{SCHEDULER_PASS: backwards})
    (kernels,) = seen
    assert [k.is_call for k in kernels] == [False, True, True, False]
    assert [k.is_loop for k in kernels] == [True, False, False, True]
    assert {k.written for k in kernels} == {32 * 64 * 4}
    assert kernels[0].read == 32 * 64 * 4
    assert any(name.startswith("mm") for name in names)


class Layers(nn.Module):
    """Layers with library calls between loops that all read one table."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.norm = nn.LayerNorm(64)
        self.register_buffer("table", torch.rand(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(self.norm(x) * self.table).relu()
        x = torch.cat([x[:16] * self.table, x[16:]])
        return torch.zeros(8, 64).index_put((x.sum(1).long() % 8,), x, accumulate=True)


def test_only_loops_that_are_never_fused_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the code is the same byte for byte."""
    inductor: Any = scheduler.Scheduler
    asked, can_fuse = list[tuple[bool, bool]](), inductor.can_fuse

    def asks(self: Any, first: Any, second: Any, *args: Any, **kwargs: Any) -> bool:
        apart = scheduling._are_apart(self, first, second)
        asked.append((apart, can_fuse(self, first, second, *args, **kwargs)))
        return asked[-1][1]

    def code_of(model: nn.Module) -> str:
        numbered, _, code = forward_code(model, batch(32, 64)).partition("\n")
        assert numbered.startswith("# AOT ID")
        return code

    for model in (Layers(), Shared()):
        near = code_of(model)
        with monkeypatch.context() as patch:
            patch.setattr(inductor, "can_fuse", asks)
            patch.setattr(generated_code, "far_loops_apart", nullcontext)
            assert code_of(model) == near
    assert inductor.can_fuse is can_fuse
    assert {apart for apart, fused in asked if fused} == {False}
    assert sum(apart for apart, _ in asked) > 10


@pytest.mark.parametrize("partitions", [False, True])
def test_code_allocates_at_places(partitions: bool) -> None:
    """The code says so itself, of the function that is called from outside."""

    why: list[str | None] = []

    def place(nodes: list[Any]) -> list[Any]:
        why.append(allocate_at_places())
        return nodes

    def code(**options: Any) -> str:
        return forward_code(Apart(), batch(32, 64), **{SCHEDULER_PASS: place}, **options)

    call = "Runner.call" if partitions else "call"
    written = code(graph_partition=partitions)
    assert f"{call} = forward_at_places({call})" in written
    assert "import empty_strided_cpu, empty_strided_cuda, forward_at_places" in written
    assert "at_places" not in code(**{"triton.cudagraphs": True})
    assert why[0] is None
    assert "CUDA graph" in str(why[-1])

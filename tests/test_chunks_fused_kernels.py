"""Fused stages: the same values, memory to the byte, one call where there were many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from fxremat.compat.inductor import kernels as kernels_of_inductor
from fxremat.memory.measured_peak import measure_peak
from fxremat.passes.variants.chunks.rules import CHUNKED_ATTENTION, CHUNKED_LOSS, CHUNKED_MLP
from fxremat.runtime import kernels
from fxremat.runtime.chunks import fused_kernels
from fxremat.runtime.chunks.operator import ROWS
from tests.graphs import calls
from tests.loss_program import CLASSES, SIZES, expected, inputs, program, run
from tests.row_nets import STEPS, traced_step
from tests.row_sites import real, taken
from tests.slowness import slow_but
from tests.variants import sites

NUMBER_BYTES = 12
"""A number that stands beside a tensor, in the last rows: counted as if beside a partial sum."""


def assert_close(found: list[torch.Tensor], best: list[torch.Tensor], rough: float = 1e-5) -> None:
    for one_, other in zip(found, best, strict=True):
        scale = float(other.abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(one_.double(), other.double(), rtol=rough, atol=rough * scale)


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        *((sizes, torch.float32) for sizes in SIZES),
        *(pytest.param(sizes, torch.bfloat16, marks=pytest.mark.slow) for sizes in SIZES),
    ],
)
def test_kernels_compute_what_the_operators_do(
    sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    count, chunk, tile = sizes
    given = inputs(count, dtype)
    found, alone = run(given, chunk, tile, fused=True), run(given, chunk, tile)
    assert [t.dtype for t in found] == [t.dtype for t in alone]
    assert_close(found, expected(*given), 1e-5 if dtype == torch.float32 else 2e-2)


def test_adding_at_an_index_as_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: one loop over all elements, and no memory for the row that is added to."""
    x, y, w = tensors = inputs(64)
    shapes = tuple(fused_kernels.Shape.of(t) for t in (x, y, w.t(), w))
    begin = fused_kernels._KernelWriter.__post_init__

    def compares(writer: Any) -> None:
        begin(writer)
        writer.by_comparison = True

    fused_kernels.kernels_of.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(fused_kernels._KernelWriter, "__post_init__", compares)
        [kernel] = filter(None, fused_kernels.kernels_of(program(), shapes, 16))
        assert_close(run(tensors, 16, 16, fused=True), expected(*tensors))
    fused_kernels.kernels_of.cache_clear()
    assert kernel.scratch <= 4 * CLASSES + 4 * 16 * 4  # a sum over rows, a few numbers a row


def assert_fused_is_right(call: fx.Node) -> None:
    """Values and memory of a call of a graph, with kernels."""
    torch.manual_seed(0)
    args = [real(a) for a in fx.map_arg(call.args, lambda n: n.meta["val"])]
    found = ROWS(*args, fused=True)
    assert_close(found, ROWS(*args))
    made = sum(t.nbytes for t in found)
    peak = measure_peak(lambda: ROWS(*args, fused=True)).above_start_bytes
    too_much = kernels.WORKSPACES[ROWS](*args, fused=True, measure=kernels.unmeasured) - (
        peak - made
    )
    assert too_much in (0, NUMBER_BYTES)


@pytest.mark.parametrize("name", slow_but(["loss", "gated"], STEPS))
def test_calls_of_real_graphs(name: str) -> None:
    """50 rows: the last tile is not a whole one, and runs operator by operator."""
    joint, tried = traced_step(name), 0
    for rule in (CHUNKED_LOSS, CHUNKED_MLP, CHUNKED_ATTENTION):
        for site in sites(rule, joint)[:1]:
            for call in calls(taken(joint, site).module.graph, ROWS):
                assert_fused_is_right(call)
                tried += 1
    assert tried


def test_a_fused_stage_is_one_call() -> None:
    """Nothing but matmuls, and what cuts rows out, is called from Python."""
    from torch.profiler import ProfilerActivity, profile

    given = inputs(64)
    run(given, 16, 16, fused=True)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run(given, 16, 16, fused=True)
    names = {event.key for event in seen.key_averages()}
    assert {"aten::mm", "aten::addmm"} <= names
    assert not names & {"aten::exp", "aten::sub", "aten::amax", "aten::sum", "aten::gather"}


def test_a_stage_that_inductor_cannot_write_runs_operator_by_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_: Any) -> int:
        raise KeyError("buf0")

    given = inputs(64)
    fused_kernels.kernels_of.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr("fxremat.runtime.chunks.fused_kernels.unbuilt_kernel", fails)
        patch.setattr("fxremat.runtime.chunks.fused_kernels.kernel_key", lambda _: None)
        assert_close(run(given, 16, 4, fused=True), expected(*given))
    fused_kernels.kernels_of.cache_clear()


def test_what_a_kernel_allocates_is_asked_once_for_all_processes_that_share_a_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, written = inputs(80), list[Any]()
    unbuilt = kernels_of_inductor.unbuilt_kernel

    def counted(module: Any) -> Any:
        written.append(module)
        return unbuilt(module)

    monkeypatch.setattr("fxremat.runtime.chunks.fused_kernels.unbuilt_kernel", counted)
    for _ in range(2):
        fused_kernels.kernels_of.cache_clear()
        assert_close(run(given, 16, 16, fused=True), expected(*given))
        known, written[:] = len(written), []
    assert known == 0


def test_time_counts_one_call_for_each_tile() -> None:
    x, y, w = inputs(64)
    args = ([x, y], [w.t(), w], program(), 16, 4)
    inside = kernels.INSIDE[ROWS]
    fused = inside(*args, on_cpu=True, by_inductor=True)
    matmuls = 4 * 3
    assert fused.calls == matmuls + 16
    assert fused.bytes < inside(*args, on_cpu=True).bytes
    assert fused.bytes > 64 * CLASSES * 4 * 2  # logits in and d_logits out, at the least

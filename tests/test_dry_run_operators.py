"""Operators of ours in a dry run on CUDA: allocation by allocation, as they will run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxremat.compat.tensors import without_memory
from fxremat.compile.dry_run.meter import CodeMeter
from fxremat.core.events import Allocate, Free
from fxremat.cost.cuda_scratch import CudaScratch
from fxremat.cost.workspaces import Workspaces
from fxremat.memory.allocator_settings import MIN_BLOCK_BYTES, round_up
from fxremat.runtime import kernels
from fxremat.runtime.chunks.buffers import adds_straight, extra_of_sum
from fxremat.runtime.chunks.operator import ROWS
from fxremat.runtime.chunks.program import parse
from fxremat.whatif.device import absent
from tests.loss_program import CLASSES, FEATURES, program

BF16 = torch.bfloat16


def meter() -> CodeMeter:
    """Of CUDA."""
    return CodeMeter(device="cuda", workspace=CudaScratch().blocks_of_call)


def loss_on_cuda(count: int, chunk: int, *, fused: bool) -> tuple[Any, ...]:
    """Arguments of the operator, without memory."""
    x = torch.empty(count, FEATURES, dtype=BF16, device="cuda")
    y = torch.zeros(count, 1, dtype=torch.int64, device="cuda")
    w = torch.empty(CLASSES, FEATURES, dtype=BF16, device="cuda")
    return [x, y], [w.t(), w], program(BF16, "cuda"), chunk, chunk, fused


@pytest.mark.parametrize("fused", [False, True])
def test_events_have_the_peak_that_the_operator_declares(fused: bool) -> None:
    """The results come first, each with its own memory; all else is freed at the end."""
    count, chunk = 4096, 1024
    with absent("H100"), without_memory():
        args = loss_on_cuda(count, chunk, fused=fused)
        declared = kernels.WORKSPACES[ROWS](*args, measure=CudaScratch().of_call)
        found = meter().inside(ROWS, args, {})
        results = [t.untyped_storage().nbytes() for t in ROWS(*args)]
    assert found is not None
    live: dict[str, int] = {}
    current = peak = 0
    for event in found.events:
        if isinstance(event, Allocate):
            live[event.name] = round_up(event.nbytes, MIN_BLOCK_BYTES)
            current += live[event.name]
            peak = max(peak, current)
        elif isinstance(event, Free):
            current -= live.pop(event.name)
    assert sorted(live) == sorted(str(name) for name in found.results)
    assert [live[str(name)] for name in found.results] == [
        round_up(size, MIN_BLOCK_BYTES) for size in results
    ]
    assert found.scratch == peak - current
    assert 0 <= found.scratch - declared <= 20 * MIN_BLOCK_BYTES  # rounded up, each


def test_products_add_to_the_sum_in_float32() -> None:
    """On CUDA no partial sum exists: beside the result, in low precision, the sum so far."""
    one = next(s for s in parse(program(BF16)).loop if s.kind == "sum")
    size = CLASSES * FEATURES
    assert adds_straight(one, "cuda")
    assert not adds_straight(one, "cpu")
    assert extra_of_sum(one, "cuda") == 4 * size
    assert extra_of_sum(one, "cpu") == (4 + 4 + 2) * size


def test_a_dry_run_names_the_results_of_an_operator() -> None:
    """What it freed inside is gone; its results are freed when the code drops them."""
    with absent("H100"), without_memory():
        args = loss_on_cuda(2048, 512, fused=False)
        outer = meter()
        outer.ignore([*args[0], *args[1]])
        made = ROWS(*args)
        outer.call(ROWS, args, {}, made)
        held = outer.current
        assert held == sum(round_up(t.untyped_storage().nbytes(), MIN_BLOCK_BYTES) for t in made)
        assert outer.peak > held
        del made
        outer.sweep()
    allocated = [event.name for event in outer.events if isinstance(event, Allocate)]
    freed = [event.name for event in outer.events if isinstance(event, Free)]
    assert outer.current == 0
    assert sorted(allocated) == sorted(freed)
    assert len(set(allocated)) == len(allocated)


def test_an_operator_that_looks_at_its_data_is_one_block() -> None:
    target = ROWS
    with absent("H100"), without_memory():
        args = loss_on_cuda(2048, 512, fused=False)

        def looks(*_: Any, **__: Any) -> Any:
            return [float(args[0][0].sum())]

        before = kernels.IMPLEMENTATIONS[target]
        kernels.IMPLEMENTATIONS[target] = looks
        try:
            assert meter().inside(target, args, {}) is None
        finally:
            kernels.IMPLEMENTATIONS[target] = before


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_values_and_bytes_on_a_gpu(fused: bool) -> None:
    """Against float64, and what the allocator says against what the operator declares."""
    from fxremat.memory.measured_peak import measure_call
    from tests.loss_program import expected, inputs

    x, y, w = (t.cuda() for t in inputs(4096, BF16))
    args = ([x, y], [w.t(), w], program(BF16, "cuda"), 1024, 1024, fused)
    found = ROWS(*args)
    for one, best in zip(found, expected(x.cpu(), y.cpu(), w.cpu()), strict=True):
        assert (one.cpu().double() - best).abs().max() <= 2e-2 * best.abs().max()
    made = sum(round_up(t.nbytes, MIN_BLOCK_BYTES) for t in found)
    del found
    declared = kernels.WORKSPACES[ROWS](*args, measure=Workspaces(x.device).of_call)
    torch.cuda.empty_cache()  # a free block that is a little larger would count in full
    above = measure_call(lambda: ROWS(*args), x.device) - made
    assert 0 <= above - declared <= 20 * MIN_BLOCK_BYTES

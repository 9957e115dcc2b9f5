"""The operator that runs a program over rows: values, memory to the byte, flops, odd sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from fxremat.memory.measured_peak import measure_peak
from fxremat.runtime import kernels
from fxremat.runtime.chunks.buffers import MATMULS
from fxremat.runtime.chunks.operator import ROWS
from fxremat.runtime.chunks.program import Program, Ref, dump, parse
from tests.loss_program import CLASSES, FEATURES, SIZES, expected, inputs, one, program, run


@given(st.integers(0, 40), st.integers(1, 50), st.integers(1, 20))
def test_any_split_gives_the_same(count: int, chunk: int, tile: int) -> None:
    found = run(inputs(count), chunk, tile)
    for one_, other in zip(found, expected(*inputs(count)), strict=True):
        assert torch.allclose(one_.double(), other, atol=1e-4, rtol=1e-5)


def test_low_precision_is_added_up_in_float32() -> None:
    """A thousand chunks of bfloat16: the sums are as good as one matmul's."""
    given_ = inputs(1000, torch.bfloat16)
    found, best = run(given_, 1, 1), expected(*given_)
    for one_, other in zip(found, best, strict=True):
        assert (one_.double() - other).abs().max() <= 2e-2 * other.abs().max()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("fused", [False, True])
def test_memory_is_known_to_the_byte(sizes: tuple[int, int, int], fused: bool) -> None:
    """Matmuls of low precision may take scratch memory of their own, on some processors."""
    count, chunk, tile = sizes
    given_ = inputs(count)
    made = sum(t.nbytes for t in run(given_, chunk, tile, fused=fused))
    peak = measure_peak(lambda: run(given_, chunk, tile, fused=fused)).above_start_bytes
    x, y, w = given_
    args = ([x, y], [w.t(), w], program(), chunk, tile, fused)
    assert kernels.WORKSPACES[ROWS](*args, measure=kernels.unmeasured) == peak - made


def test_flops_are_those_of_the_matmuls() -> None:
    with FlopCounterMode(display=False) as counted:
        run(inputs(32), 8, 4)
    assert counted.get_total_flops() == 3 * 2 * 32 * FEATURES * CLASSES


def test_fake_results_are_alike_and_nothing_given_is_written() -> None:
    x, y, w = inputs(20, torch.bfloat16)
    args = ([x, y], [w.t(), w], program(torch.bfloat16), 8, 4)
    torch.library.opcheck(ROWS, args, test_utils=("test_schema", "test_faketensor"))


def test_it_runs_under_inductor() -> None:
    def step(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> Any:
        found = ROWS([x * 2, y], [w.t(), w], program(), 8, 4)
        return found[1] + x

    given_ = inputs(20)
    compiled = torch.compile(step)
    assert torch.allclose(compiled(*given_), step(*given_), atol=1e-5)


def test_every_chunk_reads_the_weights_anew() -> None:
    """And a GPU the sum that it adds to."""
    x, y, w = inputs(8)

    def again(chunk: int, on_cpu: bool) -> int:
        call = kernels.INSIDE[ROWS]
        return call([x, y], [w.t(), w], program(), chunk, chunk, on_cpu=on_cpu).again

    matmuls = [one for one in parse(program()).loop if one.op in MATMULS]
    read = sum(any(n in (2, 3) for n in one.reads) for one in matmuls) * w.nbytes
    added = sum(2 * one.numel * w.itemsize for one in matmuls if one.kind == "sum")
    assert read > 0
    assert again(8, True) == again(8, False) == 0
    assert again(2, True) == 3 * read
    assert again(2, False) == 3 * (read + added)


def test_what_a_tile_moves_stays_in_the_cache() -> None:
    x, y, w = inputs(8)
    of_chunks, of_tiles = (
        kernels.INSIDE[ROWS]([x, y], [w.t(), w], program(), 8, tile, on_cpu=True) for tile in (8, 2)
    )
    assert of_tiles.bytes < of_chunks.bytes
    assert of_tiles.calls > of_chunks.calls
    elsewhere = kernels.INSIDE[ROWS]([x, y], [w.t(), w], program(), 8, 2, on_cpu=False)
    assert elsewhere == of_chunks


def test_an_operator_with_a_temporary_is_known_to_the_byte() -> None:
    """A fused multiplication and addition makes its product on the way."""
    pytest.importorskip("torch._inductor.inductor_prims")  # which registers it
    if not hasattr(torch.ops.prims, "fma"):
        pytest.skip("this torch has no such operator")
    steps = (one("prims.fma.default", Ref(0), Ref(0), Ref(0), row_shape=(CLASSES,)),)
    text = dump(Program(1, 0, (), steps, (1,)))
    x = torch.randn(64, CLASSES)

    def call() -> list[torch.Tensor]:
        found: list[torch.Tensor] = ROWS([x], [], text, 16, 16)
        return found

    peak = measure_peak(call).above_start_bytes
    assert peak == x.nbytes + kernels.WORKSPACES[ROWS](
        [x], [], text, 16, 16, measure=kernels.unmeasured
    )
    torch.testing.assert_close(call()[0], x * x + x)

"""Fused stages: the same values, the memory that was planned, one call where there were many."""

from __future__ import annotations

import pytest
import torch

from fxremat.measure import measure_peak
from fxremat.runtime import kernels
from fxremat.runtime.chunks import ROWS
from tests.test_chunks import expected, inputs, program

SIZES = [(64, 16, 4), (64, 64, 64), (50, 16, 5), (7, 3, 2), (0, 4, 4)]


def run(
    given_: tuple[torch.Tensor, ...], chunk: int, tile: int, fused: bool = True
) -> list[torch.Tensor]:
    x, y, w = given_
    found: list[torch.Tensor] = ROWS([x, y], [w.t(), w], program(x.dtype), chunk, tile, fused)
    return found


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_compute_what_the_operators_do(
    sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    count, chunk, tile = sizes
    given_ = inputs(count, dtype)
    alone = run(given_, chunk, tile, fused=False)
    rough = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other, best in zip(run(given_, chunk, tile), alone, expected(*given_), strict=True):
        assert one.dtype == other.dtype
        scale = float(best.abs().max()) if best.numel() else 0.0
        assert torch.allclose(one.double(), best, rtol=rough, atol=rough * scale)


@pytest.mark.parametrize("sizes", SIZES)
def test_memory_is_known(sizes: tuple[int, int, int]) -> None:
    count, chunk, tile = sizes
    x, y, w = given_ = inputs(count)
    made = sum(t.nbytes for t in run(given_, chunk, tile))
    peak = measure_peak(lambda: run(given_, chunk, tile)).above_start_bytes
    args = ([x, y], [w.t(), w], program(), chunk, tile)
    fused = kernels.WORKSPACES[ROWS](*args, fused=True)
    assert fused == peak - made

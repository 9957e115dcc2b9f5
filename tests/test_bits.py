"""Packed bits and narrow numbers: what went in comes out, and scratch memory is as stated."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxremat.measure import measure_peak
from fxremat.runtime import bits
from fxremat.runtime.kernels import INSIDE, WORKSPACES, Inside


def strided(shape: list[int], order: list[int], steps: list[int], seed: int = 0) -> torch.Tensor:
    """Random bools whose dimensions lie in memory in any order, with gaps of any size."""
    generator = torch.Generator().manual_seed(seed)
    made = [shape[d] * steps[d] for d in order]
    whole = torch.rand(made, generator=generator) > 0.5
    back = whole.permute([order.index(d) for d in range(len(order))])
    for dim, step in enumerate(steps):
        back = back[(slice(None),) * dim + (slice(None, None, step),)]
    return back


@st.composite
def masks(draw: st.DrawFn) -> torch.Tensor:
    """Masks of any shape and strides."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    steps = draw(st.lists(st.integers(1, 2), min_size=len(shape), max_size=len(shape)))
    return strided(shape, list(order), steps, draw(st.integers(0, 99)))


@given(masks())
def test_packing_and_back(x: torch.Tensor) -> None:
    packed = bits.pack_bits(x)
    assert packed.dtype == torch.uint8
    assert packed.shape == ((x.numel() + 7) // 8,)
    assert torch.equal(bits.unpack_bits(packed, [x.numel()]), bits.flat(x))


@given(masks())
def test_in_the_order_of_memory_nothing_is_copied(x: torch.Tensor) -> None:
    assert torch.equal(bits.flat(x), x.reshape(-1))
    order = bits.storage_order(x.shape, x.stride())
    if order is not None and x.numel():
        assert bits.flat(x.permute(order)).data_ptr() == x.data_ptr()
        assert bits.copied_bytes(x.permute(order)) == 0


def test_bits_stand_in_order() -> None:
    x = torch.tensor([True, False, False, True, False, False, False, False, True])
    assert bits.pack_bits(x).tolist() == [9, 1]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3, 5)])
def test_unpacked_in_a_shape(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape) > 0.5
    assert torch.equal(bits.unpack_bits(bits.pack_bits(x), list(shape)), x)


def test_fake_results_are_alike() -> None:
    x = torch.rand(3, 5) > 0.5
    torch.library.opcheck(bits.pack_bits, (x,))
    torch.library.opcheck(bits.unpack_bits, (bits.pack_bits(x), [3, 5]))
    torch.library.opcheck(bits.narrowed, (torch.rand(5, 3).t(), torch.bfloat16))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000, 8 * bits.CHUNK + 3])
@pytest.mark.parametrize("gaps", [False, True])
def test_scratch_memory_is_as_stated(count: int, gaps: bool) -> None:
    x = (torch.rand(count, 2) > 0.5)[:, 0] if gaps else torch.rand(count) > 0.5
    packed = bits.pack_bits(x)
    peak = measure_peak(lambda: bits.pack_bits(x)).above_start_bytes
    assert peak - packed.numel() == WORKSPACES[bits.pack_bits](x)
    peak = measure_peak(lambda: bits.unpack_bits(packed, [count])).above_start_bytes
    assert peak - count == WORKSPACES[bits.unpack_bits](packed, [count])


def test_narrowed_is_a_copy() -> None:
    x = torch.arange(100).view(4, 25)[:, ::3]
    found = bits.narrowed(x, torch.int8)
    assert found.dtype == torch.int8
    assert torch.equal(found.long(), x)
    assert bits.narrowed(x, torch.int64).data_ptr() != x.data_ptr()
    peak = measure_peak(lambda: bits.narrowed(x, torch.int8)).above_start_bytes
    assert peak == found.numel()


def test_pictures_are_transposed_for_the_operators() -> None:
    """On a CPU, under Inductor: that takes longer than packing itself."""
    flat_ = torch.ones(1 << 20, dtype=torch.bool)
    picture, inside = flat_.view(16, 16, 64, 64), INSIDE[bits.pack_bits]
    cheap = inside(flat_, on_cpu=True, by_inductor=True)
    assert inside(picture, on_cpu=True, by_inductor=False) == cheap
    dear = inside(picture, on_cpu=True, by_inductor=True)
    assert dear.calls == cheap.calls == 3 * 17
    assert dear.bytes > 100 * cheap.bytes
    back = INSIDE[bits.unpack_bits](bits.pack_bits(flat_), [16, 16, 64, 64], on_cpu=True)
    assert back == cheap
    assert inside(picture, on_cpu=False, by_inductor=True) == Inside(0, 0)

"""Floats in fewer bits: errors within the stated bounds, no bias, nothing random but the seed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxremat.memory.measured_peak import measure_peak
from fxremat.runtime import quantised

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 2, 127, 128, 129, 1000, quantised.CHUNK + 5]


def values(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random values of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-3, 3, count, dtype=torch.float64)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * scale).to(dtype)


Made = tuple[torch.Tensor, torch.Tensor]


def decoded(made: Made, bits: int, count: int) -> torch.Tensor:
    """Codes back to values, written plainly."""
    codes, scales = made
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).reshape(-1, quantised.BLOCK)
    return (codes.double() * scales[0, :, None] + scales[1, :, None]).reshape(-1)[:count]


def ranges(x: torch.Tensor) -> torch.Tensor:
    """For each value, the range of its block."""
    x = x.double()
    blocks = [x[start : start + quantised.BLOCK] for start in range(0, len(x), quantised.BLOCK)]
    return torch.cat([x[:0], *((b.max() - b.min()).expand(len(b)) for b in blocks)])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", SIZES)
def test_error_is_below_a_step(count: int, dtype: torch.dtype, bits: int) -> None:
    x = values(count, dtype)
    codes, scales = quantised.quantised(x, bits, 3)
    error = (decoded((codes, scales), bits, count) - x.double()).abs()
    step = ranges(x) / (2**bits - 1)
    rounding = torch.finfo(scales.dtype).eps * (x.double().abs() + ranges(x)) * 4
    assert bool((error <= step + rounding).all())


@pytest.mark.parametrize("bits", [8, 4])
def test_the_mean_over_seeds_is_the_value(bits: int) -> None:
    x = values(256)
    seeds = 2000
    total = torch.zeros(256, dtype=torch.float64)
    for seed in range(seeds):
        total += decoded(quantised.quantised(x, bits, seed), bits, 256)
    step = ranges(x) / (2**bits - 1)
    # A value is off by a step at most, so its variance is a quarter of a step squared at most;
    # five standard deviations of the mean.
    assert bool(((total / seeds - x.double()).abs() <= 5 * step / 2 / seeds**0.5 + 1e-4).all())


def test_the_users_generator_is_not_touched_and_calls_repeat() -> None:
    x = values(1000)
    before = torch.get_rng_state()
    first, second = (
        (*quantised.quantised(x, 8, 1), *quantised.sketch(x.view(100, 10), 7, 1)) for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ["8", "4", "fp8"])
def test_what_is_not_finite_is_seen(bad: float, kind: str) -> None:
    x = values(300)
    x[140] = bad
    if kind == "fp8":
        codes, scale = quantised.as_fp8(x)
        found = (codes.float() * scale[:, None]).reshape(-1)[:300]
    else:
        found = decoded(quantised.quantised(x, int(kind), 0), int(kind), 300)
    assert bool(found[128:256].isnan().any())
    assert bool(found[:128].isfinite().all())
    assert bool(found[256:].isfinite().all())


@pytest.mark.parametrize("value", [0.0, -3.25, 1e-30])
def test_a_constant_block_is_exact(value: float) -> None:
    x = torch.full((200,), value)
    assert torch.equal(decoded(quantised.quantised(x, 4, 0), 4, 200).float(), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", SIZES)
def test_fp8_error(count: int, dtype: torch.dtype) -> None:
    x = values(count, dtype)
    codes, scales = quantised.as_fp8(x)
    found = (codes.double() * scales.double()[:, None]).reshape(-1)[:count]
    scale = scales.double()[:, None].expand(-1, quantised.BLOCK).reshape(-1)[:count]
    bound = torch.maximum(x.double().abs() / 16, scale * 2**-10)
    assert bool(((found - x.double()).abs() <= bound * (1 + 1e-5)).all())


@given(st.lists(st.integers(1, 6), min_size=2, max_size=4), st.integers(0, 99))
def test_any_strides(shape: list[int], seed: int) -> None:
    x = values(int(torch.tensor(shape).prod()), seed=seed).view(shape)
    for view in (x, x.transpose(0, -1), x[..., ::2]):
        plain = quantised.flat(view).clone()
        for found, expected in (
            (quantised.quantised(view, 8, 1), quantised.quantised(plain, 8, 1)),
            (quantised.as_fp8(view), quantised.as_fp8(plain)),
        ):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_fake_results_are_alike() -> None:
    x = torch.randn(6, 50).t()
    torch.library.opcheck(quantised.quantised, (x, 4, 1))
    torch.library.opcheck(quantised.as_fp8, (x,), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(quantised.narrowed, (torch.rand(5, 3).t(), torch.bfloat16))
    torch.library.opcheck(quantised.sketch, (x, 5, 1))
    torch.library.opcheck(quantised.sketch_again, (x, 5, torch.tensor([7])))


def test_scratch_memory_does_not_grow() -> None:
    for count in (quantised.CHUNK, 4 * quantised.CHUNK):
        x = values(count)
        made = quantised.quantised(x, 8, 1)
        kept = sum(t.numel() * t.element_size() for t in made)
        peak = measure_peak(lambda x=x: quantised.quantised(x, 8, 1)).above_start_bytes  # type: ignore[misc]
        assert peak - kept <= quantised.BYTES_PER_ELEMENT * quantised.CHUNK


def test_narrowed_is_a_copy() -> None:
    x = torch.arange(100).view(4, 25)[:, ::3]
    found = quantised.narrowed(x, torch.int8)
    assert found.dtype == torch.int8
    assert torch.equal(found.long(), x)
    assert quantised.narrowed(x, torch.int64).data_ptr() != x.data_ptr()
    peak = measure_peak(lambda: quantised.narrowed(x, torch.int8)).above_start_bytes
    assert peak == found.numel()


def test_a_sketch_multiplies_with_signs() -> None:
    """The matrix that it multiplies with is the sketch of the identity."""
    matrix, salt = quantised.sketch(torch.eye(300), 40, 5)
    assert torch.allclose(matrix.abs(), torch.tensor(40**-0.5))
    x = torch.randn(300, 7)
    assert torch.allclose(quantised.sketch_again(x, 40, salt), matrix @ x, atol=1e-4)


def test_pieces_of_a_sketch_are_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(300, 7, dtype=torch.float64)
    whole, salt = quantised.sketch(x, 40, 5)
    monkeypatch.setattr(quantised, "CHUNK", 1000)
    assert torch.allclose(quantised.sketch_again(x, 40, salt), whole)


@pytest.mark.slow
def test_a_product_of_sketches_is_unbiased() -> None:
    x, y = (torch.randn(30, columns, dtype=torch.float64) for columns in (3, 4))
    found = []
    for seed in range(4000):
        small, salt = quantised.sketch(x, 10, seed)
        found.append(small.t() @ quantised.sketch_again(y, 10, salt))
    every = torch.stack(found)
    mean_error = (every.mean(0) - x.t() @ y).abs()
    assert bool((mean_error <= 5 * every.std(0) / len(found) ** 0.5).all())
    spread = float(every.sub(x.t() @ y).square().sum((1, 2)).mean())
    stated = float(x.square().sum() * y.square().sum()) / 10
    assert 0.7 * stated < spread < 1.5 * stated

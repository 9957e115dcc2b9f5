"""Floats in fewer bits, and random sketches: what is saved where gradients may be approximate.

**Blocks** (`quantised`): BLOCK values in the order of memory share a least value and a step. A
value becomes the number of steps above the least, rounded down after adding noise from [0, 1), so
it is unbiased and off by less than one step (ActNN, Chen et al. 2021, arXiv 2104.14129, section
3.2). The arithmetic is float32, or float64 for values of that type. A block that holds an infinity
or NaN gives NaN throughout.

**fp8** (`as_fp8`): BLOCK values share a scale, their largest magnitude divided by 448. The error is
at most 1/16 of the value, or 2**-10 scales where the value is tiny.

**Sketches** (`sketch`): ``S @ x`` for a matrix S of random signs, over the root of the number of
rows. ``E[S.T @ S]`` is the identity, so ``(S @ x).T @ (S @ y)`` is an unbiased estimate of
``x.T @ y`` (Bershatsky et al. 2022, arXiv 2201.13195, section 2). S is never stored.

**Noise** is a hash of a counter and a seed, mixed with the bits of some values: it takes nothing
from the user's generators, and a call that runs again gives the same.

A call works on pieces of `chunk_on` elements, and takes at most BYTES_PER_ELEMENT for each of one.
"""

from __future__ import annotations

import torch

from fxremat.core.constants import GPU_PIECE_ELEMENTS, TILE_BYTES
from fxremat.runtime.kernels import define, pieces

BLOCK = 128
"""A part of the format: values that share a scale."""
CHUNK = TILE_BYTES // 16
"""Elements of a piece on a CPU, of which a tile holds four 32-bit numbers each."""
BYTES_PER_ELEMENT = 27
"""The most that a call allocates beside its results: tests/test_quantised.py has torch count it."""
FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
_MASK, _WORD = 0xFFFFFFFF, 32  # of a uint32


def chunk_on(device: torch.device) -> int:
    """Elements of a piece: they stay in a CPU's cache; a GPU is busy for longer than a launch."""
    return CHUNK if device.type == "cpu" else GPU_PIECE_ELEMENTS


def flat(x: torch.Tensor) -> torch.Tensor:
    """The elements row by row: a view where memory has this order, else a copy."""
    return x.contiguous().view(-1)


# --- noise -------------------------------------------------------------------------------


def mixed(counter: torch.Tensor) -> torch.Tensor:
    """32 random bits for each int64 of ``counter``, which is overwritten.

    Two rounds of shift, xor and multiply on 32 bits. Both factors are below 2**31, so that no
    product leaves 63 bits.
    """
    counter.bitwise_and_(_MASK)
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        counter.bitwise_xor_(counter >> shift).mul_(factor).bitwise_and_(_MASK)
    return counter.bitwise_xor_(counter >> 15)


def salt_of(x: torch.Tensor, seed: int) -> torch.Tensor:
    """The seed and the bits of as many values of the flat ``x`` as a block has, in 32 bits.

    They tell one step of training from the next.
    """
    every = max(1, x.numel() // BLOCK)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    sample = x[::every][:BLOCK].contiguous().view(integer).to(torch.int64, copy=True)
    weight = torch.arange(sample.numel(), device=x.device).mul_(2).add_(1)
    total = sample.bitwise_and_(_MASK).mul_(weight).sum().reshape(1)
    return mixed(total.add_((seed * 0x2545F491 + 0x1B873593) & _MASK))


def _bits(start: int, end: int, salt: torch.Tensor) -> torch.Tensor:
    """32 random bits for each number of a range."""
    counter = torch.arange(start, end, device=salt.device)
    return mixed(mixed(counter.add_(0x9E3779B9)).bitwise_xor_(salt))


# --- blocks ------------------------------------------------------------------------------


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows(x: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Blocks of the flat ``x`` as rows, in float; the last is filled up with its last value."""
    piece = x[start * BLOCK : end * BLOCK].to(exact(x.dtype), copy=True)
    missing = (end - start) * BLOCK - piece.numel()
    if missing:
        piece = torch.cat([piece, piece[-1:].expand(missing)])
    return piece.view(-1, BLOCK)


def _quantised_like(x: torch.Tensor, bits: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = _blocks(x.numel())
    codes = x.new_empty((blocks, BLOCK * bits // 8), dtype=torch.uint8)
    return codes, x.new_empty((2, blocks), dtype=exact(x.dtype))


@define("(Tensor x, int bits, int seed) -> (Tensor, Tensor)", _quantised_like)
def quantised(x: torch.Tensor, bits: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = _quantised_like(x, bits, seed)
    x = flat(x)
    salt = salt_of(x, seed)
    for start, end in pieces(_blocks(x.numel()), chunk_on(x.device) // BLOCK):
        rows = _rows(x, start, end)
        least, largest = rows.aminmax(dim=1)
        step = (largest - least).div_(2**bits - 1)
        scales[0, start:end], scales[1, start:end] = step, least
        divisor = torch.where(step > 0, step, 1.0)
        noise = _bits(start * BLOCK, end * BLOCK, salt).bitwise_right_shift_(8).view(-1, BLOCK)
        noise = noise.to(rows.dtype).mul_(2.0**-24)  # in [0, 1)
        rows.sub_(least[:, None]).div_(divisor[:, None]).add_(noise).floor_()
        found = rows.nan_to_num_(0).clamp_(0, 2**bits - 1).to(torch.uint8)
        # of two codes of four bits in a byte, the first is in the lower half
        codes[start:end] = found if bits == 8 else found[:, 0::2] | (found[:, 1::2] << 4)
    return codes, scales


def _as_fp8_like(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = _blocks(x.numel())
    codes = x.new_empty((blocks, BLOCK), dtype=FP8)
    return codes, x.new_empty((blocks,), dtype=exact(x.dtype))


@define("(Tensor x) -> (Tensor, Tensor)", _as_fp8_like)
def as_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = _as_fp8_like(x)
    x = flat(x)
    for start, end in pieces(_blocks(x.numel()), chunk_on(x.device) // BLOCK):
        rows = _rows(x, start, end)
        scales[start:end] = scale = rows.abs().amax(dim=1).div_(FP8_LARGEST)
        divisor = torch.where(scale > 0, scale, 1.0)
        found = rows.div_(divisor[:, None]).clamp_(-FP8_LARGEST, FP8_LARGEST)
        codes[start:end] = found.to(FP8)
    return codes, scales


# --- sketches ----------------------------------------------------------------------------


def _signs(rows: int, start: int, end: int, salt: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Columns of S, transposed: a sign for each of ``rows``, for each column of a range."""
    words = -(-rows // _WORD)
    bits = _bits(start * words, end * words, salt)
    shifts = torch.arange(_WORD, device=salt.device)
    ones = (bits[:, None] >> shifts).bitwise_and_(1).view(end - start, words * _WORD)
    return ones[:, :rows].to(dtype).mul_(2 * rows**-0.5).sub_(rows**-0.5)


def sketch_with(x: torch.Tensor, rows: int, salt: torch.Tensor) -> torch.Tensor:
    """``S @ x``, summed in float32 or better."""
    total = x.new_zeros((rows, x.shape[1]), dtype=exact(x.dtype))
    for start, end in pieces(x.shape[0], max(1, chunk_on(x.device) // rows)):
        signs = _signs(rows, start, end, salt, total.dtype)
        total.addmm_(signs.t(), x[start:end].to(total.dtype))
    return total.to(x.dtype)


def _sketch_flops(x: list[int], rows: int, *_: object, **__: object) -> int:
    return 2 * rows * x[0] * x[1]


@define(
    "(Tensor x, int rows, int seed) -> (Tensor, Tensor)",
    lambda x, rows, seed: (x.new_empty((rows, x.shape[1])), x.new_empty((1,), dtype=torch.int64)),
    flops=_sketch_flops,
)
def sketch(x: torch.Tensor, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    salt = salt_of(flat(x), seed)
    return sketch_with(x, rows, salt), salt


@define(
    "(Tensor x, int rows, Tensor salt) -> Tensor",
    lambda x, rows, salt: x.new_empty((rows, x.shape[1])),
    flops=_sketch_flops,
)
def sketch_again(x: torch.Tensor, rows: int, salt: torch.Tensor) -> torch.Tensor:
    return sketch_with(x, rows, salt)


@define(
    "(Tensor x, ScalarType dtype) -> Tensor",
    lambda x, dtype: torch.empty_like(x, dtype=dtype),
    workspace=lambda x, dtype, **_: 0,
)
def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype, copy=True)

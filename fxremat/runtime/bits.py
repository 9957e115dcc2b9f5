"""Bits and narrow numbers: bool tensors packed eight to a byte, and plain conversions.

Element ``i`` of a tensor, row by row, is bit ``i % 8`` of byte ``i // 8``; the last byte is filled
up with zeros. The operators here and in `quantised` go by indices, never by the order of memory: a
compiler may give a tensor other strides than it had when its graph was traced. Who wants the order
that the memory had then (`storage_order`) permutes the tensor first.

Scratch memory, in bytes, for ``n`` elements (CHUNK is a constant below):

    pack_bits      8 min(n // 8, CHUNK), 8 for a Python number that becomes a tensor, 24 where n is
                   no multiple of 8, n more where memory is not in order
    unpack_bits    4 min(n // 8, CHUNK), 20 more where n is no multiple of 8
    narrowed       none
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from fxremat.runtime.kernels import Inside, define

CHUNK = 1 << 13
"""Bytes of packed bits that are worked on at once."""
PICTURE_DIMS = 4
MOVED_ALONE = 150
"""Bytes that a CPU copies in the time in which it puts one byte elsewhere.

Inductor has pictures with their channels last on a CPU, whatever the order was when the graph was
traced; for a call that wants the old order it transposes them, bytes one by one.
"""
ELSEWHERE = Inside(0, 0)
"""On a GPU the same graph has plain calls instead, which Inductor fuses."""
GATHER = sum(1 << 56 - 7 * bit for bit in range(8))
SPREAD = torch.tensor(
    [sum((byte >> bit & 1) << 8 * bit for bit in range(8)) for byte in range(256)], device="cpu"
)
"""For each byte, its eight bits as eight bytes, in one number."""


def storage_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """The dimensions from the slowest to the fastest; None where memory has gaps or overlaps."""
    order = tuple(sorted(range(len(shape)), key=lambda d: (-stride[d], d)))
    expected = 1
    for dim in reversed(order):
        if shape[dim] == 1:
            continue
        if stride[dim] != expected:
            return None
        expected *= shape[dim]
    return order


def flat(x: torch.Tensor) -> torch.Tensor:
    """The elements row by row: a view where memory has this order, else a copy."""
    return x.contiguous().view(-1)


def copied_bytes(x: torch.Tensor) -> int:
    """What `flat` allocates."""
    return 0 if x.is_contiguous() else x.numel() * x.dtype.itemsize


def pieces(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of ``size`` that cover ``range(total)``."""
    for start in range(0, total, size):
        yield start, min(start + size, total)


def packed_bytes(count: int) -> int:
    """Bytes that hold so many bits."""
    return (count + 7) // 8


def pack_into(bits: torch.Tensor, out: torch.Tensor) -> None:
    """Pack flat bytes 0 or 1 into ``out``.

    Eight bytes are one number: times GATHER, the sum of ``1 << 56 - 7 * k``, its byte ``k`` lands
    in bit ``56 + k``, and no two terms of the product meet anywhere.
    """
    whole, rest = divmod(bits.numel(), 8)
    if whole:
        words = _words(bits[: whole * 8])
        scratch = words.new_empty(min(whole, CHUNK))
        for start, end in pieces(whole, CHUNK):
            part = scratch[: end - start]
            torch.mul(words[start:end], GATHER, out=part)
            out[start:end] = part.bitwise_right_shift_(56)
    if rest:
        last = bits.new_zeros(8)
        last[:rest] = bits[whole * 8 :]
        out[whole:] = (_words(last) * GATHER).bitwise_right_shift_(56)


def _words(flat_bytes: torch.Tensor) -> torch.Tensor:
    """Bytes, eight at a time, as numbers; a copy where they do not begin where numbers may."""
    if flat_bytes.storage_offset() * flat_bytes.dtype.itemsize % 8:
        flat_bytes = flat_bytes.clone()
    return flat_bytes.view(torch.int64)


def _pack(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(packed_bytes(x.numel()), dtype=torch.uint8)
    pack_into(flat(x).view(torch.uint8), out)
    return out


def _packed_like(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(packed_bytes(x.numel()), dtype=torch.uint8)


def _pack_workspace(x: torch.Tensor) -> int:
    whole, rest = divmod(x.numel(), 8)
    offset = x.storage_offset() if x.is_contiguous() else 0
    shifted = whole * 8 if offset % 8 else 0
    return copied_bytes(x) + shifted + 8 * min(whole, CHUNK) + (24 if rest else 8 if whole else 0)


@functools.cache
def _spread(device: torch.device) -> torch.Tensor:
    return SPREAD.to(device)


def _unpack(packed: torch.Tensor, shape: Iterable[int]) -> torch.Tensor:
    out = packed.new_empty(tuple(shape), dtype=torch.bool)
    bits = out.view(-1).view(torch.uint8)
    whole, rest = divmod(bits.numel(), 8)
    words, table = bits[: whole * 8].view(torch.int64), _spread(packed.device)
    index = packed.new_empty(min(whole, CHUNK), dtype=torch.int32)
    for start, end in pieces(whole, CHUNK):
        part = index[: end - start]
        torch.index_select(table, 0, part.copy_(packed[start:end]), out=words[start:end])
    if rest:
        last = table[packed[whole:].int()].view(torch.uint8)
        bits[whole * 8 :] = last[:rest]
    return out


def _unpacked_like(packed: torch.Tensor, shape: Iterable[int]) -> torch.Tensor:
    return packed.new_empty(tuple(shape), dtype=torch.bool)


def _unpack_workspace(packed: torch.Tensor, shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    whole, rest = divmod(count, 8)
    return 4 * min(whole, CHUNK) + (20 if rest else 0)


def _inside(count: int, dims: int, by_inductor: bool) -> Inside:
    """Three calls for each CHUNK; and in pictures, each byte moved on its own."""
    calls = 3 * (count // (8 * CHUNK) + 1)
    moved = MOVED_ALONE * count if by_inductor and dims == PICTURE_DIMS else 0
    return Inside(calls, count + moved)


def _inside_pack(x: torch.Tensor, *, on_cpu: bool, by_inductor: bool = False) -> Inside:
    return _inside(x.numel(), x.dim(), by_inductor) if on_cpu else ELSEWHERE


def _inside_unpack(
    packed: torch.Tensor, shape: Sequence[int], *, on_cpu: bool, by_inductor: bool = False
) -> Inside:
    return _inside(math.prod(shape), len(shape), by_inductor) if on_cpu else ELSEWHERE


def _narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype, copy=True)


def _narrowed_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype)


pack_bits = define(
    "pack_bits",
    "(Tensor x) -> Tensor",
    _pack,
    _packed_like,
    workspace=_pack_workspace,
    inside=_inside_pack,
)
unpack_bits = define(
    "unpack_bits", "(Tensor packed, SymInt[] shape) -> Tensor", _unpack, _unpacked_like,
    workspace=_unpack_workspace, inside=_inside_unpack,
)  # fmt: skip
narrowed = define(
    "narrowed", "(Tensor x, ScalarType dtype) -> Tensor", _narrowed, _narrowed_like,
    workspace=lambda x, dtype: 0,
)  # fmt: skip

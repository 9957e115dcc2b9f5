"""Bits and narrow numbers: bool tensors packed eight to a byte, and plain conversions.

Element ``i`` of a tensor, row by row, is bit ``i % 8`` of byte ``i // 8``; the last byte is filled
up with zeros. The operators here and in `quantised` go by indices, never by the order of memory: a
compiler may give a tensor other strides than it had when its graph was traced. Who wants the order
that the memory had then (`storage_order`) permutes the tensor first.

Scratch memory, in bytes, for ``n`` elements (CHUNK is a constant below):

    pack_bits      min(n // 8, CHUNK), 9 for Python's numbers that become tensors, 9 more where n
                   is no multiple of 8, n more where memory is not in order
    unpack_bits    min(n // 8, CHUNK), 9, and 9 more where n is no multiple of 8
    narrowed       none
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from fxremat.runtime.kernels import define

CHUNK = 1 << 16
"""Bytes of packed bits that are worked on at once."""


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


def _pack_rows(rows: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
    """Rows of eight bytes 0 or 1 to a byte each."""
    out.copy_(rows[:, 0])
    for bit in range(1, 8):
        torch.mul(rows[:, bit], 1 << bit, out=scratch)
        out.bitwise_or_(scratch)


def pack_into(bits: torch.Tensor, out: torch.Tensor) -> None:
    """Pack flat bytes 0 or 1 into ``out``."""
    whole, rest = divmod(bits.numel(), 8)
    rows = bits[: whole * 8].view(-1, 8)
    scratch = bits.new_empty(min(whole, CHUNK))
    for start, end in pieces(whole, CHUNK):
        _pack_rows(rows[start:end], out[start:end], scratch[: end - start])
    if rest:
        last = bits.new_zeros(1, 8)
        last[0, :rest] = bits[whole * 8 :]
        _pack_rows(last, out[whole:], bits.new_empty(1))


def _pack(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(packed_bytes(x.numel()), dtype=torch.uint8)
    pack_into(flat(x).view(torch.uint8), out)
    return out


def _packed_like(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(packed_bytes(x.numel()), dtype=torch.uint8)


def _pack_workspace(x: torch.Tensor) -> int:
    whole, rest = divmod(x.numel(), 8)
    return copied_bytes(x) + min(whole, CHUNK) + _numbers(x.numel()) + (9 if rest else 0)


def _numbers(used: int) -> int:
    """A Python number beside bytes becomes a tensor of eight bytes, and then of one."""
    return 9 if used else 0


def _unpack_rows(packed: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
    for bit in range(8):
        torch.bitwise_right_shift(packed, bit, out=scratch)
        out[:, bit] = scratch.bitwise_and_(1)


def _unpack(packed: torch.Tensor, shape: Iterable[int]) -> torch.Tensor:
    out = packed.new_empty(tuple(shape), dtype=torch.bool)
    bits = out.view(-1).view(torch.uint8)
    whole, rest = divmod(bits.numel(), 8)
    rows = bits[: whole * 8].view(-1, 8)
    scratch = packed.new_empty(min(whole, CHUNK))
    for start, end in pieces(whole, CHUNK):
        _unpack_rows(packed[start:end], rows[start:end], scratch[: end - start])
    if rest:
        last = packed.new_empty(1, 8)
        _unpack_rows(packed[whole:], last, packed.new_empty(1))
        bits[whole * 8 :] = last[0, :rest]
    return out


def _unpacked_like(packed: torch.Tensor, shape: Iterable[int]) -> torch.Tensor:
    return packed.new_empty(tuple(shape), dtype=torch.bool)


def _unpack_workspace(packed: torch.Tensor, shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    whole, rest = divmod(count, 8)
    return min(whole, CHUNK) + _numbers(count) + (9 if rest else 0)


def _narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype, copy=True)


def _narrowed_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype)


pack_bits = define(
    "pack_bits", "(Tensor x) -> Tensor", _pack, _packed_like, workspace=_pack_workspace
)
unpack_bits = define(
    "unpack_bits", "(Tensor packed, SymInt[] shape) -> Tensor", _unpack, _unpacked_like,
    workspace=_unpack_workspace,
)  # fmt: skip
narrowed = define(
    "narrowed", "(Tensor x, ScalarType dtype) -> Tensor", _narrowed, _narrowed_like,
    workspace=lambda x, dtype: 0,
)  # fmt: skip

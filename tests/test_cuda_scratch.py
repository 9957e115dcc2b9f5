"""Scratch memory inside CUDA library calls, against what torch's allocator recorded on an H200.

Recorded with torch 2.11 (CUDA 13.0): the blocks that a call has beside its results when it has most
of them, in the order in which they are allocated.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxremat.cost.cuda_scratch import CudaScratch
from fxremat.memory.allocator_settings import MIN_BLOCK_BYTES, round_up

BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
ATTENTION = [
    # kernel, batch, heads, heads of keys, length, width, dtype, blocks
    ("flash", 16, 12, 12, 1024, 64, BF16, (786432, 50331648)),
    ("flash", 8, 16, 4, 2048, 64, BF16, (1048576, 67108864, 33554432, 33554432)),
    ("flash", 2, 8, 8, 1000, 80, HALF, (65536, 6291456)),
    ("flash", 2, 8, 2, 1024, 128, BF16, (65536, 8388608, 4194304, 4194304)),
    ("flash", 1, 4, 4, 300, 40, BF16, (6144, 393216)),
    ("cudnn", 16, 12, 12, 1024, 64, BF16, (51118336,)),
    ("cudnn", 8, 16, 4, 2048, 64, BF16, (135266560,)),
    ("cudnn", 2, 8, 8, 1000, 80, HALF, (5184256,)),
    ("cudnn", 2, 8, 2, 1024, 128, BF16, (16843008,)),
    ("efficient", 16, 12, 12, 1024, 64, BF16, (786432, 50380800)),
    ("efficient", 8, 12, 12, 512, 64, BF16, (196608, 12595200)),
    ("efficient", 16, 12, 12, 1024, 64, FULL, (50331648, 786432, 786432)),
    ("efficient", 8, 12, 12, 512, 64, FULL, (12582912, 196608, 196608)),
    ("efficient", 2, 8, 8, 1000, 80, FULL, (64000, 8392704)),
]


def given(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: "-".join(map(str, case[:6])))
def test_backward_of_attention(case: Any) -> None:
    kernel, batch, heads, key_heads, length, width, dtype, blocks = case
    target = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    query = given(batch, heads, length, width, dtype=dtype)
    key = given(batch, key_heads, length, width, dtype=dtype)
    args = (query, query, key, key)
    assert CudaScratch().blocks_of_call(target, args, {}) == blocks
    assert CudaScratch().of_call(target, args, {}) == sum(blocks)


def test_counters_of_efficient_attention() -> None:
    """Of other widths a tile has one counter, not two: 0.02 % too much are said."""
    target = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    said = CudaScratch().blocks_of_call(target, (given(2, 8, 1000, 80),) * 4, {})
    assert said == (64000, 8390656 + 16 * 16 * 8)


@pytest.mark.parametrize(
    ("count", "width", "of_indices", "of_cub"),
    [(16384, 768, 131072, 270847), (4096, 1024, 32768, 71167)],
)
def test_adding_by_an_index(count: int, width: int, of_indices: int, of_cub: int) -> None:
    table, index = given(50304, width), given(count, dtype=torch.int64)
    args = (table, [index], given(count, width), True)
    *sorting, more = CudaScratch().blocks_of_call(torch.ops.aten.index_put_.default, args, {})
    assert sorting == [of_indices] * 4
    assert round_up(more, MIN_BLOCK_BYTES) == round_up(of_cub, MIN_BLOCK_BYTES)


def test_norms_of_many_tensors_are_added_up_from_pieces() -> None:
    tensors = [given(65536 * 2 + 1), given(5)]
    norm = torch.ops.aten._foreach_norm.Scalar
    assert CudaScratch().blocks_of_call(norm, (tensors,), {}) == (2 * 3 * 4,)


def test_products_take_none() -> None:
    assert CudaScratch().blocks_of_call(torch.ops.aten.mm.default, (given(4, 4),) * 2, {}) == ()

"""Memory at given places, by torch's private names."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any
from unittest import mock

import pytest
import torch

from fxremat.compat.tensors import (
    EMPTY,
    allocate_as_before,
    allocate_in_pool,
    new_block,
    reinterpret,
    storage_number,
    storage_uses,
    tensor_over,
    write_over,
)

HOST = torch.device("cpu")
BLOCK_BYTES = 1 << 20


def test_what_generated_code_allocates_with() -> None:
    made = EMPTY["cpu"]((2, 3), (4, 1), torch.float16)
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (4, 1), torch.float16)
    assert "cuda" in EMPTY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.int64])
def test_a_tensor_over_bytes_of_a_block(dtype: torch.dtype) -> None:
    """Its storage is its own, of exactly these bytes; it keeps the block alive."""
    block = new_block(BLOCK_BYTES, HOST)
    one = tensor_over(block, 1024, 2048, dtype)
    assert one.untyped_storage().nbytes() == 1024
    assert one.data_ptr() == block.data_ptr() + 1024
    write_over(block, 1024, 2048, 1)
    uses = storage_uses(storage_number(block.untyped_storage()))
    del block
    one.fill_(1)
    assert one.sum() == one.numel()
    assert uses > 1


def test_tensors_made_inside_of_inference_mode_are_plain() -> None:
    with torch.inference_mode():
        one = tensor_over(new_block(1024, HOST), 0, 1024, torch.float32)
    assert not one.is_inference()


def test_what_lies_there_is_a_tensor_like_any_other() -> None:
    """It has its own version, and is saved, copied and shared by itself."""
    block = new_block(BLOCK_BYTES, HOST)
    base = tensor_over(block, 0, 1024, torch.float32)
    one: Any
    one, other = (reinterpret(base, (16, 16), (16, 1), 0) for _ in range(2))
    one.fill_(3)
    assert (one._version, other._version, base._version) == (1, 0, 0)
    file = io.BytesIO()
    torch.save(one, file)
    assert file.tell() < 4096
    assert copy.deepcopy(one).untyped_storage().nbytes() == 1024
    assert torch.equal(pickle.loads(pickle.dumps(one)), one)
    one.share_memory_()
    assert base.data_ptr() != block.data_ptr()
    assert one.sum() == 3 * 256


def test_uses_of_a_storage() -> None:
    """They tell whoever holds what lies there, views and copies of the tensor among them."""
    base = tensor_over(new_block(1024, HOST), 0, 1024, torch.float32)
    storage = base.untyped_storage()
    number = storage_number(storage)
    idle = storage_uses(number)
    one = reinterpret(base, (256,), (1,), 0)
    held = [one, one[:4], one.detach(), one.numpy()]
    del one
    while held:
        assert storage_uses(number) > idle
        held.pop()
    assert storage_uses(number) == idle
    reinterpret(base, (256,), (1,), 0).untyped_storage()  # its object is the one that is known
    assert storage_uses(number) == idle


def test_a_pool_is_left_as_it_was_entered() -> None:
    """Without a GPU, only that torch has the functions, and takes them in this order."""
    pool, calls = mock.Mock(id=(0, 1)), list[Any]()
    names = [
        "_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool",
    ]  # fmt: skip
    device = torch.device("cuda", 0)
    noted: Any = {name: lambda *args, name=name: calls.append((name, *args)) for name in names}
    with mock.patch.multiple(torch._C, **noted):
        allocate_in_pool(pool, device)
        allocate_as_before(pool, device)
    assert calls == [(name, 0, (0, 1)) for name in names]

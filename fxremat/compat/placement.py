"""Memory at given places: what generated code allocates with, storages over given bytes, pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_guards: Any = torch._C._dynamo.guards

Empty = Callable[[Any, Any, torch.dtype], torch.Tensor]

EMPTY: dict[str, Empty] = {
    "cpu": _guards._empty_strided_cpu,
    "cuda": _guards._empty_strided_cuda,
}
"""What generated code allocates with, by the type of the device: size, stride and dtype."""

reinterpret: Callable[[torch.Tensor, Any, Any, int], torch.Tensor] = _guards._reinterpret_tensor
"""Another tensor on the storage of the first, with a version counter of its own."""

storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
"""How many hold a storage, by its number: tensors, and its object in Python."""


def storage_number(storage: torch.UntypedStorage) -> int:
    """The number by which `storage_uses` knows a storage."""
    return int(storage._cdata)


@contextmanager
def _plain() -> Iterator[None]:
    """Tensors made inside are plain ones, whatever the user has switched on."""
    from torch.utils._python_dispatch import _disable_current_modes

    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
    ):
        yield


def new_block(nbytes: int, device: torch.device) -> torch.Tensor:
    """So many bytes of memory in one piece."""
    with _plain():
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def tensor_over(
    block: torch.Tensor, begin: int, end: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor over bytes of ``block``, on a storage of exactly these, which keeps the block alive.

    The storage cannot be resized.
    """
    package: Any = torch
    with _plain():
        made: torch.Tensor = package.from_dlpack(block[begin:end]).view(dtype or torch.uint8)
        return made


def write_over(block: torch.Tensor, begin: int, end: int, byte: int) -> None:
    """Write ``byte`` all over these bytes of ``block``."""
    with _plain():
        block[begin:end].fill_(byte)


def allocate_in_pool(pool: Any, device: torch.device) -> None:
    """What this thread allocates on a GPU comes from a `torch.cuda.MemPool` from now on."""
    cuda: Any = torch._C
    cuda._cuda_beginAllocateCurrentThreadToPool(_index(device), pool.id)


def allocate_as_before(pool: Any, device: torch.device) -> None:
    """End what `allocate_in_pool` began, in the same thread."""
    cuda: Any = torch._C
    cuda._cuda_endAllocateToPool(_index(device), pool.id)
    cuda._cuda_releasePool(_index(device), pool.id)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def is_recorded(device: torch.device) -> bool:
    """Whether a CUDA graph is recorded now, which has addresses of its own."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()

"""The account of host memory: bytes that copies to host hold, the most so far, and a cap.

A host tensor counts from its allocation until its storage is freed, wherever it was held: by a
graph, by a user, or by a backward that never ran. Its bytes count, not what the allocator of
pinned memory rounds them up to.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from threading import Lock
from weakref import WeakSet

import torch

from fxremat.core.layout import extent
from fxremat.errors import HostMemoryExceeded


class HostMemory:
    """Counts host tensors while their storages live; ``peak_bytes`` were held at most."""

    def __init__(self) -> None:
        self.cap_bytes: int | None = None
        self._held = 0
        self.peak_bytes = 0
        self._lock = Lock()
        self._storages: WeakSet[torch.UntypedStorage] = WeakSet()
        # A storage can die anywhere, also while this thread has the lock: it only appends here.
        self._freed: deque[int] = deque()
        os.register_at_fork(
            before=self._lock.acquire,
            after_in_parent=self._lock.release,
            after_in_child=self._lock.release,
        )

    def allocate(self, nbytes: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """``make()``, counted as ``nbytes``; `HostMemoryExceeded` instead if over the cap."""
        with self._lock:
            self._settle()
            if self.cap_bytes is not None and self._held + nbytes > self.cap_bytes:
                raise HostMemoryExceeded(nbytes, self._held, self.cap_bytes)
            self._held += nbytes
            self.peak_bytes = max(self.peak_bytes, self._held)
        try:
            tensor = make()
            weakref.finalize(tensor.untyped_storage(), self._freed.append, nbytes).atexit = False
            self._storages.add(tensor.untyped_storage())
        except BaseException:
            self._freed.append(nbytes)
            raise
        return tensor

    def _settle(self) -> None:
        """Take off what died since; the caller has the lock."""
        while self._freed:
            self._held -= self._freed.popleft()

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether a tensor that `allocate` returned has this storage."""
        return storage in self._storages

    @property
    def held_bytes(self) -> int:
        """What is held now."""
        with self._lock:
            self._settle()
            return self._held


HOST_MEMORY = HostMemory()


def is_host(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` lies in host memory that this package handed out.

    On a machine without a GPU that is what tells it from tensors of the device, the CPU. Beside a
    GPU every tensor on the CPU is in host memory, and those this says no to are not pinned.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    return HOST_MEMORY.holds(tensor.untyped_storage())


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether ``tensor`` lies in memory of ``device``, of any of its type if it has no number."""
    same = tensor.device.type == device.type and device.index in (None, tensor.device.index)
    return same and not is_host(tensor)


# --- tensors as one run of memory -------------------------------------------------------------


def check_copyable(x: torch.Tensor) -> None:
    """ValueError unless the bytes of ``x``, with its strides, are all there is to it."""
    if x.layout != torch.strided:
        raise ValueError(
            f"only strided tensors can be copied to host memory and back, not {x.layout}"
        )


def size_of_extent(x: torch.Tensor) -> int:
    """Bytes from the first element to the last; those of the elements if ``x`` has no gaps."""
    return extent(x.size(), x.stride()) * x.element_size()


def run_of_memory(x: torch.Tensor) -> torch.Tensor:
    """The elements from the first to the last in memory, as a view with one dimension."""
    return x.as_strided((extent(x.size(), x.stride()),), (1,))


def mapped_like(x: torch.Tensor, **how: int) -> torch.Tensor:
    """A tensor like ``x`` in pages of its own, which go when its storage does."""
    nbytes, empty = size_of_extent(x), torch.empty(0, dtype=x.dtype)
    pages = torch.frombuffer(mmap.mmap(-1, nbytes, **how), dtype=torch.uint8) if nbytes else empty
    return empty.set_(pages.untyped_storage(), 0, x.size(), x.stride())


def storage_address(x: torch.Tensor) -> int:
    """Where the storage of ``x`` begins, equal for tensors that share one."""
    return x.untyped_storage().data_ptr()

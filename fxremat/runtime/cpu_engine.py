"""Copies for machines without a GPU: the CPU is the device, two threads are its copy engines.

It is there to test with. The threads, one for each direction, do one copy at a time, in the order
in which they were started. The target of a copy is filled with ones of bits (NaN, -1, True) until
it ends, so that a missing wait gives wrong numbers.

Host memory is mapped pages, not memory of torch's CPU allocator: what torch allocates on the CPU
counts as memory of the device, and a profiler sees it as such. The threads call no torch function,
so that they take part neither in torch's thread pools nor in its profiles.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from fxremat.runtime.copy_engine import Direction, Engine
from fxremat.runtime.host_memory import mapped_like, size_of_extent


class _CpuTransfer(NamedTuple):
    """One copy; ``done`` knows when it has ended, and its error."""

    direction: Direction
    done: Future[None]

    def wait(self) -> None:
        """Block until the copy has ended; RuntimeError if it failed."""
        error = self.done.exception()
        if error is not None:
            raise RuntimeError(f"a copy {self.direction} failed: {error!r}") from error


def _copy(tensors: list[torch.Tensor], after: _CpuTransfer | None) -> None:
    """Copy a source to a target; for the thread of the direction, which lets go of both."""
    try:
        if after is not None:
            after.wait()
        _copy_memory(tensors)
    finally:
        tensors.clear()  # an error keeps the frame


class CpuEngine(Engine[_CpuTransfer]):
    """Copies between "device" and host memory; waiting blocks the thread that calls."""

    def __init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        """Begin anew: threads stay behind in a fork, and copies that they had not ended."""
        super().__init__()
        self._lines = {d: ThreadPoolExecutor(1, f"fxremat {d}") for d in ("to_host", "to_device")}

    def _on_host(self, x: torch.Tensor) -> torch.Tensor:
        return mapped_like(x)

    def _start(
        self, direction: Direction, source: torch.Tensor, target: torch.Tensor
    ) -> _CpuTransfer:
        ones = 1 if target.dtype == torch.bool else 0xFF  # a bool has only one that may be set
        ctypes.memset(target.data_ptr(), ones, size_of_extent(target))
        line, after = self._lines[direction], self._copies.get(source.untyped_storage())
        return _CpuTransfer(direction, line.submit(_copy, [source, target], after))

    def _wait(self, transfer: _CpuTransfer, device: torch.device) -> None:
        transfer.wait()


def _copy_memory(tensors: Sequence[torch.Tensor]) -> None:
    """Copy the first's run of memory to the second's, without holding Python's lock."""
    source, target = tensors
    ctypes.memmove(target.data_ptr(), source.data_ptr(), size_of_extent(source))


ENGINE = CpuEngine()
os.register_at_fork(after_in_child=ENGINE.after_fork)

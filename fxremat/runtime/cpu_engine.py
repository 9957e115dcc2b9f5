"""Copies for machines without a GPU: the CPU is the device, two threads are its copy engines.

It is there to test with. The threads, one for each direction, do one copy at a time, in the order
in which they were started. A copy takes as long as it is asked to (`CpuEngine.delay`), and its
target is filled with ones of bits (NaN, -1, True) until it ends, so that a missing wait gives wrong
numbers.

Host memory is mapped pages, not memory of torch's CPU allocator: what torch allocates on the CPU
counts as memory of the device, and a profiler sees it as such. The threads call no torch function,
so that they take part neither in torch's thread pools nor in its profiles.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event

import torch

from fxremat.runtime.copy_trace import (
    Direction,
    Engine,
    Trace,
    Wait,
    active_traces,
    host_time,
)
from fxremat.runtime.host_memory import mapped_like, size_of_extent


@dataclass(eq=False)
class _CpuTransfer:
    """One copy. It holds its tensors, a source and a target, until it has ended."""

    direction: Direction
    tensors: list[torch.Tensor]
    seconds: float
    after: _CpuTransfer | None
    error: BaseException | None = None
    traces: tuple[Trace, ...] = field(default_factory=active_traces)
    ended: Event = field(default_factory=Event)

    def __post_init__(self) -> None:
        self.nbytes = size_of_extent(self.tensors[0])

    def run(self) -> None:
        """Copy; for the thread of the direction. An error is kept for those who wait."""
        try:
            if self.after is not None:
                self.after.wait()
            with host_time(self.direction, self.nbytes, self.traces):
                time.sleep(self.seconds)
                _copy_memory(self.tensors)
        except BaseException as error:
            self.error = error.with_traceback(None)  # whose frames hold the tensors
        finally:
            self.tensors.clear()
            self.after = None
            self.ended.set()

    def wait(self) -> None:
        """Block until the copy has ended; RuntimeError if it failed."""
        self.ended.wait()
        if self.error is not None:
            raise RuntimeError(f"a copy {self.direction} failed: {self.error!r}") from self.error


class CpuEngine(Engine[_CpuTransfer]):
    """Copies between "device" and host memory; waiting blocks the thread that calls."""

    def __init__(self) -> None:
        self.delay: Callable[[Direction, int], float] = lambda direction, nbytes: 0.0
        """Seconds that a copy takes, before the bytes are really copied."""
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
        seconds = self.delay(direction, size_of_extent(source))
        after = self._copies.get(source.untyped_storage())
        transfer = _CpuTransfer(direction, [source, target], seconds, after)
        self._lines[direction].submit(transfer.run)
        return transfer

    def _wait(self, what: Wait, transfer: _CpuTransfer, device: torch.device) -> None:
        with host_time(what, transfer.nbytes, active_traces()):
            transfer.wait()


def _copy_memory(tensors: Sequence[torch.Tensor]) -> None:
    """Copy the first's run of memory to the second's, without holding Python's lock."""
    source, target = tensors
    ctypes.memmove(target.data_ptr(), source.data_ptr(), size_of_extent(source))


ENGINE = CpuEngine()
os.register_at_fork(after_in_child=ENGINE.after_fork)

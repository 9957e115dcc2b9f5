"""Copies on CUDA: a stream for each direction and device, ordered by events alone.

A copy begins once the stream that computes has come to the call that starts it, and the stream
that computes goes on from a wait once the copy has ended; the host stops for neither. What a copy
reads and writes is allocated for the computing stream and, by the arguments of the waits, lives
until that stream has waited, so no allocator needs to hear of the other stream. Host memory is
pinned and comes from torch's pool of it, whose blocks are not used again before the copies that
use them have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import MutableMapping
from threading import Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from fxremat.runtime.copy_engine import Direction, Engine
from fxremat.runtime.host_memory import run_of_memory


class _CudaTransfer(NamedTuple):
    """One copy. It holds its tensors until somebody has waited, or it is seen to have ended.

    Only after an exception does nobody wait. Then the memory that the copy writes must not be
    given to somebody else before it has ended.
    """

    ended: torch.cuda.Event
    tensors: list[torch.Tensor]

    def is_over(self) -> bool:
        """Whether it holds nothing, or need not any more."""
        return not self.tensors or bool(self.ended.query())  # type: ignore[no-untyped-call]


class _CudaLine:
    """One direction on one device: a stream, and what runs on it in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._running: deque[_CudaTransfer] = deque()
        self._lock = Lock()

    def start(
        self, source: torch.Tensor, target: torch.Tensor, after: torch.cuda.Event | None
    ) -> _CudaTransfer:
        """Copy once the computing stream has come here and ``after`` is reached."""
        with self._lock:
            while self._running and self._running[0].is_over():
                self._running.popleft().tensors.clear()
            self._stream.wait_event(torch.cuda.current_stream(self._device).record_event())
            if after is not None:
                self._stream.wait_event(after)
            self.copy(source, target)
            transfer = _CudaTransfer(self._stream.record_event(), [source, target])
            self._running.append(transfer)
            return transfer

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy when all has been reached that the stream waits for."""
        with torch.cuda.stream(self._stream):
            run_of_memory(target).copy_(run_of_memory(source), non_blocking=True)


class CudaEngine(Engine[_CudaTransfer]):
    """The same as `CpuEngine` on CUDA; waiting blocks the current stream, not the host."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[tuple[Direction, torch.device], _CudaLine] = {}
        self._filled: MutableMapping[torch.UntypedStorage, torch.cuda.Event] = WeakKeyDictionary()
        """When each host tensor is there: other streams than the one that waited need to know."""

    def _on_host(self, x: torch.Tensor) -> torch.Tensor:
        return _pinned_like(x)

    def _start(
        self, direction: Direction, source: torch.Tensor, target: torch.Tensor
    ) -> _CudaTransfer:
        to_host = direction == "to_host"
        device = source.device if to_host else target.device
        line = self._lines.get((direction, device))
        if line is None:
            line = self._lines.setdefault((direction, device), _CudaLine(device))
        filled = None if to_host else self._filled.get(source.untyped_storage())
        transfer = line.start(source, target, filled)
        if to_host:
            self._filled[target.untyped_storage()] = transfer.ended
        return transfer

    def _wait(self, transfer: _CudaTransfer, device: torch.device) -> None:
        torch.cuda.current_stream(device).wait_event(transfer.ended)
        transfer.tensors.clear()


def _pinned_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu", pin_memory=True)


ENGINE = CudaEngine()

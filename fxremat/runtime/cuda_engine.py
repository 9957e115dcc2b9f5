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
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from threading import Lock
from time import perf_counter
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from fxremat.runtime.copy_trace import CopyRecord, Direction, Engine, Trace, Wait, active_traces
from fxremat.runtime.host_memory import run_of_memory, size_of_extent


class _CudaTransfer(NamedTuple):
    """One copy. It holds its tensors until somebody has waited, or it is seen to have ended.

    Only after an exception does nobody wait. Then the memory that the copy writes must not be
    given to somebody else before it has ended.
    """

    nbytes: int
    ended: torch.cuda.Event
    tensors: list[torch.Tensor]

    def is_over(self) -> bool:
        """Whether it holds nothing, or need not any more."""
        return not self.tensors or bool(self.ended.query())  # type: ignore[no-untyped-call]


class _CudaLine:
    """One direction on one device: a stream, and what runs on it in order."""

    def __init__(self, direction: Direction, device: torch.device) -> None:
        self._direction: Direction = direction
        self._device = device
        self._stream = _new_stream(device)
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
            nbytes = size_of_extent(source)
            timed = _device_time(self._direction, nbytes, self._stream)
            with torch.cuda.stream(self._stream), timed:
                run_of_memory(target).copy_(run_of_memory(source), non_blocking=True)
            transfer = _CudaTransfer(nbytes, self._stream.record_event(), [source, target])
            self._running.append(transfer)
            return transfer


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
            line = self._lines.setdefault((direction, device), _CudaLine(direction, device))
        filled = None if to_host else self._filled.get(source.untyped_storage())
        transfer = line.start(source, target, filled)
        if to_host:
            self._filled[target.untyped_storage()] = transfer.ended
        return transfer

    def _wait(self, what: Wait, transfer: _CudaTransfer, device: torch.device) -> None:
        computing = torch.cuda.current_stream(device)
        with _device_time(what, transfer.nbytes, computing):
            computing.wait_event(transfer.ended)
        transfer.tensors.clear()


def _pinned_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu", pin_memory=True)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _record_time(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event that knows when the stream came to it."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    stream.record_event(event)
    return event


@contextmanager
def _device_time(what: Direction | Wait, nbytes: int, stream: torch.cuda.Stream) -> Iterator[None]:
    """Record the time that the stream spends on the body, if somebody traces."""
    traces = active_traces()
    if not traces:
        yield
        return
    anchors = [_anchor(trace, stream.device) for trace in traces]
    start = _record_time(stream)
    yield
    end = _record_time(stream)
    for trace, anchor in zip(traces, anchors, strict=True):
        trace.late.append(partial(_record, what, nbytes, anchor, start, end))


def _anchor(trace: Trace, device: torch.device) -> tuple[torch.cuda.Event, float]:
    """An event of the device and when it was, on the host's clock; one for each trace.

    It is on a stream of its own: there is nothing before it for which the host would wait.
    """
    if device not in trace.anchors:
        event = _record_time(_new_stream(device))
        event.synchronize()
        trace.anchors[device] = event, perf_counter()
    return trace.anchors[device]


def _record(
    what: Direction | Wait,
    nbytes: int,
    anchor: tuple[torch.cuda.Event, float],
    start: torch.cuda.Event,
    end: torch.cuda.Event,
) -> CopyRecord:
    end.synchronize()
    event, seconds = anchor
    start_s, end_s = (seconds + event.elapsed_time(reached) / 1000 for reached in (start, end))
    return CopyRecord(what, nbytes, start_s, end_s)


ENGINE = CudaEngine()

"""Host memory: how much copies hold, a cap, how fast copies of the CPU are, and what ran when."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch

from fxremat.errors import InvalidOption
from fxremat.runtime import cpu_engine, host_memory
from fxremat.runtime.copy_engine import Direction, Engine, Wait
from fxremat.runtime.cuda_engine import CudaEngine, _CudaLine
from fxremat.runtime.host_memory import size_of_extent
from fxremat.runtime.optimizer_steps import Step


class HostBytes(NamedTuple):
    """Bytes of host memory that copies of this process hold, now and at most since the reset."""

    now_bytes: int
    peak_bytes: int


def host_bytes() -> HostBytes:
    """What they hold."""
    return HostBytes(host_memory.HOST_MEMORY.held_bytes, host_memory.HOST_MEMORY.peak_bytes)


def reset_host_peak() -> None:
    """Let ``host_bytes().peak_bytes`` begin anew with what is held now."""
    host_memory.HOST_MEMORY.peak_bytes = host_memory.HOST_MEMORY.held_bytes


def set_host_memory_cap(cap_bytes: int | None) -> AbstractContextManager[object]:
    """Let copies to host hold at most ``cap_bytes`` at once, all devices together; None: no cap.

    It holds from now on or, as a context manager, inside ``with`` only.
    """
    undo, account = ExitStack(), host_memory.HOST_MEMORY
    undo.callback(setattr, account, "cap_bytes", account.cap_bytes)
    account.cap_bytes = cap_bytes
    return undo


def set_copy_speed(
    to_host_bytes_per_s: float | None = None,
    to_device_bytes_per_s: float | None = None,
    latency_s: float = 0.0,
) -> AbstractContextManager[object]:
    """Let copies of the CPU take ``latency_s`` and their bytes at this speed; None: no limit.

    It holds for copies started from now on or, as a context manager, inside ``with`` only. The
    time of the real copy in memory is added. InvalidOption (a ValueError) for a speed that is
    not positive or a negative latency.
    """
    rates = {"to_host": to_host_bytes_per_s, "to_device": to_device_bytes_per_s}
    for direction, rate in rates.items():
        if rate is not None and not rate > 0:
            expected = "a positive number of bytes per second or None"
            raise InvalidOption(f"{direction}_bytes_per_s", rate, expected)
    if not 0 <= latency_s < float("inf"):
        raise InvalidOption("latency_s", latency_s, "a number of seconds")

    def delay(direction: Direction, nbytes: int) -> float:
        rate = rates[direction]
        return latency_s + (nbytes / rate if rate else 0.0)

    undo = ExitStack()
    undo.enter_context(mock.patch.object(cpu_engine, "_copy", partial(_copy_slowly, delay)))
    return undo


COPY = cpu_engine._copy
"""How the CPU copies if nobody slows it down."""


def _copy_slowly(delay: Callable[[Direction, int], float], tensors: Any, after: Any) -> None:
    if after is not None:
        after.done.exception()
    time.sleep(delay(*_described(tensors[0])))
    COPY(tensors, after)


# --- what ran when ------------------------------------------------------------------------


class CopyRecord(NamedTuple):
    """One copy, one time that the computation stood still for one, or one step in a backward.

    ``start_s`` and ``end_s`` are seconds on the clock of ``time.perf_counter``.
    """

    what: Direction | Wait | Literal["step"]
    nbytes: int
    start_s: float
    end_s: float


@contextmanager
def copy_trace() -> Iterator[list[CopyRecord]]:
    """A list of `CopyRecord`, one for each copy started and each wait ended inside ``with``.

    Optimizer steps that begin in a backward are there too, with the bytes of their gradients and
    in times of the host. On CUDA all other times are those of the device, and the list is filled at
    the end, where the host waits for what was recorded. On the CPU a record comes when the copy or
    wait ends: after ``with`` if nobody waited inside.
    """
    trace = _Trace()
    patched: list[tuple[Any, str, Callable[..., Any]]] = [
        (cpu_engine, "_copy", trace.copy_on_cpu),
        (_CudaLine, "copy", trace.copy_on_cuda),
        (Engine, "wait", trace.wait),
        (Step, "run", trace.step),
    ]
    with ExitStack() as stack:
        for owner, name, traced in patched:
            stack.enter_context(mock.patch.object(owner, name, _around(traced, owner, name)))
        yield trace.records
    trace.records.extend(make() for make in trace.late)


def _around(traced: Callable[..., Any], owner: Any, name: str) -> Callable[..., Any]:
    """What calls ``traced`` with the function that it stands for and with its arguments."""
    original = getattr(owner, name)
    return lambda *args: traced(original, *args)


@dataclass
class _Trace:
    """What is called in place of parts of the engines, and of a step."""

    records: list[CopyRecord] = field(default_factory=list)
    late: list[Callable[[], CopyRecord]] = field(default_factory=list)
    """Records that can be made only once the device has come so far."""
    anchors: dict[torch.device, tuple[Any, float]] = field(default_factory=dict)
    """An event of each device, and the time at which the device reached it."""

    @contextmanager
    def on_host(self, what: Any, nbytes: int) -> Iterator[None]:
        """Record the time that the body takes on the host, unless it fails."""
        start = time.perf_counter()
        yield
        self.records.append(CopyRecord(what, nbytes, start, time.perf_counter()))

    @contextmanager
    def on_stream(self, what: Any, nbytes: int, stream: Any) -> Iterator[None]:
        """Record the time that the stream spends on the body."""
        if stream.device not in self.anchors:  # a new stream has nothing that the host waits for
            cuda: Any = torch.cuda
            event = _timed_event(cuda.Stream(stream.device))
            event.synchronize()
            self.anchors[stream.device] = event, time.perf_counter()
        anchor, seconds = self.anchors[stream.device]
        start = _timed_event(stream)
        yield
        end = _timed_event(stream)

        def record() -> CopyRecord:
            end.synchronize()
            begun, ended = (seconds + anchor.elapsed_time(at) / 1000 for at in (start, end))
            return CopyRecord(what, nbytes, begun, ended)

        self.late.append(record)

    def copy_on_cpu(self, copy: Any, tensors: Any, after: Any) -> None:
        """A copy, which comes after another one."""
        if after is not None:
            after.done.exception()
        with self.on_host(*_described(tensors[0])):
            copy(tensors, after)

    def copy_on_cuda(self, copy: Any, line: Any, source: Any, target: Any) -> None:
        """A copy on its stream."""
        with self.on_stream(*_described(source), line._stream):
            copy(line, source, target)

    def wait(self, wait: Any, engine: Any, what: Wait, target: Any, device: Any) -> None:
        """The computation waits for a copy, unless somebody has waited for it before."""
        nbytes = size_of_extent(target)
        if engine._copies.get(target.untyped_storage()) is None:
            wait(engine, what, target, device)
        elif isinstance(engine, CudaEngine):
            with self.on_stream(what, nbytes, torch.cuda.current_stream(device)):
                wait(engine, what, target, device)
        else:
            with self.on_host(what, nbytes):
                wait(engine, what, target, device)

    def step(self, run: Any, step: Any) -> None:
        """A step of an optimizer, when its gradient is there."""
        nbytes, inner = size_of_extent(step.gradient), step.step

        def timed() -> None:
            with self.on_host("step", nbytes):
                inner()

        step.step = timed
        run(step)


def _described(source: torch.Tensor) -> tuple[Direction, int]:
    """Where a copy goes to, and its bytes."""
    direction: Direction = "to_device" if host_memory.is_host(source) else "to_host"
    return direction, size_of_extent(source)


def _timed_event(stream: Any) -> Any:
    """An event that knows when the stream came to it."""
    cuda: Any = torch.cuda
    event = cuda.Event(enable_timing=True)
    stream.record_event(event)
    return event

"""Records of copies, waits and optimizer steps, to show what ran beside what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread
from time import perf_counter
from typing import Any, Generic, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch

Direction = Literal["to_host", "to_device"]
Wait = Literal["wait_host", "wait_device"]
Work = Literal["step"]
"""What the host does beside the device, other than copying."""
T = TypeVar("T")


Job = Callable[[], None]
"""It keeps an error for whoever waits: a thread that ended would let it hang."""


class SerialThread:
    """A thread, started with the first job, that does one after another."""

    def __init__(self, name: str) -> None:
        self._name = f"fxremat {name}"
        self._queue: SimpleQueue[Job] = SimpleQueue()
        self._lock = Lock()
        self._thread: Thread | None = None

    def submit(self, job: Job) -> None:
        """Do the job after all others."""
        with self._lock:
            if self._thread is None:
                arguments = (self._queue,)
                self._thread = Thread(target=_serve, args=arguments, name=self._name, daemon=True)
                self._thread.start()
        self._queue.put(job)


def _serve(queue: SimpleQueue[Job]) -> None:
    while True:
        queue.get()()


class Pending(Generic[T]):
    """Transfers that nobody has waited for yet, by the storage that they write.

    Whoever waits again, as a backward does that runs a second time, finds that it has ended. The
    storage is held weakly and found by identity. If it dies without a wait, its entry goes with
    it, and what comes to lie at the same address later is another storage.
    """

    def __init__(self) -> None:
        self._transfers: MutableMapping[torch.UntypedStorage, T] = WeakKeyDictionary()
        self._ended: MutableMapping[torch.UntypedStorage, None] = WeakKeyDictionary()

    def add(self, target: torch.Tensor, transfer: T) -> None:
        self._transfers[target.untyped_storage()] = transfer

    def get(self, target: torch.Tensor) -> T | None:
        """The transfer that writes ``target`` if nobody has waited for it."""
        return self._transfers.get(target.untyped_storage())

    def find(self, what: Wait, target: torch.Tensor) -> T | None:
        """As `get`; RuntimeError if there never was one."""
        transfer = self.get(target)
        if transfer is None and target.untyped_storage() not in self._ended:
            raise RuntimeError(
                f"fxremat::{what}: no copy into this tensor {tuple(target.shape)} has been "
                f"started; each copy is started by fxremat::{what.replace('wait', 'to')}, in the "
                "same process"
            )
        return transfer

    def forget(self, target: torch.Tensor) -> None:
        """Somebody has waited for the transfer that writes ``target``."""
        if self._transfers.pop(target.untyped_storage(), None) is not None:
            self._ended[target.untyped_storage()] = None

    def drop(self, target: torch.Tensor) -> None:
        """The transfer that writes ``target`` has failed."""
        self._transfers.pop(target.untyped_storage(), None)


@dataclass(frozen=True)
class CopyRecord:
    """One copy, one time that the computation stood still for one, or one step in a backward.

    ``start_s`` and ``end_s`` are seconds on the clock of ``time.perf_counter``.
    """

    what: Direction | Wait | Work
    nbytes: int
    start_s: float
    end_s: float


@dataclass(eq=False)
class Trace:
    """Where the records of one ``copy_trace()`` go."""

    records: list[CopyRecord] = field(default_factory=list)
    late: list[Callable[[], CopyRecord]] = field(default_factory=list)
    """Records that can be made only once the device has come so far."""
    anchors: dict[torch.device, tuple[Any, float]] = field(default_factory=dict)
    """An event of each device, and the time at which the device reached it."""


_active: tuple[Trace, ...] = ()


def active_traces() -> tuple[Trace, ...]:
    """The traces that are being collected now, for this and every other thread."""
    return _active


@contextmanager
def copy_trace() -> Iterator[list[CopyRecord]]:
    """A list of `CopyRecord`, one for each copy started and each wait ended inside ``with``.

    Optimizer steps that begin in a backward are there too, with the bytes of their gradients and
    in times of the host. On CUDA all other times are those of the device, and the list is filled at
    the end, where the host waits for what was recorded. On the CPU a record comes when the copy or
    wait ends: after ``with`` if nobody waited inside.
    """
    global _active
    trace = Trace()
    _active = (*_active, trace)
    try:
        yield trace.records
    finally:
        _active = tuple(one for one in _active if one is not trace)
        trace.records.extend(make() for make in trace.late)


@contextmanager
def host_time(
    what: Direction | Wait | Work, nbytes: int, traces: tuple[Trace, ...]
) -> Iterator[None]:
    """Record the time that the body takes on the host, unless it fails."""
    start = perf_counter()
    yield
    record = CopyRecord(what, nbytes, start, perf_counter())
    for trace in traces:
        trace.records.append(record)

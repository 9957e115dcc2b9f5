"""Records of copies, waits and optimizer steps, to show what ran beside what."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Generic, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch

from fxremat.runtime import host_memory
from fxremat.runtime.host_memory import check_copyable, size_of_extent

Direction = Literal["to_host", "to_device"]
Wait = Literal["wait_host", "wait_device"]
Work = Literal["step"]
"""What the host does beside the device, other than copying."""
T = TypeVar("T")


class Engine(ABC, Generic[T]):
    """Copies between a kind of device and host memory; ``T`` is one on its way.

    Each is known by the storage that it writes, None once somebody has waited for it: whoever waits
    again, as a backward does that runs a second time, finds that it has ended. The storage is held
    weakly and found by identity. What comes to lie at the same address later is another storage.
    """

    def __init__(self) -> None:
        self._copies: MutableMapping[torch.UntypedStorage, T | None] = WeakKeyDictionary()

    def start_to_host(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor in host memory like ``x``, into which a copy of ``x`` is on its way."""
        host = self.new_host_tensor(x)
        self._copies[host.untyped_storage()] = self._start("to_host", x, host)
        return host

    def start_to_device(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A new tensor on ``device`` like ``host``, into which a copy of it is on its way."""
        check_copyable(host)
        x = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
        self._copies[x.untyped_storage()] = self._start("to_device", host, x)
        return x

    def wait(self, what: Wait, target: torch.Tensor, device: torch.device) -> None:
        """The computation on ``device`` goes on once the copy into ``target`` has ended.

        RuntimeError if there never was one, or it has failed before.
        """
        storage = target.untyped_storage()
        if storage not in self._copies:
            raise RuntimeError(
                f"fxremat::{what}: no copy into this tensor {tuple(target.shape)} has been "
                f"started; each copy is started by fxremat::{what.replace('wait', 'to')}, in the "
                "same process"
            )
        transfer = self._copies[storage]
        if transfer is not None:
            try:
                self._wait(what, transfer, device)
            except BaseException:
                self._copies.pop(storage, None)
                raise
            self._copies[storage] = None

    def new_host_tensor(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor like ``x`` in the host memory that this copies from; its bytes count there."""
        check_copyable(x)
        return host_memory.HOST_MEMORY.allocate(size_of_extent(x), lambda: self._on_host(x))

    @abstractmethod
    def _on_host(self, x: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def _start(self, direction: Direction, source: torch.Tensor, target: torch.Tensor) -> T: ...

    @abstractmethod
    def _wait(self, what: Wait, transfer: T, device: torch.device) -> None: ...


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

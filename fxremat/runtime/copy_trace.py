"""Records of copies, waits and optimizer steps, to show what ran beside what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from fxremat.runtime.copy_engine import Direction, Wait, Work


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
    """For each device an event, and the time at which the device reached it."""


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

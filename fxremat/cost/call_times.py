"""Times of library calls, found by running each distinct call: matmuls, convolutions, attention.

A call is measured if its floating-point operations can be counted. What cannot be run is not
timed: higher-order operators, sizes nobody knows, calls that raise or for which there is no room.
Runs that other programs disturb do not count: a thread that waits for a core, and all that wait for
it, would count as work. Times are kept on disk (`fxremat.cost.number_file`), but for those of calls
that were disturbed each time.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

try:
    import resource
except ImportError:  # there is none on Windows
    resource = None  # type: ignore[assignment]

from fxremat.compat.measuring import keep_busy
from fxremat.cost.device_lock import alone_on
from fxremat.cost.number_file import NumberFile, number_path
from fxremat.cost.pace import Pace, pace_of
from fxremat.cost.roofline import SizeOf, flops_of_call
from fxremat.memory.room import has_room

FEWEST_RUNS, NEAR = 5, 0.03
"""A call is run so often at least, and until its two quickest runs differ by no more than this."""
ENOUGH_SECONDS = 0.006
"""In all runs of a call together, at least."""
SHORT_SECONDS, MOST_SECONDS = 0.04, 0.5
"""Where runs do not agree, they end after ``SHORT_SECONDS``, once two of them count; after
``MOST_SECONDS`` in any case."""
YARDSTICK_SHARE = 0.5
"""Of that time: what runs of the yardstick may add."""
SECONDS_TO_ONESELF = 0.01
"""For each time that a core is taken away: the kernel's own tasks are rarer, and take next to
nothing; another program takes turns of some 4 ms."""
CALLS_BETWEEN_EVENTS = 10
"""On CUDA: the clock of events is no finer than half a microsecond."""
KIND = "call_times"
"""Of numbers on disk: microseconds of calls."""


def described(value: Any, size: SizeOf) -> Any:
    """An argument as plain data: what the time of a call may depend on."""
    if isinstance(value, torch.Tensor):
        shape, stride = [size(s) for s in value.shape], [size(s) for s in value.stride()]
        return [str(value.dtype), shape, stride]
    if isinstance(value, (list, tuple)):
        return [described(v, size) for v in value]
    if isinstance(value, torch.SymInt):
        return size(value)
    return repr(value)


def call_key(target: Any, args: Any, kwargs: Any, size: SizeOf) -> str:
    """Names a call by all that its time, or its scratch memory, may depend on."""
    named = {k: described(v, size) for k, v in sorted(kwargs.items())}
    return json.dumps([str(target), described(args, size), named])


def made_real(
    value: Any, size: SizeOf, device: torch.device, batch: tuple[int, int] | None = None
) -> Any:
    """An argument to run with: numbers in [0, 1), True, and integers zero, so that indices are in
    range. What else an op may refuse on CUDA is refused for good: nothing runs there any more.

    With a ``batch``, tensors whose first size is its first number get its second one instead.
    """
    if isinstance(value, torch.Tensor):
        shape, stride = [size(s) for s in value.shape], [size(s) for s in value.stride()]
        if batch is not None and shape and shape[0] == batch[0]:
            shape[0] = batch[1]
        on = device if value.device.type == device.type else value.device
        tensor = torch.empty_strided(shape, stride, dtype=value.dtype, device=on)
        if value.dtype is torch.bool:
            return tensor.fill_(True)
        return tensor.uniform_() if value.dtype.is_floating_point else tensor.zero_()
    if isinstance(value, (list, tuple)):
        return type(value)(made_real(v, size, device, batch) for v in value)
    return size(value) if isinstance(value, torch.SymInt) else value


@dataclass(frozen=True)
class CallTimes:
    """Answers how long a library call takes on the device, in microseconds.

    ``size`` gives a symbolic size as a number; ``outside_fake_mode`` is a context in which tensors
    are real. Times are kept below ``directory``.
    """

    device: torch.device
    directory: Path
    size: SizeOf
    outside_fake_mode: Callable[[], AbstractContextManager[Any]]
    file: NumberFile = field(init=False)
    pace: Pace | None = field(init=False)
    unsure: dict[str, float | None] = field(default_factory=dict)
    """What is not kept: None for what has no room, and what was disturbed each time."""

    def __post_init__(self) -> None:
        path = number_path(self.directory, self.device, KIND)
        object.__setattr__(self, "file", NumberFile(path))
        object.__setattr__(self, "pace", pace_of(self.device, self.directory))

    def is_counted(self, target: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """Whether the floating-point operations of a call are counted; ``result`` is its own."""
        return flops_of_call(target, args, kwargs, result, self.size) > 0

    def of_call(self, target: Any, args: Any, kwargs: Any) -> float | None:
        """The time of a call, whose tensors may be fake.

        None where it cannot be run, or has no room.
        """
        try:
            key = call_key(target, args, kwargs, self.size)
            if key not in self.file.numbers and key not in self.unsure:
                with self.outside_fake_mode():
                    timing = measure(target, args, kwargs, self.size, self.device, self.pace)
                if timing is None or timing.disturbed:
                    self.unsure[key] = None if timing is None else timing.us
                else:
                    self.file.add(key, timing.us)
        except (RuntimeError, TypeError, ValueError, KeyError, NotImplementedError):
            return None
        return self.file.numbers.get(key, self.unsure.get(key))


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call; ``disturbed`` if other programs took a core in each of its runs."""

    us: float
    disturbed: bool


def measure(
    target: Any,
    args: Any,
    kwargs: Any,
    size: SizeOf,
    device: torch.device,
    pace: Pace | None = None,
) -> Timing | None:
    """Run a call on random data of its shapes: its `quickest` run. None where it has no room."""
    if not has_room(device, (args, kwargs)):
        return None
    real = made_real(args, size, device)
    named = {k: made_real(v, size, device) for k, v in kwargs.items()}
    with torch.no_grad():
        return quickest(lambda: target(*real, **named), device, pace)


@dataclass
class _Runs:
    """Runs of one call in which no other program took one of our cores; seconds of them."""

    call: Callable[[], object]
    device: torch.device
    quickest_of_all: float = math.inf
    """Of the disturbed ones, too."""
    quickest: float = math.inf
    next_quickest: float = math.inf
    counted: int = 0
    counted_seconds: float = 0.0
    spent: float = 0.0

    def once_more(self) -> float | None:
        """Run it; its seconds, or None, not counted, where others have disturbed it."""
        before = _interruptions(self.device)
        seconds = _seconds(self.call, self.device)
        together = seconds * _calls_of(self.device)
        self.spent += together
        self.quickest_of_all = min(self.quickest_of_all, seconds)
        if _interruptions(self.device) - before > seconds / SECONDS_TO_ONESELF:
            return None
        self.counted, self.counted_seconds = self.counted + 1, self.counted_seconds + together
        all_three = sorted((self.quickest, self.next_quickest, seconds))
        self.quickest, self.next_quickest = all_three[:2]
        return seconds

    @property
    def go_on(self) -> bool:
        """Whether another run is to be made."""
        most = SHORT_SECONDS if self.counted > 1 else MOST_SECONDS
        return self.spent < min(most, MOST_SECONDS) and not self.agree()

    def agree(self) -> bool:
        """Whether the two quickest do, and there are enough of them."""
        enough = self.counted >= FEWEST_RUNS and self.counted_seconds > ENOUGH_SECONDS
        return enough and self.next_quickest <= self.quickest * (1 + NEAR)


def quickest(call: Callable[[], object], device: torch.device, pace: Pace | None = None) -> Timing:
    """The quickest run in which no other program took one of our cores.

    Such runs are made until two of them agree. With a ``pace``, its yardstick runs between them,
    and what is given is the time at its first pace. Where the machine is too busy for any such run,
    it is the quickest of all: more than the call takes, but of the same measure as other times.
    """
    call()
    runs = _Runs(call, device)
    yardstick = None if pace is None or pace.is_known else _Runs(pace.run, device)
    if pace is not None and not pace.lately:
        pace.run()
    with alone_on(device):
        while runs.go_on:
            runs.once_more()
            if pace is None or yardstick is None or pace.is_known:
                continue
            if yardstick.spent <= YARDSTICK_SHARE * runs.spent:
                pace.note(yardstick.once_more())
    disturbed = not runs.counted
    us = 1e6 * (runs.quickest_of_all if disturbed else runs.quickest)
    return Timing(us if pace is None else pace.to_first_pace(us), disturbed)


def _calls_of(device: torch.device) -> int:
    """How many calls are one run."""
    return CALLS_BETWEEN_EVENTS if device.type == "cuda" else 1


def _interruptions(device: torch.device) -> int:
    """How often other programs have taken a core from one of our threads; not told by Windows."""
    if device.type != "cpu" or resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run; on CUDA by its own clock, while the host is ahead of the device."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize(device)
    keep_busy(device)
    begin.record()
    for _ in range(_calls_of(device)):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _calls_of(device)

"""Times of library calls, found by running each distinct call: matmuls, convolutions, attention.

A call is measured if its floating-point operations can be counted. What cannot be run is not
timed: higher-order operators, sizes nobody knows, calls that raise or for which there is no room.
Nor is what other programs disturb: a thread that waits for a core, and all that wait for it, would
count as work. Times are kept on disk (`fxremat.cost.number_file`).
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

from fxremat.cost.memory_room import has_room
from fxremat.cost.number_file import NumberFile, number_path
from fxremat.cost.roofline import SizeOf, flops_of_call

FEWEST_RUNS, NEAR = 5, 0.03
"""A call is run so often at least, and until its two quickest runs differ by no more than this."""
ENOUGH_SECONDS, MOST_SECONDS = 0.02, 0.5
"""In all runs of a call together: at least, and at most."""
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
    """An argument to run with: random numbers, integers zero so that indices are in range.

    With a ``batch``, tensors whose first size is its first number get its second one instead.
    """
    if isinstance(value, torch.Tensor):
        shape, stride = [size(s) for s in value.shape], [size(s) for s in value.stride()]
        if batch is not None and shape and shape[0] == batch[0]:
            shape[0] = batch[1]
        on = device if value.device.type == device.type else value.device
        tensor = torch.empty_strided(shape, stride, dtype=value.dtype, device=on)
        return tensor.normal_() if value.dtype.is_floating_point else tensor.zero_()
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
    given_up: set[str] = field(default_factory=set)
    """What has no room, or what other programs have disturbed each time."""

    def __post_init__(self) -> None:
        path = number_path(self.directory, self.device, KIND)
        object.__setattr__(self, "file", NumberFile(path))

    def is_counted(self, target: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """Whether the floating-point operations of a call are counted; ``result`` is its own."""
        return flops_of_call(target, args, kwargs, result, self.size) > 0

    def of_call(self, target: Any, args: Any, kwargs: Any) -> float | None:
        """The time of a call, whose tensors may be fake.

        None where it cannot be run, has no room, or never runs undisturbed by other programs.
        """
        try:
            key = call_key(target, args, kwargs, self.size)
            if key not in self.file.numbers and key not in self.given_up:
                with self.outside_fake_mode():
                    us = measure_us(target, args, kwargs, self.size, self.device)
                if us is None:
                    self.given_up.add(key)
                else:
                    self.file.add(key, us)
        except (RuntimeError, TypeError, ValueError, KeyError, NotImplementedError):
            return None
        return self.file.numbers.get(key)


def measure_us(
    target: Any, args: Any, kwargs: Any, size: SizeOf, device: torch.device
) -> float | None:
    """Run a call on random data of its shapes: microseconds, as of `quickest_us`.

    None where there is no room for it either.
    """
    if not has_room(device, (args, kwargs)):
        return None
    real = made_real(args, size, device)
    named = {k: made_real(v, size, device) for k, v in kwargs.items()}
    with torch.no_grad():
        return quickest_us(lambda: target(*real, **named), device)


def quickest_us(call: Callable[[], object], device: torch.device) -> float | None:
    """Microseconds of the quickest run in which no other program took one of our cores.

    Such runs are made until two of them agree. None where the machine is too busy for any.
    """
    call()
    first = second = math.inf
    runs, counted, spent = 0, 0.0, 0.0
    while spent < MOST_SECONDS:
        before = _interruptions(device)
        seconds = _seconds(call, device)
        spent += seconds
        if _interruptions(device) != before:
            continue
        runs, counted = runs + 1, counted + seconds
        first, second = sorted((first, second, seconds))[:2]
        if runs >= FEWEST_RUNS and counted > ENOUGH_SECONDS and second <= first * (1 + NEAR):
            break
    return 1e6 * first if runs else None


def _interruptions(device: torch.device) -> int:
    """How often other programs have taken a core from one of our threads; not told by Windows."""
    if device.type != "cpu" or resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run; on CUDA by its own clock, so that waiting for the host is not counted."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3

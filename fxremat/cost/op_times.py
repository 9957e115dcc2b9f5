"""Time of an op by running it: matmuls, convolutions and attention, each distinct call once.

A call is measured if its floating-point operations can be counted; loops that Inductor fuses
are left to the fallback, for run alone each would take longer than as a part of a kernel. So
is what cannot be run: higher-order operators, sizes nobody knows, calls that raise.

Times are kept in one JSON file per device and torch version, ``{call: microseconds}``, so that
a second compilation, or a second process, measures nothing again.
"""

from __future__ import annotations

import json
import operator
import platform
import re
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import fx

from fxremat.cost.roofline import SizeOf, flops_of
from fxremat.disk_cache import write_whole

REPEATS = 5


class Timer(Protocol):
    """Says how long an op takes; `fxremat.passes.memory_estimation.OpTimer`."""

    def __call__(self, nodes: tuple[fx.Node, ...], traffic_bytes: int) -> float:
        """Microseconds of running ``nodes`` as one kernel."""


def _is_free(node: fx.Node) -> bool:
    """Whether a node moves no memory: views, and items of a tuple."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)  # an ATen operator's; nothing else has one
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


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


def _given(node: fx.Node) -> tuple[Any, Any]:
    """Arguments with the tensors (and symbols) the nodes among them stand for."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return args, kwargs


def call_key(node: fx.Node, size: SizeOf) -> str:
    """Names a call by all that its time may depend on."""
    args, kwargs = _given(node)
    named = {k: described(v, size) for k, v in sorted(kwargs.items())}
    return json.dumps([str(node.target), described(args, size), named])


def _run_us(call: Callable[[], object], device: torch.device) -> float:
    """Microseconds of one run: the median of a few, after one to warm up."""

    def finished() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    call()
    times = []
    for _ in range(REPEATS):
        start = finished()
        call()
        times.append(finished() - start)
    return 1e6 * statistics.median(times)


def measure_call(node: fx.Node, size: SizeOf, device: torch.device) -> float:
    """Run the call that ``node`` stands for on random data of its shapes."""
    args, kwargs = _given(node)
    real = made_real(args, size, device)
    named = {k: made_real(v, size, device) for k, v in kwargs.items()}
    function: Any = node.target
    with torch.no_grad():
        return _run_us(lambda: function(*real, **named), device)


class NumbersFile:
    """Measured numbers on disk, by call; a file that cannot be read counts as empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.times = self._read()

    def _read(self) -> dict[str, float]:
        with suppress(OSError, ValueError):
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if isinstance(data, dict):
                return {k: float(v) for k, v in data.items() if isinstance(v, (int, float))}
        return {}

    def add(self, key: str, time_us: float) -> None:
        """Keep one more time, and what other processes have written meanwhile."""
        self.times = {**self._read(), **self.times, key: time_us}
        write_whole(self.path, json.dumps(self.times, indent=0))


def numbers_path(directory: Path, device: torch.device, kind: str = "op_times") -> Path:
    """The file for a kind of number, a device and a torch version."""
    name = platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    plain = re.sub(r"[^\w.+-]+", "_", f"{device.type}-{name}-torch{torch.__version__}")
    return directory / kind / f"{plain}.json"


def measured_timer(
    fallback: Timer,
    device: torch.device,
    *,
    directory: Path,
    size: SizeOf,
    outside_fake_mode: Callable[[], AbstractContextManager[Any]],
) -> Timer:
    """A timer that measures what it can and asks ``fallback`` for the rest.

    ``size`` gives a symbolic size as a number; ``outside_fake_mode`` is a context in which
    tensors are real. Times are kept below ``directory``.
    """
    file = NumbersFile(numbers_path(directory, device))

    def measured(node: fx.Node) -> float | None:
        """The time of one call; None where it is for the fallback."""
        if flops_of(node, size) <= 0:
            return None
        try:
            key = call_key(node, size)
            if key not in file.times:
                with outside_fake_mode():
                    file.add(key, measure_call(node, size, device))
        except (RuntimeError, TypeError, ValueError, KeyError, NotImplementedError):
            return None
        return file.times[key]

    def timer(nodes: tuple[fx.Node, ...], traffic_bytes: int) -> float:
        times = {node: measured(node) for node in nodes}
        total = sum(t for t in times.values() if t is not None)
        rest = tuple(n for n, t in times.items() if t is None)
        if total and all(map(_is_free, rest)):
            return total
        return total + fallback(rest, traffic_bytes)

    return timer

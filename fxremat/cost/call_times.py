"""Times of library calls, found by running each distinct call: matmuls, convolutions, attention.

A call is measured if its floating-point operations can be counted. What cannot be run is not
timed: higher-order operators, sizes nobody knows, calls that raise or for which there is no room.
On CUDA a call that has no room raises an error. Linux kills a process for memory that it has
promised and does not have, so on a CPU what a call holds is estimated first. Times are kept on disk
(`fxremat.cost.number_file`), but for those of calls that were disturbed each time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat.compat.sizes import size_bound
from fxremat.cost.number_file import NumberFile, number_path
from fxremat.cost.roofline import SizeOf, flops_of_call
from fxremat.cost.timing import ReferenceMatmul, Timing, quickest, reference_of
from fxremat.runtime.chunks import convolutions
from fxremat.sizes import KIB

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
    reference: ReferenceMatmul | None = field(init=False)
    unsure: dict[str, float | None] = field(default_factory=dict)
    """What is not kept: None for what has no room, and what was disturbed each time."""

    def __post_init__(self) -> None:
        path = number_path(self.directory, self.device, KIND)
        object.__setattr__(self, "file", NumberFile(path))
        object.__setattr__(self, "reference", reference_of(self.device, self.directory))

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
                    timing = measure(target, args, kwargs, self.size, self.device, self.reference)
                if timing is None or timing.disturbed:
                    self.unsure[key] = None if timing is None else timing.us
                else:
                    self.file.add(key, timing.us)
        except (RuntimeError, TypeError, ValueError, KeyError, NotImplementedError):
            return None
        return self.file.numbers.get(key, self.unsure.get(key))


def measure(
    target: Any,
    args: Any,
    kwargs: Any,
    size: SizeOf,
    device: torch.device,
    reference: ReferenceMatmul | None = None,
) -> Timing | None:
    """Run a call on random data of its shapes: its `quickest` run. None where it has no room."""
    if not has_room(device, (args, kwargs)):
        return None
    real = made_real(args, size, device)
    named = {k: made_real(v, size, device) for k, v in kwargs.items()}
    with torch.no_grad():
        return quickest(lambda: target(*real, **named), device, reference)


def has_room(device: torch.device, arguments: Any, batch: tuple[int, int] | None = None) -> bool:
    """Whether a call with these (fake) arguments fits into the memory of this machine.

    With a ``batch``, for the part of it that its second number says.
    """
    return device.type != "cpu" or _size_of_run(arguments, batch) <= _available_memory()


def _size_of_run(arguments: Any, batch: tuple[int, int] | None) -> int:
    """About what a run on the CPU holds."""
    tensors = [one for one in pytree.tree_leaves(arguments) if isinstance(one, torch.Tensor)]
    operands = sum(size_bound(tensor.numel()) * tensor.element_size() for tensor in tensors)
    whole, part = (1, 1) if batch is None else batch
    results = operands  # taken to be as large; a workspace has room for a copy of both
    return 2 * (operands + results) * part // whole


def _available_memory() -> int:
    """What this machine can still give to a process without writing anything out."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * KIB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_ATEN = torch.ops.aten
_LAID_OUT = {
    _ATEN.convolution.default: (0, 1),  # a weight is copied, too
    _ATEN.convolution_backward.default: (0, 1),
    convolutions.CONVOLUTION: (0, 1),
    convolutions.CONVOLUTION_BACKWARD: (0, 1),
}
"""Which operands Inductor lays out."""
_IMAGES = 4  # dimensions: batch, channels, height, width


def operands(node: fx.Node, *, images_last: bool) -> tuple[Any, Any]:
    """Arguments with the tensors (and symbols) that the nodes among them stand for.

    With ``images_last`` those of convolutions have their channels last.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    if not images_last or node.target not in _LAID_OUT:
        return args, kwargs
    places = _LAID_OUT[node.target]
    given = [_laid_out(one) if place in places else one for place, one in enumerate(args)]
    return tuple(given), kwargs


def _laid_out(given: Any) -> Any:
    if not isinstance(given, torch.Tensor) or given.dim() != _IMAGES:
        return given
    return torch.empty_like(given, memory_format=torch.channels_last)

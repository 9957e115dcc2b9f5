"""Times of library calls, found by running each distinct call: matmuls, convolutions, attention.

What cannot be run is not timed: higher-order operators, sizes nobody knows, calls that raise or for
which there is no room. On CUDA a call that has no room raises an error. Linux kills a process for
memory that it has promised and does not have, so on a CPU what a call holds is estimated first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxremat.compat.sizes import size_bound
from fxremat.cost.roofline import GROUPED_PRODUCTS, packet_name
from fxremat.cost.timing import TimedNumbers
from fxremat.runtime.chunks import convolutions
from fxremat.sizes import KIB

KIND = "call_times"
"""Of numbers on disk: microseconds of calls."""


def _described(value: Any) -> Any:
    """An argument as plain data."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), *_layout(value)]
    if isinstance(value, (list, tuple)):
        return [_described(v) for v in value]
    return size_bound(value) if isinstance(value, torch.SymInt) else repr(value)


def _layout(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides as numbers."""
    return [size_bound(n) for n in tensor.shape], [size_bound(n) for n in tensor.stride()]


def call_key(target: Any, args: Any, kwargs: Any) -> str:
    """Names a call by all that its time, or its scratch memory, may depend on."""
    named = {k: _described(v) for k, v in sorted(kwargs.items())}
    return json.dumps([str(target), _described(args), named])


def made_real(value: Any, device: torch.device, batch: tuple[int, int] | None = None) -> Any:
    """An argument to run with: numbers in [0, 1), True, and integers zero, so that indices are in
    range. What else an op may refuse on CUDA is refused for good: nothing runs there any more.

    With a ``batch``, tensors whose first size is its first number get its second one instead.
    """
    if isinstance(value, torch.Tensor):
        shape, stride = _layout(value)
        if batch is not None and shape and shape[0] == batch[0]:
            shape[0] = batch[1]
        on = device if value.device.type == device.type else value.device
        tensor = torch.empty_strided(shape, stride, dtype=value.dtype, device=on)
        if value.dtype is torch.bool:
            return tensor.fill_(True)
        return tensor.uniform_() if value.dtype.is_floating_point else tensor.zero_()
    if isinstance(value, (list, tuple)):
        return type(value)(made_real(v, device, batch) for v in value)
    return size_bound(value) if isinstance(value, torch.SymInt) else value


def made_call(
    target: Any,
    args: Any,
    kwargs: Mapping[str, Any],
    device: torch.device,
    batch: tuple[int, int] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call to run with, as `made_real` makes them.

    A ``batch`` is not one of a weight. Groups of rows that a product takes, each with a matrix of
    its own, are as large as each other: experts that were given nothing would have nothing to do.
    """

    def made(name: str, value: Any) -> Any:
        return made_real(value, device, None if name in WITHOUT_BATCH else batch)

    real = tuple(made(name, value) for name, value in by_name(target, args))
    named = {name: made(name, value) for name, value in kwargs.items()}
    ends = {**dict(by_name(target, real)), **named}.get("offs")
    if isinstance(ends, torch.Tensor) and packet_name(target) in GROUPED_PRODUCTS:
        one, other = real[:2]
        size = one.shape[-2] if other.dim() > one.dim() else other.shape[other.dim() - one.dim()]
        groups = len(ends)
        ends.copy_(torch.arange(1, groups + 1) * size // groups)
    return real, named


def by_name(target: Any, args: Any) -> Iterator[tuple[str, Any]]:
    """Positional arguments with the names that the operator's schema gives them, "" without one."""
    schema = getattr(target, "_schema", None)
    names = [argument.name for argument in getattr(schema, "arguments", ())]
    return zip_longest(names[: len(args)], args, fillvalue="")


WITHOUT_BATCH = frozenset({"weight", "bias", "running_mean", "running_var"})


class CallTimes:
    """Answers how long a library call takes on the device; times are kept below ``directory``."""

    def __init__(self, device: torch.device, directory: Path) -> None:
        self.numbers = TimedNumbers(device, directory, KIND)

    def of_call(self, target: Any, args: Any, kwargs: Any) -> float | None:
        """Microseconds of a call on random data of its shapes; its tensors may be fake.

        None where it cannot be run, or has no room. Raises `MachineIsBusy`.
        """

        def measure() -> tuple[float | None, float]:
            device = self.numbers.device
            if not has_room(device, (args, kwargs)):
                return None, 0.0
            real, named = made_call(target, args, kwargs, device)
            return self.numbers.us(lambda: target(*real, **named), cold=True)

        try:
            return self.numbers.number(call_key(target, args, kwargs), measure)
        except (RuntimeError, TypeError, ValueError, KeyError, NotImplementedError):
            return None


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

"""What generated loops reach on a device: bandwidths, costs of functions, microseconds of a call.

A loop takes as long as the slower of two things: moving its bytes, and computing its functions.
Both are measured with torch's own elementwise operators, which are loops like those that Inductor
writes. Each number is measured once for each device, when it is first asked for, and kept on disk
(`fxremat.cost.number_file`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxremat.core.constants import TILE_BYTES
from fxremat.cost.number_file import NumberFile, number_path
from fxremat.cost.roofline import SizeOf
from fxremat.cost.timing import ReferenceMatmul, quickest, reference_of

KIND = "loop_rates"
"""Of numbers on disk: what loops reach."""
TRAFFIC = tuple(TILE_BYTES // 16 * 4**k for k in range(6))
"""Bytes that a loop touches, for which its bandwidth is measured: from caches to memory."""
ELEMENTS = TILE_BYTES // 16
"""Of the tensor that a function is measured on: it stays in a cache."""
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "pow": lambda given, out: torch.pow(given, 1.5, out=out),
    "div": lambda given, out: torch.div(given, given, out=out),
    "bitwise_left_shift": lambda given, out: _integers(out).copy_(torch.le(given, 0)),
    "bitwise_right_shift": lambda given, out: torch.bitwise_right_shift(
        _integers(given), 1, out=_integers(out)
    ).ne(0),
}
"""Functions that cost more than to move their operands, by the name of the operator.

Shifts are of bits that are masks elsewhere: it is the way from one to the other that takes long.
"""
_BANDWIDTH, _CALL, _MOVING = "bytes_per_s of ", "call_us", "moving_us"


def _integers(given: torch.Tensor) -> torch.Tensor:
    return given.view(torch.int32)


@dataclass(frozen=True)
class LoopRates:
    """Rates of loops. ``number_of`` gives them by name.

    These are the nanoseconds of a function for each element, `bandwidth_name` in bytes per second,
    and ``call_us``: what a loop takes that has next to nothing to do.
    """

    number_of: Callable[[str], float]

    @property
    def call_us(self) -> float:
        """Microseconds of a loop that has next to nothing to do."""
        return self.number_of(_CALL)

    def move_us(self, nbytes: int) -> float:
        """Microseconds to move so many bytes, at the rate of the next smaller size measured."""
        place = bisect_right(TRAFFIC, nbytes)
        return 1e6 * nbytes / self.number_of(bandwidth_name(TRAFFIC[max(0, place - 1)]))

    def us(self, nodes: Iterable[fx.Node], nbytes: int, size: SizeOf) -> float:
        """Microseconds of one loop that computes ``nodes`` and moves ``nbytes``."""
        functions = ((_name(node), node.meta.get("val")) for node in nodes)
        return self.call_us + self.loop_us(
            ((n, size(v.numel())) for n, v in functions if isinstance(v, torch.Tensor)), nbytes
        )

    def loop_us(self, functions: Iterable[tuple[str, int]], nbytes: int) -> float:
        """Microseconds to compute functions of so many elements, and to move ``nbytes``."""
        dear = ((name, count) for name, count in functions if name in FUNCTIONS)
        computing = sum(self.number_of(name) * count for name, count in dear) / 1e3
        return max(self.move_us(nbytes), computing)


def bandwidth_name(nbytes: int) -> str:
    """The name of the bandwidth that a loop has which touches so many bytes, one of `TRAFFIC`."""
    return f"{_BANDWIDTH}{nbytes}"


MOST_PRODUCTS = 32
"""Inductor multiplies where the exponent is a whole number below this."""


def _name(node: fx.Node) -> str:
    """What a loop computes for the node; a power may be products, or a root."""
    name = str(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))
    exponent = node.args[1] if name == "pow" and len(node.args) > 1 else None
    if not isinstance(exponent, (int, float)):
        return name
    if float(exponent).is_integer() and abs(exponent) < MOST_PRODUCTS:
        return "mul" if exponent >= 0 else "div"
    return "sqrt" if exponent == 0.5 else name


@dataclass(frozen=True)
class MeasuredNumbers:
    """The numbers of a device by their names, measured where they are not on disk.

    Where other programs disturb each run of a loop, they are not kept there. ``outside_fake_mode``
    is a context in which tensors are real.
    """

    device: torch.device
    file: NumberFile
    reference: ReferenceMatmul | None
    outside_fake_mode: Callable[[], AbstractContextManager[Any]]
    unsure: dict[str, float] = field(default_factory=dict)

    def __call__(self, name: str) -> float:
        """The number of `LoopRates` that has this name."""
        known = self.file.numbers.get(name, self.unsure.get(name))
        if known is not None:
            return known
        if name == _CALL:
            found, disturbed = self._call_us()
        elif name.startswith(_BANDWIDTH):
            found, disturbed = self._bytes_per_s(int(name.removeprefix(_BANDWIDTH)))
        elif name == _MOVING:
            found, disturbed = self._function_us(torch.neg)
        else:
            us, disturbed = self._function_us(FUNCTIONS[name])
            found = 1e3 * max(0.0, us - self(_MOVING)) / ELEMENTS
        if disturbed:
            self.unsure[name] = found
        else:
            self.file.add(name, found)
        return found

    def _us(self, call: Callable[[], object]) -> tuple[float, bool]:
        timing = quickest(call, self.device, self.reference)
        return timing.us, timing.disturbed

    def _call_us(self) -> tuple[float, bool]:
        with self.outside_fake_mode(), torch.no_grad():
            one, two = self._full(1, 1.0), self._full(1, 1.0)
            return self._us(lambda: torch.add(one, one, out=two))

    def _full(self, count: int, number: float) -> torch.Tensor:
        """Of 4 bytes each, whatever the default is."""
        return torch.full((count,), number, dtype=torch.float32, device=self.device)

    def _bytes_per_s(self, nbytes: int) -> tuple[float, bool]:
        call_us = self(_CALL)
        with self.outside_fake_mode(), torch.no_grad():
            a, b, c = (self._full(nbytes // 12, 1.0) for _ in range(3))
            us, disturbed = self._us(lambda: torch.add(a, b, out=c))
        return 1e6 * nbytes / max(us - call_us, 1e-3), disturbed

    def _function_us(self, function: Callable[..., Any]) -> tuple[float, bool]:
        with self.outside_fake_mode(), torch.no_grad():
            given = self._full(ELEMENTS, 0.5)
            made = torch.empty_like(given)
            return self._us(lambda: function(given, out=made))


def measured_rates(
    device: torch.device,
    directory: Path,
    outside_fake_mode: Callable[[], AbstractContextManager[Any]],
) -> LoopRates:
    """The rates of this device; each is measured when it is asked for, unless it is on disk below
    ``directory``."""
    file = NumberFile(number_path(directory, device, KIND))
    reference = reference_of(device, directory)
    return LoopRates(MeasuredNumbers(device, file, reference, outside_fake_mode))

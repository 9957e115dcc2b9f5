"""What generated loops reach on a device: bandwidths, costs of functions, microseconds of a call.

A loop takes as long as the slower of two things: moving its bytes, and computing its functions.
Both are measured once for each device, with torch's own elementwise operators, which are loops
like those that Inductor writes; the numbers are kept on disk (`fxremat.cost.number_file`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxremat.cost.call_times import Timing, quickest
from fxremat.cost.number_file import NumberFile, number_path
from fxremat.cost.pace import Pace, pace_of
from fxremat.cost.roofline import SizeOf
from fxremat.sizes import KIB, MIB

KIND = "loop_rates"
"""Of numbers on disk: what loops reach."""
TRAFFIC = (256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
"""Bytes that a loop touches, for which its bandwidth is measured: from caches to memory."""
ELEMENTS = 1 << 18
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
_BANDWIDTH, _CALL = "bytes_per_s of ", "call_us"


def _integers(given: torch.Tensor) -> torch.Tensor:
    return given.view(torch.int32)


@dataclass(frozen=True)
class LoopRates:
    """Rates of loops: bytes per second by the bytes touched, nanoseconds per element of functions.

    ``call_us`` is what a loop takes that has next to nothing to do.
    """

    call_us: float
    bytes_per_s: tuple[tuple[int, float], ...]
    element_ns: Mapping[str, float]

    def move_us(self, nbytes: int) -> float:
        """Microseconds to move so many bytes."""
        place = bisect_right(self.bytes_per_s, nbytes, key=lambda pair: pair[0])
        return 1e6 * nbytes / self.bytes_per_s[max(0, place - 1)][1]

    def us(self, nodes: Iterable[fx.Node], nbytes: int, size: SizeOf) -> float:
        """Microseconds of one loop that computes ``nodes`` and moves ``nbytes``."""
        functions = ((_name(node), node.meta.get("val")) for node in nodes)
        return self.call_us + self.loop_us(
            ((n, size(v.numel())) for n, v in functions if isinstance(v, torch.Tensor)), nbytes
        )

    def loop_us(self, functions: Iterable[tuple[str, int]], nbytes: int) -> float:
        """Microseconds to compute functions of so many elements, and to move ``nbytes``."""
        computing = sum(self.element_ns.get(name, 0.0) * count for name, count in functions) / 1e3
        return max(self.move_us(nbytes), computing)


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


def measured_rates(
    device: torch.device,
    directory: Path,
    outside_fake_mode: Callable[[], AbstractContextManager[Any]],
) -> LoopRates:
    """The rates of this device, measured where they are not on disk below ``directory``.

    Where other programs disturb each run of a loop, they are not kept.
    """
    file = NumberFile(number_path(directory, device, KIND))
    numbers = file.numbers
    if not numbers.keys() >= {_CALL, *FUNCTIONS}:
        with outside_fake_mode(), torch.no_grad():
            numbers, disturbed = _measure(device, pace_of(device, directory))
        if not disturbed:
            file.add_all(numbers)
    bandwidth = [
        (int(key.removeprefix(_BANDWIDTH)), number)
        for key, number in numbers.items()
        if key.startswith(_BANDWIDTH)
    ]
    functions = {name: numbers[name] for name in FUNCTIONS if name in numbers}
    return LoopRates(numbers[_CALL], tuple(sorted(bandwidth)), functions)


def _measure(device: torch.device, pace: Pace | None) -> tuple[dict[str, float], bool]:
    """All numbers, and whether a run was disturbed each time.

    ``call_us`` is the last, so that its being there says that all are.
    """
    timings = list[Timing]()

    def us(call: Callable[[], object]) -> float:
        timings.append(quickest(call, device, pace))
        return timings[-1].us

    one, two = torch.ones(1, device=device), torch.ones(1, device=device)
    call_us = us(lambda: torch.add(one, one, out=two))
    found = {}
    for nbytes in TRAFFIC:
        a, b, c = (torch.ones(nbytes // 12, device=device) for _ in range(3))
        moved_us = us(lambda a=a, b=b, c=c: torch.add(a, b, out=c)) - call_us  # type: ignore[misc]
        found[f"{_BANDWIDTH}{nbytes}"] = 1e6 * nbytes / max(moved_us, 1e-3)
    given = torch.full((ELEMENTS,), 0.5, device=device)
    made = torch.empty_like(given)
    moving = us(lambda: torch.neg(given, out=made))
    for name, function in FUNCTIONS.items():
        computed_us = us(lambda f=function: f(given, out=made))  # type: ignore[misc]
        found[name] = 1e3 * max(0.0, computed_us - moving) / ELEMENTS
    return {**found, _CALL: call_us}, any(one.disturbed for one in timings)

"""Microseconds of an op: by the figures of a device, or by what was measured on it.

`Roofline` asks nothing but shapes and a `DeviceSpec`. `Measured` knows how long each library call
takes, also those that our own operators make inside, and what loops reach.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxremat.compat.configuration import OpOverload
from fxremat.compat.ranks import is_collective
from fxremat.compat.sizes import size_bound
from fxremat.core.constants import CALL_US, TILE_BYTES
from fxremat.cost.call_times import CallTimes, operands
from fxremat.cost.device import DeviceSpec
from fxremat.cost.roofline import flops_of, roofline_us, sent_by
from fxremat.cost.timing import TimedNumbers, Timing
from fxremat.passes.joint_graph import is_tensor
from fxremat.runtime import kernels
from fxremat.runtime.kernels import Inside

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
    """What generated loops reach on a device. ``number_of`` gives the rates by name.

    A loop takes as long as the slower of two things: moving its bytes, and computing its functions.
    Both are measured with torch's own elementwise operators, which are loops like those that
    Inductor writes, once for each device (`MeasuredNumbers`).

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

    def us(self, nodes: Iterable[fx.Node], nbytes: int) -> float:
        """Microseconds of one loop that computes ``nodes`` and moves ``nbytes``."""
        named = ((_name(node), node.meta.get("val")) for node in nodes)
        tensors = ((name, value) for name, value in named if isinstance(value, torch.Tensor))
        functions = ((name, size_bound(tensor.numel())) for name, tensor in tensors)
        return self.call_us + self.loop_us(functions, nbytes)

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
    """The numbers of a device by their names, timed where they are not known yet."""

    numbers: TimedNumbers

    def __call__(self, name: str) -> float:
        """The number of `LoopRates` that has this name."""
        found = self.numbers.number(name, lambda: self._measured(name))
        assert found is not None
        return found

    def _measured(self, name: str) -> tuple[float, float]:
        """The number, and how disturbed it was."""
        if name == _CALL:
            return self._us(1, 2, lambda given, out: torch.add(given, given, out=out))
        if name == _MOVING:
            return self._us(ELEMENTS, 2, torch.neg)
        if name in FUNCTIONS:
            us, waited = self._us(ELEMENTS, 2, FUNCTIONS[name])
            return 1e3 * max(0.0, us - self(_MOVING)) / ELEMENTS, waited
        nbytes = int(name.removeprefix(_BANDWIDTH))
        us, waited = self._us(nbytes // 12, 3, torch.add)
        return 1e6 * nbytes / max(us - self(_CALL), 1e-3), waited

    def _us(self, elements: int, count: int, function: Callable[..., Any]) -> Timing:
        """Microseconds of a function of so many tensors, the last of which it writes.

        Their elements have 4 bytes, whatever the default is.
        """
        how: Any = {"dtype": torch.float32, "device": self.numbers.device}
        *given, out = (torch.full((elements,), 0.5, **how) for _ in range(count))
        return self.numbers.us(lambda: function(*given, out=out))


def measured_rates(device: torch.device, directory: Path) -> LoopRates:
    """The rates of this device; each is measured when it is asked for, unless it is on disk below
    ``directory``."""
    return LoopRates(MeasuredNumbers(TimedNumbers(device, directory, KIND)))


def _is_free(node: fx.Node) -> bool:
    """Whether a node moves no memory: views, and items of a tuple."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)  # an ATen operator's; nothing else has one
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


@dataclass(frozen=True)
class Roofline:
    """Times by the rates of a device, which need not be here.

    ``fused`` says whether Inductor generates code for the graph, and ``images_last`` whether it
    lays images out with the channels last.
    """

    spec: DeviceSpec
    on_cpu: bool
    fused: bool
    images_last: bool = False

    def __call__(self, nodes: tuple[fx.Node, ...], traffic: int) -> float:
        """Microseconds of running ``nodes`` as one kernel."""
        rates = self.spec
        dtype = next((n.meta["val"].dtype for n in nodes if is_tensor(n)), torch.float32)
        inside = [self.inside(n) for n in nodes if n.target in kernels.INSIDE]
        extra = sum(each.calls for each in inside) * (rates.launch_us + CALL_US)
        extra += 1e6 * sum(each.again for each in inside) / rates.bytes_per_s
        traffic = traffic + sum(each.bytes for each in inside)
        sent = [sent_by(n) for n in nodes if is_collective(n)]
        extra += sum(rates.link_us + 1e6 * each / rates.link_bytes_per_s for each in sent if each)
        return extra + roofline_us(nodes, traffic, dtype, rates)

    def inside(self, node: fx.Node) -> Inside:
        """What a call of an operator of ours does inside."""
        assert isinstance(node.target, OpOverload)
        args, kwargs = operands(node, images_last=self.images_last)
        how = {"on_cpu": self.on_cpu, "by_inductor": self.fused}
        return kernels.INSIDE[node.target](*args, **kwargs, **how)


@dataclass(frozen=True)
class Measured:
    """Times by what calls take on this device; ``otherwise`` times what cannot be run."""

    calls: CallTimes
    rates: LoopRates
    otherwise: Roofline

    def __call__(self, nodes: tuple[fx.Node, ...], traffic: int) -> float:
        """Microseconds of running ``nodes`` as one kernel, or as a call and a kernel."""
        times = {node: self._library_us(node) for node in nodes}
        total = sum(each for each in times.values() if each is not None)
        rest = tuple(node for node, each in times.items() if each is None)
        if total and all(map(_is_free, rest)):
            return total
        if any(n.target in kernels.INSIDE or flops_of(n) or is_collective(n) for n in rest):
            return total + self.otherwise(rest, traffic)
        return total + self.rates.us(rest, traffic)

    def _library_us(self, node: fx.Node) -> float | None:
        """The time of a library call, or of a call that makes some inside; None for others.

        A library call is one whose floating-point operations can be counted.
        """
        if node.target in kernels.INSIDE:
            return self._inside_us(node)
        if not flops_of(node):
            return None
        given = operands(node, images_last=self.otherwise.images_last)
        return self.calls.of_call(node.target, *given)

    def _inside_us(self, node: fx.Node) -> float | None:
        """Its library calls, and what lies between: calls from Python, and loops.

        None where it does not say which they are, or one of them cannot be run.
        """
        inside = self.otherwise.inside(node)
        known = [(one, self.calls.of_call(one.target, one.args, {})) for one in inside.library]
        if not known or any(us is None for _, us in known):
            return None
        library = sum(one.times * us for one, us in known if us is not None)
        others = inside.calls - sum(one.times for one, _ in known)
        between = others * self.rates.call_us + inside.calls * CALL_US
        return library + between + self.rates.loop_us(inside.functions, inside.bytes)

"""Microseconds of an op: by the figures of a device, or by what was measured on it.

`Roofline` asks nothing but shapes and a `DeviceSpec`. `Measured` knows how long each library call
takes, also those that our own operators make inside, and what loops reach.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxremat.compat.configuration import OpOverload
from fxremat.compat.distributed.ranks import is_collective
from fxremat.compat.sizes import size_bound
from fxremat.core.constants import CALL_US
from fxremat.cost.call_times import CallTimes, operands
from fxremat.cost.device import DeviceSpec
from fxremat.cost.loop_rates import LoopRates
from fxremat.cost.roofline import roofline_us, sent_by
from fxremat.passes.joint_graph import is_tensor
from fxremat.runtime import kernels
from fxremat.runtime.kernels import Inside


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
        return extra + roofline_us(nodes, traffic, dtype, rates, size_bound)

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
        if any(node.target in kernels.INSIDE or self._is_no_loop(node) for node in rest):
            return total + self.otherwise(rest, traffic)
        return total + self.rates.us(rest, traffic, size_bound)

    def _is_no_loop(self, node: fx.Node) -> bool:
        return self._computes(node) or is_collective(node)

    def _computes(self, node: fx.Node) -> bool:
        """Whether the node is a library call that could not be run."""
        return self.calls.is_counted(node.target, *self._given(node), node.meta.get("val"))

    def _given(self, node: fx.Node) -> tuple[Any, Any]:
        return operands(node, images_last=self.otherwise.images_last)

    def _library_us(self, node: fx.Node) -> float | None:
        """The time of a library call, or of a call that makes some inside; None for others."""
        if node.target in kernels.INSIDE:
            return self._inside_us(node)
        if not self._computes(node):
            return None
        return self.calls.of_call(node.target, *self._given(node))

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

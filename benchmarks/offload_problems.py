"""What `benchmarks.offload plans` plans: large language models on devices that are too small.

A training step is traced on tensors without memory, with the rates of a device that need not be
here, so its problem is the one that the backend would plan there. It knows which result is the
gradient of which weight: where both together leave too little room, they live in host memory.

The batch is the smallest power of two whose activations alone exceed the device: so they matter on
each device, and nothing of it depends on how many layers there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx

from fxremat.compat.tensors import fake_tensors
from fxremat.compile.tracing import trace_step
from fxremat.core.constants import CALL_US
from fxremat.core.problem import Copies, Problem
from fxremat.core.timeline import replay
from fxremat.cost.device import DeviceSpec, spec_named
from fxremat.passes.joint_graph import root
from fxremat.planner.moves.host_weights import on_host

from .nets.language import GPT, Llama
from .nets.layers import Network

DTYPE = torch.bfloat16
GB = 10**9


@dataclass(frozen=True)
class Architecture:
    """A network and its arguments, but for the number of layers."""

    name: str
    network: Callable[..., Network]
    layers: int
    arguments: Mapping[str, int]

    def build(self, layers: int) -> Network:
        """The network; inside `compat.fake_tensors` it takes no memory."""
        return self.network(layers=layers, **self.arguments).to(DTYPE)


def _llama(name: str, layers: int, width: int, heads: int, hidden: int) -> Architecture:
    sizes = {"width": width, "heads": heads, "kv_heads": heads, "hidden": hidden}
    return Architecture(name, Llama, layers, {**sizes, "length": 2048, "vocabulary": 32000})


_GPT2 = {"width": 1024, "heads": 16, "length": 1024, "vocabulary": 50257}
ARCHITECTURES = (
    Architecture("gpt2-medium", GPT, 24, _GPT2),
    _llama("llama-7b", 32, 4096, 32, 11008),
    _llama("llama-13b", 40, 5120, 40, 13824),
)


@dataclass(frozen=True)
class Device:
    """The rates of a device, by name, and its memory: some such device, not all, has so much."""

    name: str
    nbytes: int

    @property
    def spec(self) -> DeviceSpec:
        """Its rates."""
        return spec_named(self.name)


DEVICES = (
    Device("T4", 8 * GB),
    Device("4090", 24 * GB),
    Device("A100", 80 * GB),
    Device("H200", 141 * GB),
)


@dataclass(frozen=True)
class Traced:
    """The problem of a training step, nothing of which moves, and each weight's gradient."""

    problem: Problem
    gradient_of: Mapping[str, str | None]

    @cached_property
    def store_all_bytes(self) -> int:
        """The peak of running every op once."""
        return replay(self.problem, self.problem.base_steps()).peak_bytes

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(self.problem.bytes_of[name] for name in self.gradient_of)

    @property
    def activation_bytes(self) -> int:
        """What store-all has at its peak if no gradient stays, besides weights and the batch."""
        alone = replace(self.problem, outputs=())
        return replay(alone, alone.base_steps()).peak_bytes - alone.resident_bytes

    def with_link(self, bytes_per_s: float) -> Problem:
        """The problem in which activations may move."""
        rate = bytes_per_s / 1e6
        return replace(self.problem, copies=Copies(rate, rate, CALL_US))

    def with_weights_on_host(self, bytes_per_s: float) -> Problem:
        """The problem in which all weights live in host memory, too, and their gradients."""
        return on_host(self.with_link(bytes_per_s), self.gradient_of)


def trace(architecture: Architecture, layers: int, batch: int, spec: DeviceSpec) -> Traced:
    """A training step of so many samples on a device of these rates."""
    with fake_tensors():
        model = architecture.build(layers)
        inputs = model.sample(batch, torch.Generator())
        found = trace_step(architecture.name, model, inputs, spec=spec).found
    joint = found.joint
    gradients = joint.results[joint.num_forward_outputs :]
    pairs = zip(joint.primals, gradients, strict=True)
    of = {p.name: root(g).name for p, g in pairs if isinstance(g, fx.Node)}
    return Traced(found.problem, of)


def batch_for(sample_bytes: int, device_bytes: int) -> int:
    """The smallest power of two of samples whose activations exceed the device."""
    batch = 1
    while batch * sample_bytes <= device_bytes:
        batch *= 2
    return batch

"""What is asked of a graph, and the problem that comes of it: its costs on the device.

Timing belongs to the runner, never to a pass: `Clock` is what it is kept with.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import fx

from fxremat import compat
from fxremat.core.alternatives import run_once
from fxremat.core.problem import Copies, Problem
from fxremat.cost.device import DeviceSpec, device_spec
from fxremat.cost.roofline import roofline_us
from fxremat.cost.workspaces import Workspaces
from fxremat.passes.gradient_sums import accumulate_sums
from fxremat.passes.joint_graph import JointGraph, is_tensor, read_joint_graph
from fxremat.passes.memory_estimation import Estimate, OpTimer, estimate
from fxremat.passes.offload import add_before_putting
from fxremat.passes.user_tags import obey_must_recompute, protect_mutated_inputs
from fxremat.passes.variants.insertion import Form
from fxremat.runtime import kernels


@dataclass(frozen=True)
class Request:
    """What is asked of a graph: bytes at most in all, and how to go about it.

    ``held_bytes`` of the budget belong to other graphs of the model, and to what no graph sees.
    ``wanted_bytes`` is what this graph should make do with if it can, because more graphs follow.
    ``copies`` is what moving values takes; None where nothing is to move. With the objective
    "energy" a plan may take ``most_time`` times what running every op once takes.
    """

    budget_bytes: int | None
    held_bytes: int
    wanted_bytes: int | None
    executor: str
    solver: str
    solver_time_limit: float | None
    op_times: str
    verify: bool
    copies: Copies | None = None
    objective: Literal["time", "energy"] = "time"
    most_time: float | None = None
    variants: tuple[str, ...] | None = None
    """Names of rules whose forms of ops may be taken; None: all."""
    allow_lossy: bool = False
    disabled: tuple[str, ...] = ()
    """Names of passes that are left out, of `fxremat.option_values.PASSES`."""
    accumulated: tuple[int, ...] = ()
    """Arguments of the graph whose gradients are to be added to their ``grad`` in the backward."""


@dataclass
class Clock:
    """Seconds spent in each stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent


def device_of(graph: fx.Graph) -> torch.device:
    """The device whose bytes are counted: the accelerator if there is one, else the CPU."""
    devices = [n.meta["val"].device for n in graph.nodes if n.op == "placeholder" and is_tensor(n)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def prepare(module: fx.GraphModule, num_fwd_outputs: int, *, fused: bool = False) -> JointGraph:
    """Clean up the joint graph and read it; the user's tags are obeyed here.

    Sums of gradients round as Inductor's do if the graph is ``fused``, else as eager torch's.
    """
    compat.prepare_joint_graph(module)
    add_before_putting(module.graph)
    if fused:
        accumulate_sums(module.graph)
    joint = read_joint_graph(module, num_fwd_outputs)
    changed = [obey_must_recompute(joint), protect_mutated_inputs(joint)]
    return read_joint_graph(module, num_fwd_outputs) if any(changed) else joint


def op_timer(request: Request, device: torch.device, spec: DeviceSpec | None = None) -> OpTimer:
    """The cost model asked for; ``spec`` is that of a device which is not here."""
    rates = device_spec(device) if spec is None else spec
    fused = request.executor == "inductor"

    def timer(nodes: tuple[fx.Node, ...], traffic_bytes: int) -> float:
        dtype = next((n.meta["val"].dtype for n in nodes if is_tensor(n)), torch.float32)
        on_cpu = rates.name == device_spec(torch.device("cpu")).name
        inside = [_inside(n, on_cpu, fused) for n in nodes if n.target in kernels.INSIDE]
        extra = sum(each.calls for each in inside) * (rates.launch_us + kernels.CALL_US)
        extra += 1e6 * sum(each.again for each in inside) / rates.bytes_per_s
        traffic = traffic_bytes + sum(each.bytes for each in inside)
        return extra + roofline_us(nodes, traffic, dtype, rates, compat.size_bound)

    if request.op_times == "measured":
        from fxremat.cost.op_times import measured_timer

        return measured_timer(
            timer,
            device,
            directory=Path(compat.cache_directory()) / "fxremat",
            size=compat.size_bound,
            outside_fake_mode=compat.outside_fake_mode,
        )
    return timer


def _inside(node: fx.Node, on_cpu: bool, fused: bool) -> kernels.Inside:
    assert isinstance(node.target, compat.OpOverload)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return kernels.INSIDE[node.target](*args, **kwargs, on_cpu=on_cpu, by_inductor=fused)


def with_energies(problem: Problem, spec: DeviceSpec) -> Problem:
    """The problem with what each op and each moved byte takes on the device."""
    ops = tuple(replace(op, energy_uj=op.time_us * spec.watts) for op in problem.ops)
    copies = problem.copies
    if copies is not None:
        copies = replace(copies, energy_uj=spec.host_nj_per_byte / 1000)
    return replace(problem, ops=ops, copies=copies)


def _with_costs(problem: Problem, request: Request, spec: DeviceSpec) -> Problem:
    """The problem with the copies of the request, if anything may move, and with energies."""
    if request.copies is not None and (problem.host or not request.copies.only_host):
        problem = replace(problem, copies=request.copies)
    return with_energies(problem, spec) if request.objective == "energy" else problem


@dataclass(frozen=True)
class Costs:
    """Makes the problem of a joint graph."""

    request: Request
    device: torch.device
    timer: OpTimer
    workspaces: Workspaces
    name: str

    def estimate(self, joint: JointGraph, forms: Sequence[Form] = ()) -> Estimate:
        """With the forms that stand in the graph as alternatives."""
        found = estimate(
            joint,
            self.timer,
            self.workspaces.of_node,
            fused=self.request.executor == "inductor",
            device=self.device.type,
            name=self.name,
            forms=forms,
            in_place="inplace" not in self.request.disabled,
        )
        problem = _with_costs(found.problem, self.request, device_spec(self.device))
        if "recompute" in self.request.disabled:
            problem = run_once(problem)
        return replace(found, problem=problem)

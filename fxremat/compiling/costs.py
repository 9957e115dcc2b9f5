"""What ops take on the device, in seconds and in scratch memory: the problem of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import fx

from fxremat import compat
from fxremat.compiling.request import Request
from fxremat.core.problem import Problem
from fxremat.core.variants import run_once
from fxremat.cost.device import DeviceSpec, device_spec
from fxremat.cost.op_times import measured_timer
from fxremat.cost.roofline import roofline_us
from fxremat.cost.workspaces import Workspaces, declared
from fxremat.passes.base import Changed, Pass
from fxremat.passes.joint_graph import JointGraph, is_tensor
from fxremat.passes.memory_estimation import Estimate, OpTimer, estimate
from fxremat.passes.variants.insertion import InsertedVariant
from fxremat.runtime import kernels


def device_of(graph: fx.Graph) -> torch.device:
    """The device whose bytes are counted: the accelerator if there is one, else the CPU."""
    devices = [n.meta["val"].device for n in graph.nodes if n.op == "placeholder" and is_tensor(n)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def op_timer(request: Request, device: torch.device, spec: DeviceSpec | None = None) -> OpTimer:
    """The cost model asked for; ``spec`` is that of a device which is not here."""
    rates = device_spec(device) if spec is None else spec
    fused = request.compiled

    def timer(nodes: tuple[fx.Node, ...], traffic_bytes: int) -> float:
        dtype = next((n.meta["val"].dtype for n in nodes if is_tensor(n)), torch.float32)
        on_cpu = rates.name == device_spec(torch.device("cpu")).name
        inside = [_inside(n, on_cpu, fused) for n in nodes if n.target in kernels.INSIDE]
        extra = sum(each.calls for each in inside) * (rates.launch_us + kernels.CALL_US)
        extra += 1e6 * sum(each.again for each in inside) / rates.bytes_per_s
        traffic = traffic_bytes + sum(each.bytes for each in inside)
        return extra + roofline_us(nodes, traffic, dtype, rates, compat.size_bound)

    if request.op_times == "measured":
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
class CostModel:
    """Makes the problem of a joint graph, by what the request asks for and the device takes.

    ``workspace`` gives the scratch bytes of a node. ``spec`` is that of a device which is not
    here; None: that of ``device``.
    """

    request: Request
    device: torch.device
    timer: OpTimer
    workspaces: Workspaces
    name: str
    workspace: Callable[[fx.Node], int]
    spec: DeviceSpec | None = None

    def estimate(self, joint: JointGraph, inserted: Sequence[InsertedVariant] = ()) -> Estimate:
        """And the variants that are inserted to choose from."""
        found = estimate(
            joint,
            self.timer,
            self.workspace,
            fused=self.request.compiled,
            device=self.device.type,
            name=self.name,
            inserted=inserted,
            in_place="inplace" not in self.request.disabled,
        )
        spec = device_spec(self.device) if self.spec is None else self.spec
        problem = _with_costs(found.problem, self.request, spec)
        if "recompute" in self.request.disabled:
            problem = run_once(problem)
        return replace(found, problem=problem)


@dataclass(frozen=True)
class MemoryEstimation(Pass):
    """Estimates a joint graph by the costs of a device; ``Changed.data`` is the `Estimate`."""

    name = "memory estimation"
    costs: CostModel
    joint: JointGraph

    def requires(self, module: fx.GraphModule) -> None:
        """The graph is the one that was read."""
        self.demand(module is self.joint.module, "the graph is not the one that was read")

    def call(self, module: fx.GraphModule) -> Changed:
        """Leaves the graph as it is."""
        return Changed(module, False, self.costs.estimate(self.joint))


def cost_model(
    request: Request,
    graph: fx.Graph,
    name: str,
    *,
    measured: bool = True,
    spec: DeviceSpec | None = None,
) -> CostModel:
    """What ops take on the device of the graph's inputs, or on that of ``spec``.

    Workspaces are ``measured`` by running each distinct library call once, on real memory; else
    only those count that operators declare.
    """
    device = device_of(graph)
    workspaces = Workspaces(device)
    workspace = workspaces.of_node if measured else declared
    return CostModel(
        request, device, op_timer(request, device, spec), workspaces, name, workspace, spec
    )

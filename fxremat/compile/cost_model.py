"""What ops take on the device, in seconds and in scratch memory: the problem of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxremat.compat.configuration import cache_directory
from fxremat.compat.inductor.post_grad import prefers_channels_last
from fxremat.compile.request import Request, device_of_inputs
from fxremat.core.problem import Problem
from fxremat.core.variants import run_once
from fxremat.cost.call_times import CallTimes
from fxremat.cost.cuda_scratch import CudaScratch
from fxremat.cost.device import DeviceSpec, card_named, device_spec
from fxremat.cost.number_file import written_together
from fxremat.cost.op_timers import Measured, Roofline, measured_rates
from fxremat.cost.workspaces import Workspaces
from fxremat.passes.base import Changed, Pass
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.memory_estimation import TANGENTS, Estimate, OpTimer, estimate
from fxremat.passes.variants.insertion import InsertedVariant
from fxremat.runtime import kernels


def op_timer(
    request: Request, device: torch.device, spec: DeviceSpec | None, *, images_last: bool
) -> OpTimer:
    """The times asked for; ``spec`` is that of a device which is not here.

    ``images_last``: Inductor lays images out with the channels last.
    """
    rates = device_spec(device) if spec is None else spec
    if request.device.link_bytes_per_s is not None:
        rates = replace(rates, link_bytes_per_s=float(request.device.link_bytes_per_s))
    on_cpu = rates.name == device_spec(torch.device("cpu")).name
    roofline = Roofline(rates, on_cpu, request.compiled, images_last)
    if request.device.op_times != "measured" or spec is not None:
        return roofline
    directory = cache_directory()
    return Measured(CallTimes(device, directory), measured_rates(device, directory), roofline)


def with_between(problem: Problem, nbytes: int) -> Problem:
    """The problem in which so many bytes are held between the forward and the backward."""
    if TANGENTS not in problem.op_of or problem.op_of[TANGENTS].workspace_bytes == nbytes:
        return problem
    ops = (replace(op, workspace_bytes=nbytes) if op.name == TANGENTS else op for op in problem.ops)
    return replace(problem, ops=tuple(ops))


@dataclass(frozen=True)
class CostModel:
    """Makes the problem of a joint graph, by what the request asks for and the device takes.

    ``workspace`` gives the scratch bytes of a node.
    """

    request: Request
    device: torch.device
    timer: OpTimer
    workspaces: Workspaces | CudaScratch
    name: str
    workspace: Callable[[fx.Node], int]

    @written_together()
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
            in_place="inplace" not in self.request.policy.disabled,
        )
        problem, copies = found.problem, self.request.device.copies
        if copies is not None and (problem.host or not copies.only_host):
            problem = replace(problem, copies=copies)
        refused = {variant.name for variant in inserted if not self._runs(variant)}
        if refused:
            kept = tuple(one for one in problem.variants if one.name not in refused)
            problem = replace(problem, variants=kept)
        if "recompute" in self.request.policy.disabled:
            problem = run_once(problem)
        return replace(found, problem=with_between(problem, self.request.budget.between))

    def _runs(self, variant: InsertedVariant) -> bool:
        """Whether each call of a variant that was tried has run: else the first step might fail."""
        if isinstance(self.workspaces, CudaScratch):
            return True
        refused = self.workspaces.refused
        for node in variant.nodes:
            self.workspace(node)
        return self.workspaces.refused == refused


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
    device = device_of_inputs([node.meta.get("val") for node in graph.find_nodes(op="placeholder")])
    module = graph.owning_module if request.compiled else None
    images_last = module is not None and prefers_channels_last(module)
    card = None if request.device.card is None else card_named(request.device.card)
    spec = spec if card is None else card.spec
    timer = op_timer(request, device, spec, images_last=images_last)
    if card is not None:
        scratch = CudaScratch(request.compiled, card.properties())
        return CostModel(request, device, timer, scratch, name, scratch.of_node)
    workspaces = Workspaces(device, images_last=images_last, by_inductor=request.compiled)
    workspace = workspaces.of_node if measured else kernels.declared
    return CostModel(request, device, timer, workspaces, name, workspace)

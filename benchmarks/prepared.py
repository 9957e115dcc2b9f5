"""Joint graphs as they are planned, outside of a compilation."""

from __future__ import annotations

from torch import fx

from fxremat.compile.cost_model import cost_model
from fxremat.compile.draft import Draft
from fxremat.compile.pipeline import PREPARE, Runner
from fxremat.compile.request import Policy, Request
from fxremat.compile.stage_times import StageTimes
from fxremat.passes.joint_graph import JointGraph


def prepare(module: fx.GraphModule, num_forward_outputs: int, *, fused: bool = False) -> JointGraph:
    """The joint graph as it is planned, where nothing more is asked for; changes the module.

    Sums of gradients round as Inductor's do if the graph is ``fused``, else as eager torch's.
    """
    request = Request(policy=Policy(executor="inductor" if fused else "aot_eager"))
    costs = cost_model(request, module.graph, "prepared", measured=False)
    draft = Draft(module, num_forward_outputs)
    return Runner(costs, StageTimes()).run("prepare", PREPARE, draft).joint

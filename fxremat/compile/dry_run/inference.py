"""What a graph takes that needs no gradients, as in an evaluation or in generation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from fxremat.compat.compilers import trace_without_gradients
from fxremat.compat.inductor.generated_code import generate
from fxremat.compat.sizes import planned_inputs
from fxremat.compat.tensors import without_memory
from fxremat.compile.cost_model import cost_model
from fxremat.compile.dry_run.dry_run import resident_inputs
from fxremat.compile.dry_run.meter import CodeMeter, Workspace
from fxremat.compile.request import Request
from fxremat.errors import InfeasibleBudget
from fxremat.memory.measured_peak import uncollected
from fxremat.report.report import MOST_ROWS, describe

log = logging.getLogger(__name__)

NOT_COUNTED = (
    "fxremat: the code of a graph without gradients could not run without data (%s: %s): the "
    "budget is not checked for it"
)


def refusal_without_gradients(
    gm: fx.GraphModule, inputs: Sequence[Any], request: Request, patches: Mapping[str, Any]
) -> InfeasibleBudget | None:
    """The error of a graph of Dynamo whose call takes more than is left of the budget.

    Inductor's code runs on tensors without memory, as for training; ``patches`` are its
    configuration. With a warning, a graph whose code needs data to run is not counted.
    """
    if request.budget.own is None:
        return None
    module = trace_without_gradients(gm, inputs, patches)
    costs = cost_model(request, module.graph, "without gradients")
    try:
        peak, live = inference_peak(module, costs.device.type, costs.workspaces.blocks_of_call)
    except Exception as error:  # any op of any library may refuse
        log.warning(NOT_COUNTED, type(error).__name__, str(error).partition("\n")[0])
        return None
    if peak <= request.budget.own:
        return None
    nodes = {node.name: node for node in module.graph.nodes}
    largest = sorted(live, key=lambda one: -one[1])[:MOST_ROWS]
    rows = tuple((describe(nodes[name]) if name in nodes else name, n) for name, n in largest if n)
    least, limit = peak + request.budget.beside, request.budget.own + request.budget.beside
    return InfeasibleBudget(limit, least, rows, only_runs=True)


@uncollected()
def inference_peak(
    module: fx.GraphModule, device: str, workspace: Workspace
) -> tuple[int, tuple[tuple[str, int], ...]]:
    """The most bytes that are live on the device while the code runs, and what they are.

    ``workspace`` gives the scratch memory of a library call. Inputs are there throughout.
    """
    (results,) = module.graph.output_node().args
    assert isinstance(results, (tuple, list))
    code = generate(module, is_backward=False, is_inference=True, seen_outputs=len(results))
    meter = CodeMeter(device=device, workspace=workspace)
    with without_memory() as fake:
        given = planned_inputs(module.graph)
        meter.watch(given)
        returned = meter.run(code, "<inference>", list(given.values()), fake, module.graph)
        del returned
    resident = resident_inputs(module, device)
    return meter.peak + sum(size for _, size in resident), (*resident, *meter.at_peak)

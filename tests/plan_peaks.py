"""The peak of a step under a plan: measured, and replayed."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from fxremat.core.timeline import replay
from fxremat.cost.workspaces import Workspaces
from fxremat.memory.measured_peak import measure_peak
from tests.graphs import Capture, Choose, compiled


def peaks(
    model: nn.Module, inputs: Sequence[torch.Tensor], choose: Choose, workspaces: bool = False
) -> tuple[int, int]:
    """Measured and replayed bytes of a step that keeps its result and its tangent."""
    model = copy.deepcopy(model)
    given = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    seen = Capture(choose)
    if workspaces:
        seen.workspace = Workspaces(torch.device("cpu")).of_node
    run = compiled(model, seen)

    def step() -> None:
        result = run(*given)
        result.backward(torch.ones_like(result))

    step()
    for leaf in (*model.parameters(), *given):
        leaf.grad = None
    resident = sum(seen.problem.bytes_of[name] for name in seen.problem.resident)
    peak = measure_peak(step, held=[model, *given]).above_start_bytes
    return peak, replay(seen.problem, seen.steps).peak_bytes - resident

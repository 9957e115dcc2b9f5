"""`prepare`: a step is recorded as a whole, before its compiled parts are compiled one by one.

Where blocks are compiled by themselves, each compiler call sees one block. What runs between the
blocks, the loss, and how often each block runs is in the Python code around them. So one step runs
on tensors without memory (`fxremat.step.recorder`). With what the parts offer
(`fxremat.step.versions`) that is the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxremat.compat.dynamo import compile_parts, compiled_parts, unwrapped
from fxremat.compat.ranks import parts_given_back, shared_over_ranks
from fxremat.compile import session
from fxremat.compile.driver import total_bytes
from fxremat.compile.request import device_of_inputs, optimizers_of, still_to_come, unseen_bytes
from fxremat.cost.cuda_scratch import allocate_cublas
from fxremat.errors import InfeasibleBudget, NotTraceable
from fxremat.options import Options, parse_options
from fxremat.planner import step_versions as planner
from fxremat.sizes import format_bytes
from fxremat.step.description import StepDescription
from fxremat.step.recorder import StepRecorder, tensors_of

log = logging.getLogger(__name__)


def prepare(
    model: nn.Module,
    *inputs: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    memory_budget: int | str | None = None,
    options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> nn.Module:
    """Plan all compiled parts of ``model`` together, by a look at one step; gives the model back.

    The parts are the modules inside that are compiled by themselves, by ``block.compile()`` or by
    ``torch.compile(block)``; without any, the model is compiled as a whole. In place, they are
    compiled by fxremat with these ``options``, when they first run. The step is
    ``loss(model(*inputs, **keywords))``, forward and backward; ``loss`` is not needed where the
    model gives one number, or an object with a ``loss``. No tensor gets memory, and nothing of the
    model changes. ``memory_budget`` is a shorthand for the option that matters most.

    Raises `InfeasibleBudget` with the least that all parts together need, `NotTraceable` where the
    model gives no loss, or has parameters in parts by tensor parallel, and `InvalidOption`.
    """
    given = dict(options or {})
    if memory_budget is not None:
        given["memory_budget"] = memory_budget
    own = unwrapped(model)
    device = device_of_inputs([*own.parameters(), *pytree.tree_leaves((inputs, keywords))])
    parsed = parse_options(given, device_total_bytes=total_bytes(device))
    parts = compiled_parts(model) or [own]
    shared = shared_over_ranks(own)
    if shared:
        raise NotTraceable(type(own).__name__, _SHARED.format(shared[0]))
    sharded, gathered = parts_given_back(own)
    held = _held_bytes(own, (inputs, keywords), parsed, device) + gathered
    keeps_events = device.type == "cuda" and not sharded
    recorder = StepRecorder(parsed, device, keeps_events, held, sharded)
    recorder.record(own, parts, (inputs, keywords), loss)
    seen = recorder.description()
    _check_budget(seen, parsed)
    for index, graph in enumerate(recorder.graphs):
        session.STATE.seen[graph.signature] = seen, index
    for part, indices in recorder.graphs_of.items():
        if len(indices) == 1:
            session.STATE.seen_parts[part] = seen, min(indices)
    compile_parts(model, parts, backend="fxremat", options=given)
    return model


_SHARED = (
    "{} is sharded over ranks, as in tensor parallelism, which prepare does not support; compile "
    "the blocks with fxremat and without prepare: what they hold is counted then, too"
)


def _held_bytes(model: nn.Module, given: Any, options: Options, device: torch.device) -> int:
    """What lies beside the model and its inputs, by what is said, or what CUDA's allocator has."""
    trained = optimizers_of(options, device, (), model.parameters())
    coming = still_to_come(options, trained, device)
    if device.type != "cuda":
        return coming
    allocate_cublas(device)  # it would come later
    return unseen_bytes(tensors_of(model, given), device) + coming


def _check_budget(seen: StepDescription, options: Options) -> None:
    """Raise `InfeasibleBudget` where no choice of versions is within the budget."""
    step, budget, request = seen.step(), options.memory_budget, seen.request
    if budget is None or request is None:
        return
    asked = request.with_budget(limit=budget).budget
    if planner.fastest(step, asked.for_step) is None:
        least = step.peak_bytes(planner.lowest(step))
        raise InfeasibleBudget(budget, asked.least_for(least))
    outside = max(point.outside_bytes for point in step.points)
    log.info(
        "fxremat: %d graphs run %d times in a step; outside of them at most %s are live",
        len(seen.parts), len(seen.part_of), format_bytes(outside),
    )  # fmt: skip

"""``model = fxremat.offload(model, example_inputs=..., memory_budget="8GiB")``.

Which parameters live in host memory is either said by name, or found out: the training step is
traced, and the planner moves as few weights as the budget asks for, and as many as make the step
the fastest within it. How they live there is `fxremat.training.host_weights`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from fxremat import planner
from fxremat.compile.request import copies_of
from fxremat.compile.tracing import trace_step
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.cost.device import device_spec
from fxremat.errors import InfeasibleBudget, InvalidOption
from fxremat.options import Options, parse_options
from fxremat.planner import SolverOptions
from fxremat.planner.moves.host_weights import select as select_weights
from fxremat.planner.moves.offload import quick
from fxremat.sizes import format_bytes
from fxremat.training.host_weights import default_device, place, restore, select

log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


def offload(
    model: Model,
    example_inputs: Sequence[Any] | None = None,
    *,
    memory_budget: int | str | None = None,
    weights: str | Iterable[str] | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Model:
    """Let parameters live in host memory, where they are needed there; gives the model itself.

    Either ``weights`` names them: patterns as in ``"blocks.*.weight"``, or ``"all"``; an empty
    list restores the model. Or ``example_inputs`` and ``memory_budget`` (bytes, ``"8GiB"``,
    ``"80%"``) say what a step is to fit into: then the fewest parameters move that make the step
    fit, and more only where that makes it faster; with room enough none does. ``options`` are
    those of ``torch.compile(..., backend="fxremat")`` that bear on it: ``offload``,
    ``host_bandwidth``, ``host_memory_budget``, ``reserve``, ``executor``.

    ``device`` is where the rest of the model goes, see `fxremat.training.host_weights.place`; the
    model and the inputs are traced where they are, with the times of that device. Compile the model
    afterwards, with the same budget.

    Raises `InvalidOption`, `NotTraceable` where forward and backward are not one graph, and
    `InfeasibleBudget` where not even all weights in host memory are enough.
    """
    if memory_budget is None:
        if example_inputs is not None and weights is None:
            raise InvalidOption("memory_budget", None, "a number of bytes beside example_inputs")
        wanted = "all" if weights is None else weights
        patterns = [wanted] if isinstance(wanted, str) else list(wanted)
        return place(model, select(model, patterns), device) if patterns else restore(model)
    if weights is not None or example_inputs is None:
        expected = "example_inputs beside memory_budget, or weights without it"
        raise InvalidOption("weights", weights, expected)
    where = torch.device(default_device(model) if device is None else device)
    total = torch.cuda.get_device_properties(where).total_memory if where.type == "cuda" else None
    parsed = parse_options({**options, "memory_budget": memory_budget}, device_total_bytes=total)
    names = choose(model, tuple(example_inputs), parsed, where)
    return place(model, names, where) if names else model


def choose(
    model: nn.Module, example_inputs: Sequence[Any], options: Options, device: torch.device
) -> list[str]:
    """The parameters to move so that a step fits the budget; logs what they give."""
    step = trace_step(
        type(model).__name__, model, example_inputs, mode=options.executor, spec=device_spec(device)
    )
    movable = set(select(model, ["all"]))
    parameters = {n: p for n, p in model.named_parameters() if n in movable}
    values = step.weights(parameters)
    copies = copies_of(options, device)
    problem = replace(step.found.problem, copies=copies)
    assert options.memory_budget is not None
    budget = options.memory_budget - (options.reserve or 0)

    def plan_for(question: Problem) -> Plan:
        if question.host or not copies.only_host:
            return quick(question, budget, SolverOptions())
        return planner.solve(replace(question, copies=None), budget, "greedy")

    found = select_weights(problem, dict(values.values()), budget, plan_for)
    peak = found.plan.peak_bytes
    if peak > budget:
        raise InfeasibleBudget(options.memory_budget, peak + (options.reserve or 0))
    chosen = set(found.weights)
    names = [name for name, (value, _) in values.items() if value in chosen]
    moved = sum(parameters[name].nbytes for name in names)
    added = found.plan.time_us / max(problem.base_time_us, 1e-9) - 1
    log.info(
        "fxremat: %d of %d parameters (%s) live in host memory | peak %s of %s | +%.1f%% time",
        len(names), len(parameters), format_bytes(moved), format_bytes(peak),
        format_bytes(budget), 100 * added,
    )  # fmt: skip
    return names

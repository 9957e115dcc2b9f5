"""``torch.compile(model, backend="fxremat", options={"memory_budget": "8GiB"})``.

The backend is Inductor's own compiler with our partitioner and our ordering pass in its
configuration; all of Inductor stays. With ``executor="aot_eager"`` the transformed graphs run
as they are, node by node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from torch import fx, nn

from fxremat import faults, inactive
from fxremat.compat.backward import hooks_on_what_is_saved
from fxremat.compat.compilers import compile_with_inductor
from fxremat.compat.configuration import inductor_patches
from fxremat.compat.dynamo import (
    calling_modules,
    checkpointed_regions,
    current_compilation,
    functions_compiled_by,
    inline_regions,
    modules_compiled_by,
    more_follow,
    splits_for_ddp,
    takes_gradients,
    unwrapped,
)
from fxremat.compat.inductor.lowered_ahead import forget_lowered
from fxremat.compat.joint_graph import copy_as_given
from fxremat.compat.optimizers import note_optimizers
from fxremat.compat.ranks import is_a_rank, ranks_together
from fxremat.compat.tensors import places_in_joint
from fxremat.compile import session
from fxremat.compile.driver import total_bytes
from fxremat.compile.ranks import agreed
from fxremat.compile.request import device_of_inputs
from fxremat.cost.device import absent_card
from fxremat.cost.timing import forget_unsure
from fxremat.errors import InfeasibleBudget, UnsupportedDevice, forget_frames
from fxremat.memory.enforced import explained
from fxremat.memory.storages import storages_of
from fxremat.options import disabled, parse_options
from fxremat.report.report import peak_table
from fxremat.runtime.grouped_products import trace_experts
from fxremat.step import scope as scopes
from fxremat.step.context import (
    ModelContext,
    Surroundings,
    fixed_inputs,
    model_context,
    others_to_come,
    see_split_parts,
)
from fxremat.step.given import Given
from fxremat.step.graph import Graph, Role, plan_only
from fxremat.step.in_flight import watch_in_flight, without_backward
from fxremat.step.promise import Observed, alive
from fxremat.step.runs import GraphInStep
from fxremat.step.scope import BudgetScope, Neighbours

log = logging.getLogger(__name__)


def fxremat(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """Compile one graph for a byte budget; the entry point that torch.compile finds by name.

    Raises `InvalidOption`, `UnsupportedDevice` or `InfeasibleBudget`; through torch.compile they
    arrive as ``BackendCompilerFailed.inner_exception``. What fails of ours is left out
    (`fxremat.faults`).
    For a card that is not here the graph is planned, and runs without memory as its inputs do.
    """
    if not disabled():
        trace_experts()
    if absent_card() is not None:
        inactive.training_graph_seen()
        planned, report = plan_only(gm, example_inputs, options or {})
        session.STATE.reports += [] if report is None else [report]
        return planned
    device = device_of_inputs(example_inputs)
    total = total_bytes(device)
    parsed = parse_options(options, device_total_bytes=total)
    if disabled():
        patches = inductor_patches(mode, dict(parsed.inductor))
        return compile_with_inductor(gm, example_inputs, patches)
    if parsed.memory_budget is not None and device.type not in ("cpu", "cuda"):
        raise UnsupportedDevice(str(device))
    goes_on, gm = more_follow(gm), inline_regions(gm)
    ranks = ranks_together(gm, example_inputs)
    graph = Graph(copy_as_given(gm), example_inputs, parsed, mode, ranks, goes_on)
    graph.leave_out_unsent()
    calling = list(map(unwrapped, calling_modules()))
    _REFUSED.difference_update(calling)
    _expect_others(graph, options, calling)
    try:
        return _compiled_in_step(graph, options or {})
    except Exception:
        _REFUSED.update(calling)
        raise


def _expect_others(
    graph: Graph, options: Mapping[str, Any] | None, calling: Sequence[nn.Module]
) -> None:
    """Know of all modules that are compiled for the same budget, before they run.

    Those in training mode will have gradients; who has some was trained before, in another way:
    these are there, and no run is expected. Ranks count by what wrappers say, and DDP by parts.
    """
    scope = scopes.scope_of(graph.device, graph.options.memory_budget)
    if graph.options.memory_budget is None or scope.graphs or is_a_rank() or splits_for_ddp():
        return
    modules = modules_compiled_by(fxremat, calling)
    trained = [one for one, given in modules if one.training and given == (options or {})]
    trained = [one for one in trained if one not in _REFUSED]
    scope.given.know(x for one in trained for x in one.parameters() if x.device == graph.device)
    new = [one for one in trained if all(x.grad is None for x in one.parameters())]
    scope.given.expect(new, graph.device)


_REFUSED: WeakSet[nn.Module] = WeakSet()
"""Modules that could not be compiled: who has caught the error, and makes another, has both."""


def _role_of(graph: Graph) -> Role:
    """Its role in a step that was looked at before, or that of another graph of its module.

    Code may look at what it is given, which a tensor without memory cannot show: so a module may
    have other graphs in the real step.
    """
    seen, parts = session.STATE.seen, session.STATE.seen_parts
    known = seen.get(session.signature(graph.kept, graph.inputs)) if seen else None
    if known is not None:
        return Role(*known)
    part = next(reversed(calling_modules()), None)
    described, index = (None, 0) if part is None else parts.get(part, (None, 0))
    return Role(described, index, looked_at=False)


def _compiled_in_step(graph: Graph, options: Mapping[str, Any]) -> Callable[..., Any]:
    """A graph compiled as a part of its step: beside what other graphs hold under its budget."""
    scope = scopes.scope_of(graph.device, graph.options.memory_budget)
    session.STATE.rank_timeout = graph.options.rank_timeout
    in_step, apart = _placed(graph, list(scope.given.modules)), None
    graph.check_inference(in_step.request)
    if in_step.where.context.siblings:
        apart = _placed(graph, ())
    try:
        found = in_step.compiled()
    except InfeasibleBudget as refused:
        forget_frames(refused)
        if apart is not None:
            in_step, apart, scope.given.refused = apart, None, refused
        elif _loss_follows(graph, scope, options):
            in_step = _placed(graph, list(scope.given.modules), loss_follows=True)
        else:
            raise
        try:
            found = in_step.compiled()
        except InfeasibleBudget:
            raise refused from None
    limited = in_step.request.budget.limit is not None
    if found is None:
        assert in_step.call is not None
        if limited and not is_a_rank():
            scope.given.know(one for one in graph.inputs if isinstance(one, nn.Parameter))
        if limited and takes_gradients(graph.kept):
            inactive.training_graph_seen()
            log.warning(NOT_PLANNED)
        call = without_backward(in_step.call, scope) if limited else in_step.call
        return _under_cap(in_step, call)
    if limited:
        inactive.training_graph_seen()
        _warn_of_checkpointing(graph)
    graph.forget_inputs()
    scope.graphs.add(in_step)
    watched = watch_in_flight(found, scope, in_step.where.place[0], in_step, apart)
    return _under_cap(in_step, watched)


def _loss_follows(graph: Graph, scope: BudgetScope, options: Mapping[str, Any]) -> bool:
    """Whether a function that is compiled for the same budget may take what the graph returns.

    Then the least is known when that has run: until then what it takes can only be guessed.
    """
    unknown = graph.needs_gradients and not graph.gives_loss and not (scope.graphs or is_a_rank())
    return unknown and any(given == options for given in functions_compiled_by(fxremat))


def _placed(
    graph: Graph, compiled: Sequence[nn.Module], *, loss_follows: bool = False
) -> GraphInStep:
    """A graph in its step, where modules like its own among those ``compiled`` wait with it."""
    options, device, role = graph.options, graph.device, _role_of(graph)
    scope, place = scopes.scope_of(device, options.memory_budget), current_compilation()
    context = model_context(options, device, compiled)
    count = context.runs if role.described is None else len(role.described.runs_of(role.index))
    beside = scope.neighbours(place, graph.inputs, context.others, device, count)
    weights = [one for one in alive(context.everything) if isinstance(one, nn.Parameter)]
    request = graph.request(context.nbytes, beside.nbytes, weights)
    if device.type == "cuda":  # all else that is there is seen
        request = request.with_budget(held=request.budget.held + beside.coming)
    if context.pipeline is not None and context.pipeline.whole:  # others hold what it is given
        places = places_in_joint(graph.inputs)
        request = request.with_inputs(parameters=tuple(range(places[-1].stop)))
    request = agreed(graph.kept, graph.ranks, request)
    if request.budget.limit is not None and splits_for_ddp():
        see_split_parts(request, context.left_bytes, graph)
        role = _role_of(graph)
    if role.described is not None and role.looked_at:
        known = role.described.request
        request = request.with_inputs(passed_on=known is not None and known.inputs.passed_on)
    follow = graph.goes_on or loss_follows
    if _others_are_expected(compiled, context, beside, scope.given):
        follow |= not graph.gives_loss
    where = Surroundings(
        device,
        context,
        scope,
        place,
        beside,
        follow=follow and role.described is None,
        given=frozenset(storages_of(graph.inputs, device)),
        fixed_inputs=fixed_inputs(graph.inputs) if request.budget.metric == "allocated" else (),
    )
    limit = request.budget.limit
    signature = session.signature(graph.kept, graph.inputs) if limit is not None else ""
    observed = Observed(signature, limit, str(device))
    if not (where.follow or where.context.runs > 1 or beside.graphs or role.described):
        observed.expected = graph.expected_of_loss
    return GraphInStep(graph, request, where, role, observed=observed)


def _others_are_expected(
    compiled: Sequence[nn.Module], context: ModelContext, beside: Neighbours, given: Given
) -> bool:
    """Whether graphs that are not known yet will run in this step.

    Models that are compiled for the same budget, and have not run yet, may do so; so do other
    parts of a model whose parts are compiled one by one. And if the graph is of a part of a
    compiled model, Dynamo has given up around that part. Under a checkpoint a graph saves nothing,
    and is planned as if it were alone.
    """
    if not compiled or hooks_on_what_is_saved():
        return False
    part = next(reversed(calling_modules()), None)
    inside = part is not None and unwrapped(part) not in compiled
    others = part is not None and others_to_come(unwrapped(part), compiled, given.expected)
    return inside or others or (beside.coming > 0 and context.runs == 1)


def _warn_of_checkpointing(graph: Graph) -> None:
    """Where a model's own checkpointing is on, which leaves less to choose."""
    regions = checkpointed_regions(graph.kept)
    inside = (one for model in calling_modules() for one in model.modules())
    if regions and any(getattr(one, "gradient_checkpointing", False) is True for one in inside):
        log.warning(CHECKPOINTED, regions)


CHECKPOINTED = (
    "fxremat: the model's gradient checkpointing is on: %d regions run again in the backward, "
    "whatever the budget is. Call model.gradient_checkpointing_disable(): fxremat chooses what is "
    "computed again, and only as much of it as the budget needs."
)
NOT_PLANNED = (
    "fxremat: a compiled function takes gradients itself, by torch.func: its graph has no backward "
    "that could be planned, and the memory budget has no effect on it. Compile the model alone, "
    "and call backward() outside, for the budget to hold."
)


def _under_cap(in_step: GraphInStep, call: Callable[..., Any]) -> Callable[..., Any]:
    """What runs the graph, and on CUDA says what was planned where memory runs out.

    Where that is asked for, it runs under a cap of the allocator.
    """
    limit, device = in_step.request.budget.limit, in_step.where.device
    capped = in_step.graph.options.enforce
    if limit is None or not (capped or device.type == "cuda"):
        return call

    def planned() -> str:
        reports = [version.report for version in in_step.known.values()]
        return "\n".join(peak_table(report) for report in reports if report is not None)

    return explained(call, device, limit, planned, capped=capped)


def _reset() -> None:
    """Forget what was compiled; called by ``torch._dynamo.reset()``."""
    session.reset()
    inactive.reset()
    faults.reset()
    scopes.forget()
    forget_lowered()
    forget_unsure()


fxremat.reset = _reset  # type: ignore[attr-defined]
note_optimizers()
inactive.watch(fxremat)

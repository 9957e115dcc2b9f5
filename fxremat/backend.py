"""``torch.compile(model, backend="fxremat", options={"memory_budget": "8GiB"})``.

The backend is Inductor's own compiler with our partitioner and our ordering pass in its
configuration; all of Inductor stays. With ``executor="aot_eager"`` the transformed graphs run
as they are, node by node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxremat import compat
from fxremat.compiling import session
from fxremat.compiling.draft import Draft
from fxremat.compiling.partitioner import Partitioner
from fxremat.compiling.ranks import agreed, see_same_plan
from fxremat.compiling.request import Request, device_of_inputs, request_for
from fxremat.compiling.tracing import Ended
from fxremat.compiling.units import Unit, unit_on_all_ranks
from fxremat.ddp import see_parts
from fxremat.device import absent_card
from fxremat.errors import InfeasibleBudget, forget_frames
from fxremat.options import Options, disabled, parse_options
from fxremat.passes.held_order import Fence, WriteResults
from fxremat.report.files import prepare_folder, write_report
from fxremat.report.report import Report
from fxremat.report.telling import tell_report
from fxremat.runtime import in_flight, is_host
from fxremat.runtime.in_flight import Places, Runs, watch_in_flight
from fxremat.sizes import format_bytes
from fxremat.units import (
    CompiledVersion,
    NoBackward,
    RunsOfOneGraph,
    fixed_inputs,
    surroundings,
)
from fxremat.version import build

log = logging.getLogger(__name__)


def total_bytes(device: torch.device) -> int | None:
    """Of the device, or of the card that is planned for; None for the CPU."""
    card = absent_card()
    if card is not None:
        return card.usable_bytes
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def _key(gm: fx.GraphModule, inputs: Sequence[Any], partitioner: Partitioner) -> str:
    """Names the graph, its inputs and all that a plan depends on."""
    gradients = torch.is_grad_enabled()  # without them nothing is planned
    sizes = session.sizes_of(inputs)
    return session.digest(gm.code, sizes, gradients, partitioner.uuid(), torch.__version__)


NO_POOLS = "they keep memory of their own, which no plan counts; give no memory_budget to have them"


def patches_for(
    options: Options, request: Request, mode: str | None = None, inputs: Sequence[Any] = ()
) -> dict[str, Any]:
    """Inductor's configuration: the user's, with our ordering passes."""
    user = compat.inductor_patches(mode, options.inductor_options())

    def theirs(name: str) -> Any:
        return user.get(name, getattr(compat.inductor_config, name))

    # Reusing a buffer holds it from its last use to its next: the peak would exceed the plan's.
    exact = {} if request.budget_bytes is None else {"allow_buffer_reuse": False}
    moves = options.offload or any(isinstance(x, torch.Tensor) and is_host(x) for x in inputs)
    # They allocate in pools of their own, beside the segment that the plan is cut from.
    counted = options.memory_budget is not None and request.allocator is not None
    if (moves or counted) and theirs(compat.CUDAGRAPHS):
        why = "a graph that moves values to host memory has none" if moves else NO_POOLS
        log.warning("cudagraphs are off: %s", why)
        user = {**user, compat.CUDAGRAPHS: False}
    return {
        **exact,
        **user,
        compat.POST_GRAD_PASS: WriteResults(
            build(), compat.chain_passes(theirs(compat.POST_GRAD_PASS))
        ),
        compat.SCHEDULER_PASS: Fence(build(), theirs(compat.SCHEDULER_PASS)),
    }


def _patches(
    options: Options, partitioner: Partitioner, mode: str | None, inputs: Sequence[Any]
) -> dict[str, Any]:
    """The same with our partitioner."""
    patches = patches_for(options, partitioner.request, mode, inputs)
    return {**patches, compat.PARTITIONER: partitioner}


def _compile(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, partitioner: Partitioner,
    patches: dict[str, Any],
) -> Callable[..., Any]:  # fmt: skip
    if options.executor == "aot_eager":
        return compat.compile_with_aot_eager(gm, inputs, partitioner)
    if device_of_inputs(inputs).type == "cpu":
        compat.look_for_vectors()  # while the graph is traced
    return compat.compile_with_inductor(gm, inputs, patches)


@contextmanager
def _told(options: Options, current: session.Session) -> Iterator[None]:
    """The report in logs and files, where that is asked for; a refused budget has one too."""
    if options.report is not None:
        prepare_folder(options.report)
    try:
        yield
    finally:
        if current.report is not None:
            tell_report(current.report)
            if options.report is not None:
                write_report(options.report, current.report)


def fxremat(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """Compile one graph for a byte budget; the entry point that torch.compile finds by name.

    Raises `InvalidOption`, `InfeasibleBudget` or `VerificationFailed`; through torch.compile
    they arrive as ``BackendCompilerFailed.inner_exception``. For a card that is not here the graph
    is planned, and runs without memory as its inputs do.
    """
    if absent_card() is not None:
        planned, report = plan_only(gm, example_inputs, options or {})
        session.STATE.reports += [] if report is None else [report]
        return planned
    device = device_of_inputs(example_inputs)
    parsed = parse_options(options, device_total_bytes=total_bytes(device))
    if disabled():
        patches = compat.inductor_patches(mode, parsed.inductor_options())
        return compat.compile_with_inductor(gm, example_inputs, patches)
    gm = compat.inline_regions(gm)
    ledger, place = session.ledger(options), compat.current_compilation()
    around = surroundings(parsed, device)
    session.STATE.rank_timeout = parsed.rank_timeout
    outside = around.nbytes if compat.calling_modules() else ledger.outside_bytes()
    request = request_for(gm, example_inputs, parsed, ledger, place, outside)
    if around.pipeline is not None and around.pipeline.whole:  # others hold what it is given
        everything = compat.places_in_joint(example_inputs)
        request = replace(request, parameters=tuple(range(everything[-1].stop)))
    ranks = compat.ranks_together(gm, example_inputs)
    request = agreed(gm, ranks, request)
    graph = Graph(gm, compat.copy_module(gm), example_inputs, parsed, mode, ranks)
    unseen = request.held_bytes - ledger.held_by_others(*place)
    if request.budget_bytes is not None and compat.splits_for_ddp():
        see_parts(replace(request, wanted_bytes=None), around.left_bytes, graph.of_another)
    seen, index = session.seen_as(gm, example_inputs)
    as_seen = seen is not None
    if as_seen:  # all that follow have their part
        passed = seen.request is not None and seen.request.is_passed_on
        request = replace(request, wanted_bytes=None, is_passed_on=passed)
    if seen is None:
        seen, index = session.seen_in(next(reversed(compat.calling_modules()), None))
    frame, compilation = place
    places = ledger.places.setdefault(frame, Places())
    count = around.runs if seen is None else len(seen.runs_of(index))
    first = places.first_units() if request.count == "allocated" else ()
    first = first if len(first) < count else ()
    runs = RunsOfOneGraph(
        request, device, around, unseen, graph.compile, graph.plan, graph.as_unit, seen, index,
        as_seen=as_seen, coming_bytes=parsed.reserve or 0, first=first,
        fixed_inputs=fixed_inputs(example_inputs) if request.count == "allocated" else (),
        places=places,
    )  # fmt: skip
    together = count > 1 or seen is not None or around.pipeline is not None
    found, told = None, len(session.STATE.reports)
    if together and request.budget_bytes is not None and graph.needs_gradients:
        with suppress(NoBackward):
            found = runs.compiled_for(count)
    if found is None:
        alone, left_bytes = _alone(graph, request, ledger)
        if alone.report is None or request.budget_bytes is None:
            return alone.call
        request = replace(request, held_bytes=request.held_bytes - left_bytes)
        promised = runs.promised(alone, request)
        if left_bytes:
            promised = replace(promised, promise=replace(promised.promise, left_bytes=left_bytes))
        own = promised.promise.peak_bytes
        found = Runs((promised,), (0,), own, request.held_bytes - around.late_bytes + own)
    graph.forget_inputs()
    ledger.record(frame, found.peak_bytes, compilation)
    _tell_step(parsed, told, found)

    def again(count: int) -> Runs:
        told = len(session.STATE.reports)
        anew = runs.compiled_for(count)
        _tell_step(parsed, told, anew)
        return anew

    def less() -> Runs | None:
        return again(runs.count) if runs.is_asked else None

    if runs.count and runs.seen is None and around.pipeline is None:
        ledger.runs[frame] = runs
    return watch_in_flight(found, places, again, less)


def _alone(graph: Graph, request: Request, ledger: session.Ledger) -> tuple[CompiledVersion, int]:
    """The graph by itself, and how many bytes others are to leave it more from the next step on.

    So they are where runs that wait leave it too few; this step takes more than the budget. Raises
    `InfeasibleBudget` with what all need together.
    """
    try:
        return graph.compile(request), 0
    except InfeasibleBudget as refused:
        if refused.minimum_bytes is None:
            raise
        missing = refused.minimum_bytes - refused.budget_bytes
        needed, least = refused.minimum_bytes, ledger.least_bytes(refused.minimum_bytes)
        if least is None:
            raise
        if least > refused.budget_bytes:
            raise InfeasibleBudget(refused.budget_bytes, least, *refused.args[2:]) from None
        forget_frames(refused)
    more = format_bytes(missing)
    log.warning("this step takes %s too much: parts of it are planned anew for the next", more)
    ledger.leave(needed)
    return graph.compile(replace(request, held_bytes=request.held_bytes - missing)), missing


def _tell_step(options: Options, since: int, runs: Runs) -> None:
    """The peak of the step, in the reports made since then, and in their files."""
    for report in session.note_step_peak(since, runs.step_peak_bytes):
        if options.report is not None:
            write_report(options.report, report)


@dataclass
class Graph:
    """A graph that Dynamo gave us, and how it is to be compiled; ``ranks`` run it together."""

    gm: fx.GraphModule | None
    kept: fx.GraphModule
    inputs: Sequence[Any]
    options: Options
    mode: str | None
    ranks: tuple[int, ...] = ()

    @property
    def needs_gradients(self) -> bool:
        """Whether an input needs one, so that runs may wait for their backward."""
        needed = any(isinstance(x, torch.Tensor) and x.requires_grad for x in self.inputs)
        return needed and torch.is_grad_enabled()

    def forget_inputs(self) -> None:
        """Keep no tensor alive: what compiles the graph again is given their sizes alone."""
        self.inputs = [node.meta.get("example_value") for node in self.kept.graph.nodes
                       if node.op == "placeholder"]  # fmt: skip

    def fresh(self) -> fx.GraphModule:
        """The graph as Dynamo gave it: what compiles it may change it."""
        gm, self.gm = self.gm, None
        return compat.copy_module(self.kept) if gm is None else gm

    def compile(self, request: Request) -> CompiledVersion:
        """Compiled as the request says."""
        gm, partitioner = self.fresh(), Partitioner(request, build())
        key = _key(gm, self.inputs, partitioner)
        current = session.begin()
        patches = _patches(self.options, partitioner, self.mode, self.inputs)
        with _told(self.options, current):
            compiled = _compile(gm, self.inputs, self.options, partitioner, patches)
            if current.report is not None:
                session.store(key, current.report)
            else:
                current.report = session.load(key, current.graph)
        report = current.report
        see_same_plan(self.ranks, report)
        if report is not None:
            session.STATE.reports.append(report)
            log.info("%s", report.summary())
        pooled = patches.get(compat.CUDAGRAPHS, getattr(compat.inductor_config, compat.CUDAGRAPHS))
        return CompiledVersion(compiled, report, pooled=pooled)

    def plan(self, request: Request) -> Report:
        """Planned for the request, and not compiled."""
        partitioner, current = Partitioner(request, build(), plan_only=True), session.begin()
        self._trace(partitioner, partitioner)
        assert current.report is not None
        return current.report

    def as_unit(self, request: Request, count: int) -> Unit:
        """The versions that it may take. Raises `NoBackward`."""

        def partition(module: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            static = tuple(kwargs.get("static_lifetime_input_indices") or ())
            draft = Draft(module, kwargs["num_fwd_outputs"], static)
            raise Ended(unit_on_all_ranks(draft, request, count))

        try:
            self._trace(Partitioner(request, build()), partition)
        except Ended as ended:
            unit: Unit = ended.result
            forget_frames(ended)
            return unit
        raise NoBackward

    def of_another(
        self, gm: fx.GraphModule, inputs: Sequence[Any], request: Request, count: int
    ) -> Unit:
        """The same of another graph, with the options of this one."""
        return replace(self, gm=None, kept=gm, inputs=inputs).as_unit(request, count)

    def _trace(self, partitioner: Partitioner, partition: Callable[..., Any]) -> Callable[..., Any]:
        """The joint graph is given to ``partition``, as when it is compiled."""
        gm = compat.copy_module(self.kept)
        if self.options.executor == "aot_eager":
            return compat.compile_with_aot_eager(gm, self.inputs, partition)
        patches = _patches(self.options, partitioner, self.mode, self.inputs)
        return traced(gm, self.inputs, patches, partition)


def plan_only(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any],
    study: session.Study | None = None,
) -> tuple[Callable[..., Any], Report | None]:
    """Plan one graph as `fxremat` would, but run it node by node instead of compiling it.

    ``study`` is told what the search found.
    """
    device = device_of_inputs(example_inputs)
    parsed = parse_options(options, device_total_bytes=total_bytes(device))
    gm = compat.inline_regions(gm)
    ledger, place = session.ledger(None), compat.current_compilation()
    request = request_for(gm, example_inputs, parsed, ledger, place)
    partitioner = Partitioner(request, build(), plan_only=True)
    current = session.begin()
    current.study = study
    with _told(parsed, current):
        if parsed.executor == "aot_eager":
            compiled = compat.compile_with_aot_eager(gm, example_inputs, partitioner)
        else:
            patches = _patches(parsed, partitioner, None, example_inputs)
            compiled = traced(gm, example_inputs, patches, partitioner)
    if current.report is not None:
        frame, compilation = place
        report = current.report
        ledger.record(frame, report.counted_peak_bytes - report.held_bytes, compilation)
    return compiled, current.report


def traced(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    partition: Callable[..., Any],
) -> Callable[..., Any]:
    """The joint graph for ``partition``, as Inductor would have it here, or on an absent card."""
    card = absent_card()
    if card is None:
        return compat.trace_as_inductor(gm, inputs, patches, partition)
    return compat.trace_for_absent(gm, inputs, patches, partition, card.properties())


def generating(module: fx.GraphModule, patches: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Inside, code can be generated for a joint graph that was traced by `traced`."""
    card = absent_card()
    return compat.generating(module, patches, None if card is None else card.properties())


def _reset() -> None:
    """Forget what was compiled; called by ``torch._dynamo.reset()``."""
    session.reset()
    in_flight.forget()
    compat.forget_lowered()


fxremat.reset = _reset  # type: ignore[attr-defined]

"""A graph that Dynamo gave us: compiled, planned, asked for its versions; and as others know it.

Its runs are known to others where they wait for their backward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import fx

from fxremat.compat.compilers import compile_with_aot_eager
from fxremat.compat.configuration import cache_directory, caches_disabled
from fxremat.compat.dynamo import calling_modules, inline_regions, more_follow, unwrapped
from fxremat.compat.joint_graph import copy_as_given, copy_module
from fxremat.compat.ranks import is_a_rank
from fxremat.compat.sizes import is_settled, size_bound, with_settled_sizes
from fxremat.compile import session
from fxremat.compile.draft import Draft
from fxremat.compile.driver import (
    compile_graph,
    generating,
    patches_for,
    report_key,
    reporting,
    total_bytes,
    traced,
)
from fxremat.compile.dry_run.inference import refusal_without_gradients
from fxremat.compile.partitioner import Partitioner, draft_of, plan_graph
from fxremat.compile.ranks import see_same_plan
from fxremat.compile.request import Request, device_of_inputs, request_for
from fxremat.compile.tracing import Ended
from fxremat.core.json_data import from_data, to_data
from fxremat.core.layout import NOWHERE, OwnPools, StepLayout
from fxremat.cost.timing import MachineIsBusy
from fxremat.disk_cache import Answers, Question
from fxremat.errors import forget_frames
from fxremat.faults import with_less_after_faults
from fxremat.memory.allocator_settings import AllocatorSettings
from fxremat.memory.arena import Arena
from fxremat.memory.reserved_bytes import keep_too_much
from fxremat.memory.storages import storage_bytes
from fxremat.options import Options, parse_options
from fxremat.passes.memory_estimation import nbytes
from fxremat.report.report import Report
from fxremat.runtime import accumulation
from fxremat.runtime.host_memory import is_host
from fxremat.runtime.unsent_gradients import (
    detach_results,
    gives_loss,
    gradients_on_demand,
    trained_results,
    unsent_results,
    written_inputs,
)
from fxremat.step.description import StepDescription
from fxremat.step.promise import Observed
from fxremat.step.sent_gradients import SentGradients
from fxremat.step.versions import Offer, Part, part_on_all_ranks

log = logging.getLogger(__name__)


SENT = (
    "fxremat: a gradient came for a result that is returned beside a loss, which was not expected. "
    "This step runs the graph again, in more memory. Later steps are planned for such a gradient."
)


BUSY = (
    "fxremat: %s; graphs are planned with times computed for a typical device. A later process "
    "measures them, if fewer programs run. To plan with computed times, set op_times='roofline'."
)
T = TypeVar("T")


class NoBackward(Exception):
    """A graph that was asked for its versions has no backward, so that no run of it waits."""

    is_no_fault = True


@dataclass(frozen=True)
class CompiledVersion:
    """A graph as it was compiled for one request; without a report if it has no backward."""

    call: Callable[..., Any]
    report: Report | None


Joint = tuple[fx.GraphModule, Any, Mapping[str, Any]]
"""A joint graph with its inputs, and what else a partitioner is given."""


@dataclass
class Graph:
    """A graph that Dynamo gave us, and how it is to be compiled; ``ranks`` run it together."""

    kept: fx.GraphModule
    inputs: Sequence[Any]
    options: Options
    mode: str | None
    ranks: tuple[int, ...] = ()
    goes_on: bool = False
    """Whether others come after it in the function that Dynamo compiles."""
    joint: Joint | None = None
    """Its joint graph, once it was traced to plan it."""
    gradients: SentGradients = field(default_factory=SentGradients)
    """What is known of those that are sent for its results."""
    written: tuple[int, ...] = ()
    """Inputs that are copied before each run, to run it again should a gradient come late."""
    by_figures: bool = False
    """Planned by the figures of a device, as ops could not be timed."""

    @property
    def unsent(self) -> tuple[int, ...]:
        """Results that are compiled as if nobody sent a gradient for them."""
        return self.gradients.left_out

    def leave_out_unsent(self) -> None:
        """Compile it without gradients for what it returns beside a loss, where these may be left.

        Gradients that the graph adds up or sends to the host itself are known to it alone.
        """
        tensors = [x for x in self.inputs if isinstance(x, torch.Tensor)]
        inside = any(is_host(x) or accumulation.will_be_added(x) for x in tensors)
        limited = self.options.memory_budget is not None and self.needs_gradients
        if inside or not limited or is_a_rank():
            self.gradients.is_settled = True
            return
        modules = {id(unwrapped(one)) for one in calling_modules()}
        ends_model = not self.goes_on and len(modules) == 1
        self.gradients.left_out = unsent_results(self.kept, self.inputs, ends_model=ends_model)
        self.written = written_inputs(self.kept) if self.unsent else ()

    def sends_otherwise(self, limit_bytes: int | None) -> bool:
        """Whether the last step has shown that it is to be compiled with other gradients."""
        if not self.gradients.changes(self.kept, limit_bytes):
            return False
        self.written, self.joint = written_inputs(self.kept) if self.unsent else (), None
        return True

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return device_of_inputs(self.inputs)

    @property
    def needs_gradients(self) -> bool:
        """Whether an input needs one, so that runs may wait for their backward."""
        needed = any(isinstance(x, torch.Tensor) and x.requires_grad for x in self.inputs)
        return needed and torch.is_grad_enabled()

    @property
    def gives_loss(self) -> bool:
        """Whether a result is a loss, so that the forward of a step may end there."""
        return gives_loss(self.kept)

    @property
    def expected_of_loss(self) -> int:
        """Bytes of the largest result, where a loss outside takes it that nobody has seen yet.

        Those in half precision are taken in single: losses are computed so, under autocast too.
        """
        if self.gives_loss or not self.needs_gradients or is_a_rank():
            return 0
        single = torch.float32.itemsize
        results = ((nbytes(x), x.dtype.itemsize) for x in trained_results(self.kept).values())
        return max((size * max(single, item) // item for size, item in results), default=0)

    def check_inference(self, request: Request) -> None:
        """Raise `InfeasibleBudget` where it needs no gradients, and takes more than is left."""
        if not self.options.inference or self.needs_gradients or not request.compiled:
            return
        patches = patches_for(self.options, request, self.mode, self.inputs)
        kept = copy_module(self.kept)
        if refused := refusal_without_gradients(kept, self.inputs, request, patches):
            raise refused

    def forget_inputs(self) -> None:
        """Keep no tensor alive: what compiles the graph again is given their sizes alone."""
        self.inputs = self._inputs_without_memory()

    def _inputs_without_memory(self) -> list[Any]:
        """Its inputs as Dynamo knows them; those that it does not know as they are."""
        placeholders = self.kept.graph.find_nodes(op="placeholder")
        known = (node.meta.get("example_value") for node in placeholders)
        pairs = zip(known, self.inputs, strict=True)
        return [given if value is None else with_settled_sizes(value) for value, given in pairs]

    def fresh(self) -> fx.GraphModule:
        """The graph as Dynamo gave it: what compiles it may change it."""
        return detach_results(copy_as_given(self.kept), self.unsent)

    def _is_sent(self) -> None:
        if self.unsent and not self.gradients.late:
            log.warning(SENT)
        self.gradients.late = True

    def _compile_all(self) -> Callable[..., Any]:
        """The whole graph, with the gradients that were left out: one was sent, unexpectedly."""
        whole = replace(self, joint=None, gradients=SentGradients(), written=(), ranks=())
        unlimited = replace(self.options, memory_budget=None)
        return whole.compile(request_for(self.inputs, unlimited)).call

    def compile(self, request: Request) -> CompiledVersion:
        """Compiled as the request says."""
        return self._made(request, self._compiled)

    def _made(self, request: Request, make: Callable[[Request], T]) -> T:
        """What is made for the request, with less of ours after faults, untimed where it has to."""
        if self.by_figures:
            request = replace(request, device=replace(request.device, op_times="roofline"))
        try:
            return with_less_after_faults(request, make, self._described)
        except MachineIsBusy as busy:
            log.log(logging.INFO if session.STATE.busy else logging.WARNING, BUSY, busy)
            session.STATE.busy = True
            forget_frames(busy)
        self.by_figures = True
        return self._made(request, make)

    def _described(self) -> str:
        """For who reports a bug: its code, and what it is given."""
        return "\n".join([self.kept.code, *map(str, session.sizes_of(self.inputs))])

    def _compiled(self, request: Request) -> CompiledVersion:
        gm, current, inputs = self.fresh(), session.begin(), self._inputs_without_memory()
        key = report_key(gm, self.inputs, request)
        if not all(map(is_settled, inputs)):  # else caches answer whenever it is compiled
            inputs = [*self.inputs]
        patches = patches_for(self.options, request, self.mode, self.inputs)
        with reporting(self.options, current):
            compiled = compile_graph(gm, inputs, request, patches)
            if current.report is not None:
                session.store(key, current.report)
            else:
                current.report = session.load(key, current.graph)
        report = current.report
        see_same_plan(self.ranks, report)
        if report is not None:
            session.STATE.reports.append(report)
            log.info("%s", report.summary())
        if self.unsent and report is not None:
            compiled = gradients_on_demand(
                compiled, self.unsent, self.written, self._compile_all, self._is_sent
            )
        return CompiledVersion(compiled, report)

    def request(
        self, around: int = 0, neighbours: int = 0, weights: Sequence[torch.Tensor] = ()
    ) -> Request:
        """What to ask for it, where so many bytes are held around it and by other graphs.

        An optimizer may train the ``weights``; without any, the graph's own.
        """
        copied = storage_bytes([self.inputs[k] for k in self.written], self.device)
        return request_for(self.inputs, self.options, around + copied, neighbours, weights)

    def plan(self, request: Request) -> Report:
        """Planned for the request, and not compiled. Raises `NoBackward`."""

        def planned(asked: Request) -> Report:
            current = session.begin()
            with self._drafted(asked) as draft:
                plan_graph(draft, asked, current)
            assert current.report is not None
            return current.report

        return self._made(request, planned)

    def explain(self) -> tuple[Callable[..., Any], Report | None]:
        """Planned by itself, and run node by node; without a report if it has no backward."""
        request, current = self.request(), session.begin()
        observed = Observed(device=str(self.device), expected=self.expected_of_loss)
        observed.recall(0)

        def planned(asked: Request) -> Callable[..., Any]:
            return self._trace(asked, Partitioner(asked, plan_only=True))

        def beside(asked: Request) -> Callable[..., Any]:
            asked = asked.with_budget(between=observed.between)
            return self._made(asked, planned)

        with reporting(self.options, current):
            return observed.beside_loss(request, beside), current.report

    def as_part(self, request: Request, count: int) -> Part:
        """The versions that it may take, kept on disk: they need a trace. Raises `NoBackward`."""

        def offered(asked: Request) -> Part:
            kept, question = Answers(cache_directory() / "parts"), self._question(asked, count)
            with suppress(ValueError, KeyError, TypeError):
                return from_data(Part, kept.read(question))
            with self._drafted(asked) as draft:
                part = part_on_all_ranks(draft, asked, count)
            kept.keep(question, to_data(part))
            return part

        part = self._made(request, offered)
        own = part.interface
        held = own.given if self.unsent else 0  # to run again, who holds a result holds that
        return replace(part, interface=replace(own, results=own.results + held))

    def _question(self, request: Request, count: int) -> Question | None:
        """All that the versions depend on which so many runs may take; None: they are not kept."""
        if is_a_rank() or caches_disabled():
            return None
        key = report_key(self.kept, self.inputs, request)
        bounds = [size_bound(x) for x in self.inputs if isinstance(x, torch.SymInt)]
        how = repr((self.options.executor, self.mode, self.options.inductor, self.unsent))
        return {"graph": key, "bounds": bounds, "how": how, "runs": count}

    @contextmanager
    def _drafted(self, request: Request) -> Iterator[Draft]:
        """Inside, its joint graph can be planned. It is traced once. Raises `NoBackward`."""
        module, inputs, asked = self.joint = self.joint or self._traced_joint(request)
        patches = patches_for(self.options, request, self.mode, self.inputs)
        with generating(module, patches):
            yield draft_of(copy_module(module), inputs, True, dict(asked))

    def _traced_joint(self, request: Request) -> Joint:
        def partition(module: fx.GraphModule, joint_inputs: Any, **asked: Any) -> Any:
            raise Ended((copy_module(module), joint_inputs, asked))

        try:
            self._trace(request, partition)
        except Ended as ended:
            forget_frames(ended)
            joint: Joint = ended.result
            return joint
        raise NoBackward

    def of_another(
        self, gm: fx.GraphModule, inputs: Sequence[Any], request: Request, count: int
    ) -> Part:
        """The same of another graph, with the options of this one."""
        other = replace(self, kept=gm, inputs=inputs, gradients=SentGradients(), written=())
        return other.as_part(request, count)

    def _trace(self, request: Request, partition: Callable[..., Any]) -> Callable[..., Any]:
        """The joint graph is given to ``partition``, as when it is compiled."""
        gm = detach_results(copy_module(self.kept), self.unsent)
        if self.options.executor == "aot_eager":
            return compile_with_aot_eager(gm, self.inputs, partition)
        patches = patches_for(self.options, request, self.mode, self.inputs)
        return traced(gm, self.inputs, patches, partition)


def plan_only(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Callable[..., Any], Report | None]:
    """Plan one graph as the backend would, but run it node by node instead of compiling it."""
    total = total_bytes(device_of_inputs(inputs))
    parsed = parse_options(options, device_total_bytes=total)
    goes_on, gm = more_follow(gm), inline_regions(gm)
    graph = Graph(gm, inputs, parsed, None, goes_on=goes_on)
    graph.leave_out_unsent()
    return graph.explain()


Place = tuple[int, int | None]
"""Of a graph: its frame, and the compilation of that."""


@dataclass
class Role:
    """Which part a graph is of a step, where the step is described.

    It is the part of this ``index``; or another graph of the same module is, if it was not
    ``looked_at`` itself. If it ``is_due``, its versions are to be chosen anew when none of its runs
    waits. If it ``runs_alone``, no other graph ran in its last step; None before that.
    """

    described: StepDescription | None = None
    index: int = 0
    looked_at: bool = True
    is_due: bool = False
    runs_alone: bool | None = None


@dataclass
class Taken:
    """What the runs of a graph take: how many were planned for, what all of them save, and their
    peak without what is held beside them. So many ``parameters`` were known to the scope then.

    So many bytes were held ``beside`` it when it was asked for its versions. It began as a part of
    the step ``as_before``, if it did so as when the program ran before.
    """

    count: int = 0
    saved_bytes: int = 0
    own_peak_bytes: int = 0
    parameters: int = 0
    beside: int = 0
    as_before: str = ""
    lowest: bool = False
    """Whether they take the least, for too much was measured before."""


class SharingGraph(Protocol):
    """A compiled graph, as those know it that share its budget: a `runs.GraphInStep`."""

    graph: Graph
    request: Request
    where: Any
    role: Role
    taken: Taken
    observed: Observed

    @property
    def fixed_bytes(self) -> int: ...
    @property
    def layout(self) -> StepLayout: ...
    @property
    def takes_time(self) -> bool: ...
    @property
    def is_complete(self) -> bool: ...
    def expect_gradients(self, living: Sequence[torch.Tensor]) -> None: ...
    def set_aside(self, between: int, held: int, *, remembered: bool = True) -> None: ...
    def part(self) -> Part: ...
    def plan_version(self, offer: Offer, limit_bytes: int) -> Report: ...
    def sends_otherwise(self) -> bool: ...


@dataclass(eq=False)
class OwnMemory:
    """Where graphs allocate: their arena, and what each of the ``graphs`` by themselves takes.

    These take turns. The gradients in ``to_move`` lie where the next layout has something else.
    """

    arena: Arena | None = None
    graphs: tuple[OwnPools, ...] = ()
    to_move: list[torch.Tensor] = field(default_factory=list)
    in_turn: bool = False
    """Each gives back all that it has before another one runs: together they keep too much."""
    ran: StepLayout = NOWHERE

    def share(self, taken: OwnPools, settings: AllocatorSettings | None) -> None:
        """One more graph takes turns with the others."""
        self.graphs = *(one for one in self.graphs if one != taken), taken
        self.in_turn = settings is not None and keep_too_much(self.graphs, settings)

    def begin(self, layout: StepLayout) -> None:
        """A graph with this layout runs; no other one waits."""
        if self.arena is not None and layout is not self.ran:
            self.arena.in_turn = self.in_turn
            if self.in_turn:
                self.arena.rest(pool=True)
        self.ran = layout

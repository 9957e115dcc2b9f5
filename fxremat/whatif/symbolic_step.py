"""One joint graph at many sizes: traced once with symbols, then asked what it takes at each.

A plan is for one choice of sizes; a joint graph whose sizes are symbols stands for all of them.
`compat.sizes_at` gives the symbols their values, and estimate, planner and dry run then see the
problem of those sizes. Code is generated once for each way to cut the graph, and runs, on tensors
without memory, at any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from math import prod
from typing import Any

from fxremat.compat.absent.tracing import with_numbers as torch_with_numbers
from fxremat.compat.compilers import joint_passes
from fxremat.compat.configuration import (
    PARTITIONER,
    POST_GRAD_PASS,
    SCHEDULER_PASS,
    inductor_config,
)
from fxremat.compat.joint_graph import copy_module, without_user_tags
from fxremat.compat.sizes import sizes_at, symbols_seen
from fxremat.compile.cost_model import CostModel, cost_model
from fxremat.compile.draft import Draft
from fxremat.compile.dry_run.dry_run import DryRun, GeneratedStep, generate_step
from fxremat.compile.pipeline import AS_TORCH, DONATE, PLAN, PREPARE, Runner
from fxremat.compile.request import Request
from fxremat.compile.search.candidates import Candidate, Evaluator, plain_peak
from fxremat.compile.search.planning import ONE_PASS, Planning
from fxremat.compile.search.proposals import plan_of_torch
from fxremat.compile.search.variant_sets import GraphInVariants
from fxremat.compile.stage_times import StageTimes
from fxremat.core.events import Allocate, Event
from fxremat.core.plan import Plan
from fxremat.passes.halves import Halves
from fxremat.whatif.peak_expression import DEGREE

Sizes = Mapping[str, int]
"""What varies, by name, and how large it is."""
There = Callable[[], AbstractContextManager[Any]]
"""Inside, code can be generated for the device of a step."""


SAMPLES = range(1, DEGREE + 2)
"""Times the first size: where a dry run is made to know what the step takes at others."""


@dataclass
class PeaksBySize:
    """The peak of a step as one size of it varies.

    The code of the step is the same at every size, and so is the order of what it allocates, and
    each allocation is a polynomial of the size, of degree 2 at most: dry runs at three sizes
    say what to expect at any other. Only what a library rounds up differs from that.
    """

    dry_run: Callable[[int], DryRun]
    peak_of: Callable[[DryRun], int]
    shown: dict[int, DryRun] = field(default_factory=dict)

    def at(self, size: int) -> DryRun:
        """The dry run at this size, made once."""
        if size not in self.shown:
            self.shown[size] = self.dry_run(size)
        return self.shown[size]

    def expected(self, size: int, first: int) -> DryRun:
        """What to expect at this size, by dry runs at multiples of ``first``.

        It is a dry run of its own where those are not alike.
        """
        samples = [(one, self.at(one)) for one in (times * first for times in SAMPLES)]
        if size in self.shown:
            return self.shown[size]
        return _between(samples, size) or self.at(size)


def _between(samples: Sequence[tuple[int, DryRun]], size: int) -> DryRun | None:
    """The dry run at another size, by Lagrange's polynomials; None where events differ."""
    sizes, shown = [one for one, _ in samples], [one for _, one in samples]
    if len({(len(one.live_bytes), *map(_without_bytes, one.events)) for one in shown}) != 1:
        return None
    weights = [
        prod(
            (Fraction(size - other, one - other) for other in sizes if other != one),
            start=Fraction(1),
        )
        for one in sizes
    ]

    def at_size(values: Sequence[int]) -> int:
        return int(sum(w * v for w, v in zip(weights, values, strict=True)))

    first, run = shown[0], shown[0].allocator.as_run
    asked = [{e.name: e.nbytes for e in one.events if isinstance(e, Allocate)} for one in shown]
    sizes_of = {name: at_size([one[name] for one in asked]) for name in asked[0]}
    allocator = replace(
        first.allocator,
        events=tuple(
            replace(e, nbytes=sizes_of[e.name]) if isinstance(e, Allocate) else e
            for e in first.events
        ),
        as_run=None if run is None else run.resized(sizes_of),
    )
    live = tuple(map(at_size, zip(*(one.live_bytes for one in shown), strict=True)))
    return replace(
        first,
        allocator=allocator,
        live_bytes=live,
        peak_bytes=max(live, default=0),
        saved_bytes=at_size([one.saved_bytes for one in shown]),
        left_bytes=at_size([one.left_bytes for one in shown]),
    )


def _without_bytes(event: Event) -> Event:
    return replace(event, nbytes=0) if isinstance(event, Allocate) else event


@dataclass(frozen=True)
class Expected:
    """A plan: its peak as expected, in what the budget counts, and by a dry run; and its time."""

    peak_bytes: int
    time_us: float
    dry_run_peak: Callable[[], int]


@dataclass
class SymbolicStep:
    """A training step on symbols; ``names`` gives the name of what each symbol stands for.

    It is asked ``there``: where code can be generated for its device.
    """

    prepared: Draft
    costs: CostModel
    names: Mapping[Any, str]
    given: Draft
    """As it was traced."""
    there: There
    times: StageTimes = field(default_factory=StageTimes)

    @contextmanager
    def at(self, sizes: Sizes) -> Iterator[None]:
        """Inside, everything is of these sizes."""
        at = sizes_at({symbol: sizes[name] for symbol, name in self.names.items()})
        with self.there(), at:
            yield

    def _runner(self, request: Request) -> Runner:
        return Runner(replace(self.costs, request=request), self.times)

    def torch_peaks(self, sizes: Sizes, what: str) -> PeaksBySize:
        """Of torch's own partition as one of the sizes varies, in what the budget counts."""
        costs = self.costs

        def dry_run(size: int) -> DryRun:
            with self.at({**sizes, what: size}):
                _, code = self._as_torch
                with self.times.stage("dry run"):
                    return code.dry_run(costs.device.type, costs.workspaces.blocks_of_call)

        return PeaksBySize(dry_run, partial(plain_peak, request=costs.request))

    def torch_time_us(self, sizes: Sizes) -> float:
        """The planned time of torch's own partition at these sizes, in microseconds."""
        with self.at(sizes):
            halves, _ = self._as_torch
            estimated = self._runner(self.costs.request).run("estimate", PLAN, self.prepared)
            return plan_of_torch(replace(estimated, halves=halves)).time_us

    @cached_property
    def _as_torch(self) -> tuple[Halves, GeneratedStep]:
        """Torch's partition and its code, not verified since it is not ours."""
        runner = self._runner(self.costs.request.with_policy(verify=False))
        cut = runner.run("apply", AS_TORCH, runner.run("estimate", PLAN, self.prepared))
        cut = runner.run("apply", DONATE, cut)
        with self.times.stage("dry run"), inductor_config.patch(UNTOUCHED):
            code = generate_step(*cut.halves, num_fwd_outputs=cut.num_forward_outputs)
        return cut.halves, code

    def with_numbers(self, sizes: Sizes) -> SymbolicStep:
        """The same step with its sizes as numbers, which variants need."""
        values = {symbol: sizes[name] for symbol, name in self.names.items()}
        module, kept = torch_with_numbers(self.given.module, values)
        static = tuple(kept.index(k) for k in self.given.static if k in kept)
        draft = replace(self.given, module=module, static=static)
        request = self.costs.request
        with self.there():
            made: SymbolicStep = joint_passes(
                module, lambda: symbolic_step(draft, request, {}, self.costs.name, self.there)
            )
        return replace(made, times=self.times)

    def untagged(self) -> SymbolicStep:
        """The same step without the tags of checkpoints, which leave all else as it is."""
        draft = replace(self.given, module=without_user_tags(self.given.module))
        with self.there():
            return _prepared(draft, self.costs.request, self.names, self.costs.name, self.there)

    def quickest(self, budget_bytes: int) -> Expected:
        """A plan that is found quickly for sizes that are numbers, and bytes of the graph alone.

        It is of one pass of the local search, its order held everywhere. It is expected to be
        within the bytes, or, where none is, to take the least.
        """
        asked = self.costs.request
        runner = self._runner(asked.with_budget(limit=budget_bytes + asked.budget.beside))
        planning = Planning(runner.costs.request, self.times)
        graphs = GraphInVariants(runner, self.prepared)
        with self.there():
            found = [
                Candidate.planned(one, planning.solve(one.problem, budget_bytes, ONE_PASS))
                for one in graphs.also_with(planning, budget_bytes, 0)
            ]
        best = min(found, key=lambda one: _time_and_peak(one.plan, budget_bytes))

        def dry_run_peak() -> int:
            with self.there():
                return Evaluator(runner).evaluate(best).peak_bytes

        return Expected(best.plan.peak_bytes, best.plan.time_us, dry_run_peak)


def _time_and_peak(plan: Plan, budget_bytes: int) -> tuple[bool, float]:
    """To compare plans by: those within the budget by their time, the others by their peak."""
    over = plan.peak_bytes > budget_bytes
    return over, plan.peak_bytes if over else plan.time_us


UNTOUCHED = {
    "allow_buffer_reuse": True,
    POST_GRAD_PASS: None,
    SCHEDULER_PASS: None,
    PARTITIONER: None,
}
"""Inductor's configuration as it is without us."""


def symbolic_step(
    draft: Draft, request: Request, given: Sizes, name: str, there: There
) -> SymbolicStep:
    """Prepare a joint graph that was traced with the sizes ``given`` as symbols.

    Raises `KeyError` with the name of what is no symbol: the model fixes it.
    """
    by_size = {size: what for what, size in given.items()}
    seen = symbols_seen(draft.module.graph)
    names = {symbol: by_size[size] for symbol, size in seen.items() if size in by_size}
    for what in given:
        if what not in names.values():
            raise KeyError(what)
    return _prepared(draft, request, names, name, there)


def _prepared(
    draft: Draft, request: Request, names: Mapping[Any, str], name: str, there: There
) -> SymbolicStep:
    costs = cost_model(request, draft.module.graph, name)
    traced = replace(draft, module=copy_module(draft.module))
    times = StageTimes()
    prepared = Runner(costs, times).run("prepare", PREPARE, draft)
    return SymbolicStep(prepared, costs, names, traced, there, times)

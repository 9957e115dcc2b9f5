"""What the programmes of several papers share: the best plan so far, and what may run again.

A programme is started from the best schedule that is known, because finding a first one is what
solvers do worst.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem, peak_bound
from fxremat.planner.local import greedy
from fxremat.planner.local.stage_schedule import ExtraRun, StageSchedule
from fxremat.planner.plans import make_plan, rank
from fxremat.planner.solvers import Progress, SolverOptions


class Incumbent:
    """One call of a solver: the best plan so far, and what is proven."""

    def __init__(
        self, name: str, problem: Problem, budget_bytes: int | None, options: SolverOptions
    ) -> None:
        """Start from store-all where that fits, else from a known plan."""
        self.name, self.budget, self.options = name, budget_bytes, options
        self.deadline, self.model = Deadline(options.time_limit_s), IndexedProblem(problem)
        self.best = make_plan(problem, problem.base_steps(), name)
        if budget_bytes is not None and not self.fits():
            self.best = start_plan(problem, budget_bytes, options)
        self.peak_bound_bytes = max(peak_bound(self.model), self.best.peak_bound_bytes or 0)
        self.time_bound_us = 0.0

    @property
    def runs(self) -> list[ExtraRun]:
        """The extra runs of the best plan."""
        return greedy.extra_runs(self.model, self.best.ops)

    def fits(self) -> bool:
        """Whether the best plan is within the budget."""
        return self.budget is None or self.best.peak_bytes <= self.budget

    def is_fastest(self) -> bool:
        """Whether the best plan fits and nothing can be faster."""
        return self.fits() and self.best.time_us <= self.model.problem.base_time_us

    def is_decided(self) -> bool:
        """Whether nothing can be better, or the budget is proven to be too small."""
        if self.budget is not None and not self.fits():
            return self.peak_bound_bytes > self.budget
        return self.is_fastest()

    def keep_if_better(self, steps: Sequence[str]) -> bool:
        """Keep a schedule if replay says that it is better than the best."""
        plan = make_plan(self.model.problem, steps, self.name)
        better = rank(plan, self.budget) < rank(self.best, self.budget)
        self.best = plan if better else self.best
        return better

    def tell(self, bound_us: float | None) -> None:
        """Report the progress to who asked for it."""
        if self.options.progress is not None:
            time_us = self.best.time_us if self.fits() else None
            report = Progress(self.name, self.deadline.seconds(), time_us, bound_us)
            self.options.progress(report)

    def plan(self) -> Plan:
        """The best plan, replayed."""
        return make_plan(
            self.model.problem,
            self.best.steps,
            self.name,
            budget_bytes=self.budget,
            seconds=self.deadline.seconds(),
            time_bound_us=min(self.time_bound_us, self.best.time_us) if self.fits() else None,
            peak_bound_bytes=self.peak_bound_bytes,
        )


def start_plan(problem: Problem, budget_bytes: int, options: SolverOptions) -> Plan:
    """The plan in ``options.start`` if it fits, else it or the greedy solver's: the better one."""
    plans = []
    if options.start is not None:
        plans.append(make_plan(problem, options.start, "start"))
    if not plans or plans[0].peak_bytes > budget_bytes:
        fresh = replace(options, start=None, progress=None)
        plans.append(greedy.solve(problem, budget_bytes, fresh))
    return min(plans, key=lambda plan: rank(plan, budget_bytes))


def without_unread(model: IndexedProblem, runs: Iterable[ExtraRun]) -> list[ExtraRun]:
    """The runs without those whose copies nobody reads."""
    state = StageSchedule(model, runs)
    while idle := tuple(run for run in state.all_extra() if not state.is_read(run)):
        state.change((), idle)
    return state.all_extra()


def all_runs(model: IndexedProblem) -> list[list[int]]:
    """Every repeat that some schedule may need: nothing is lost without the others.

    An op is of use in a stage if a value of it may still be read then or later, by a first run
    or by an op that is of use itself.
    """
    needs, can = model.last_needs, model.evictable
    until = [max((needs[v] for v in written if can(v)), default=-1) for written in model.writes]
    return [[op for op in range(stage) if until[op] >= stage] for stage in range(model.n)]


def near_runs(model: IndexedProblem, hops: int) -> list[list[int]]:
    """In each stage the ops at most so many reads before the op of the stage."""
    near = []
    for stage in range(model.n):
        found, front = set[int](), {stage}
        for _ in range(hops):
            reads = {value for reader in front for value in model.reads[reader]}
            front = {model.writer[value] for value in reads if model.evictable(value)} - found
            found |= front
        near.append(sorted(found))
    return near


def with_runs(allowed: list[list[int]], runs: Iterable[ExtraRun]) -> list[list[int]]:
    """The allowed repeats and these."""
    more = [set(ops) for ops in allowed]
    for op, stage in runs:
        more[stage].add(op)
    return [sorted(ops) for ops in more]


def pairs_apart(model: IndexedProblem, op: int, first: bool) -> list[tuple[int, int]]:
    """The in-place pairs of which no value is in an earlier one. A repeat writes no output anew."""
    found, met = list[tuple[int, int]](), set[int]()
    for read, write in model.inplace[op]:
        if first or not model.is_output[write]:
            if met.isdisjoint((read, write)):
                found.append((read, write))
            met |= {read, write}
    return found

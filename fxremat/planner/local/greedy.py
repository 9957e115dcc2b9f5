"""The greedy solver: one front of schedules, whatever the budget, and the choice from it.

The plans that fit a smaller budget are among those that fit a larger one. So a smaller budget
never gives a larger peak, nor less time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat

from fxremat.core.constants import MEASURABLE
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem, peak_bound
from fxremat.planner.local import level_sweep
from fxremat.planner.local.editable_schedule import (
    EditableSchedule,
    descend,
    descend_from_store_all,
    level_work,
    path_work,
)
from fxremat.planner.local.ruin_and_repair import Improver
from fxremat.planner.local.stage_schedule import (
    Entry,
    ExtraRun,
    ParetoFront,
    StageSchedule,
)
from fxremat.planner.plans import make_plan, remembered
from fxremat.planner.solvers import SolverOptions

NAME, QUICK_NAME = "greedy", "quick"


@dataclass(frozen=True)
class GreedyFront:
    """The front of one problem, what is proven of every peak, and the seconds that it took."""

    front: ParetoFront
    bound: int
    seconds: float

    def plan(self, entry: Entry) -> Plan:
        """The plan of an entry of the front."""
        problem, steps, bound = self.front.model.problem, self.front.steps(entry), self.bound
        return make_plan(problem, steps, NAME, seconds=self.seconds, peak_bound_bytes=bound)

    def choose(self, budget_bytes: int | None) -> Plan:
        """Least time within the budget, or least peak where nothing fits."""
        return self.plan(self.front.choose(sys.maxsize if budget_bytes is None else budget_bytes))


def solve(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """The plan of least time within the budget, or of least peak where none fits."""
    return replace(whole_front(problem, options).choose(budget_bytes), budget_bytes=budget_bytes)


def solve_least_peak(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """The plan of least peak, whatever the budget: the last plan of the front."""
    plan = solve(problem, -1, options)
    return replace(plan, solver="least_peak", budget_bytes=budget_bytes)


def quick(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """A plan found with less work than that of `solve`, to compare problems by."""
    started = time.perf_counter()
    return _quick_plan(quick_front(problem, budget_bytes, options), budget_bytes, started)


def adapt(plan: Plan, problem: Problem, budget_bytes: int, options: SolverOptions) -> Plan:
    """The plan of an almost equal problem, made one of this problem with still less work.

    Steps of ops that this problem does not have are left out. The result is improved only where
    it takes hardly longer than the plan did: else the other problem is the better one.
    """
    started = time.perf_counter()
    model = IndexedProblem(problem)
    front, work = ParetoFront(model), path_work(model.n)
    front.offer(StageSchedule(model))
    search = EditableSchedule(StageSchedule(model, extra_runs(model, plan.ops)))
    search.keep_what_fits(budget_bytes)
    descend(search, front, budget_bytes, work // 3)
    state = search.state
    if state.max_peak() <= budget_bytes and state.time <= plan.time_us * (1 + MEASURABLE):
        improver = Improver(search, front)
        improver.rounds(budget_bytes, state.work + level_work(model.n))
    return _quick_plan(front, budget_bytes, started)


def quick_front(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> ParetoFront:
    """What is found on the way to one budget, with about a tenth of the work of `whole_front`."""
    model, deadline = IndexedProblem(problem), Deadline(options.time_limit_s)
    front = ParetoFront(model)
    if budget_bytes is None:
        front.offer(StageSchedule(model))
        return front
    descend_from_store_all(front, budget_bytes, repeat(path_work(model.n) // 3), deadline)
    if deadline.running() and front.best(budget_bytes) is not None:
        improver = Improver.at(front, budget_bytes)
        improver.rounds(budget_bytes, improver.search.state.work + level_work(model.n))
    return front


def extra_runs(model: IndexedProblem, steps: Sequence[str]) -> list[ExtraRun]:
    """What runs again, and in which stages, by the names of steps; by stage and then by op.

    An op that runs again several times in a stage counts once, so that it is a schedule in stage
    form with the same runs, not always with the same peak. Unknown names are left out.
    """
    place = {op.name: k for k, op in enumerate(model.problem.ops)}
    again, waiting, done = set[ExtraRun](), list[int](), -1
    for op in (place[step] for step in steps if step in place):
        if op > done:
            again.update((other, op) for other in waiting)
            waiting, done = [], op
        elif model.repeatable[op]:
            waiting.append(op)
    return sorted(again, key=lambda run: (run[1], run[0]))


def _quick_plan(front: ParetoFront, budget_bytes: int | None, started: float) -> Plan:
    best = front.choose(sys.maxsize if budget_bytes is None else budget_bytes)
    problem, steps, seconds = front.model.problem, front.steps(best), time.perf_counter() - started
    return make_plan(problem, steps, QUICK_NAME, budget_bytes=budget_bytes, seconds=seconds)


def front(problem: Problem, options: SolverOptions) -> tuple[Plan, ...]:
    """Non-dominated plans from store-all to least peak, evenly picked where there are many.

    `solve` chooses from all that were found.
    """
    known = whole_front(problem, options)
    entries = known.front.entries[::-1]
    last = len(entries) - 1
    count = min(last, constants.FRONT_POINTS - 1)
    picks = [round(k * last / count) for k in range(count + 1)] if count else [0]
    return tuple(known.plan(entries[k]) for k in picks)


@remembered
def whole_front(problem: Problem, options: SolverOptions) -> GreedyFront:
    """The front of a problem, remembered for the last few problems."""
    started = time.perf_counter()
    front = ParetoFront(IndexedProblem(problem))
    least = level_sweep.fill(front, options)
    bound = max(peak_bound(front.model), least)
    return GreedyFront(front, bound, time.perf_counter() - started)

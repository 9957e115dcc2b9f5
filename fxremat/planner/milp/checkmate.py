"""Checkmate: the schedule of least time as an integer programme, solved by HiGHS.

Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization"
(arXiv 1910.02653), section 4; the programme is in `fxremat.planner.milp.checkmate_columns`.

Checkmate runs the repeats of a stage in base order. Here that order counts only in the stages
that exceed the budget without it: first in none, then in more and more. So the first programme
is a relaxation of all schedules. Its bound holds for them all, and mostly its schedule fits, which
is optimal then: both sooner than with Checkmate's own rows.

``solve`` allows every repeat. ``solve_pruned`` allows those a few hops before the op of their
stage, then more hops as long as it pays; what it finds is good, but it proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.timeline import replay
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem, build_model
from fxremat.planner.local.pareto_front import steps_of
from fxremat.planner.local.stage_schedule import ExtraRun
from fxremat.planner.milp import tuning
from fxremat.planner.milp.checkmate_columns import Allowed, Staged
from fxremat.planner.milp.checkmate_rows import programme
from fxremat.planner.milp.highs import Solution, Status
from fxremat.planner.milp.rerun_candidates import all_runs, near_runs, with_runs
from fxremat.planner.milp.warm_start import columns_of, known_plan, runs_of, without_idle
from fxremat.planner.options import ProblemRefused, Progress, SolverOptions
from fxremat.planner.peak_bound import peak_bound
from fxremat.planner.plans import make_plan

NAME, PRUNED = "checkmate", "checkmate_pruned"
CAREFUL = 1e-7
"""By this part a bound is lowered: HiGHS computes in floating point."""


class TooManyRuns(ProblemRefused, ValueError):
    """The problem is too large for the full programme."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count

    def __str__(self) -> str:
        return (
            f"solver {NAME!r} takes up to {tuning.CHECKMATE_MOST_RUNS:,} repeats to choose from, "
            f"and this problem has {self.count:,}. What to do: use solver {PRUNED!r}, which looks "
            "at the likely ones"
        )


def solve(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """The plan of least time within the budget, proven so where the limits allow."""
    work = _CheckmateCall.begin(NAME, problem, budget_bytes, options)
    if not work.settled():
        allowed = all_runs(work.model)
        count = sum(map(len, allowed))
        if count > tuning.CHECKMATE_MOST_RUNS:
            raise TooManyRuns(count)
        work.improve(allowed, tuning.CHECKMATE_NODES, full=True)
    return work.plan()


def solve_pruned(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """The best plan found with repeats near to where they are read."""
    work = _CheckmateCall.begin(PRUNED, problem, budget_bytes, options)
    if work.settled():
        return work.plan()
    idle, before = 0, None
    for hops in tuning.CHECKMATE_HOPS:
        allowed = with_runs(near_runs(work.model, hops), work.best_runs)
        if (
            allowed == before
            or sum(map(len, allowed)) > tuning.CHECKMATE_MOST_RUNS
            or not work.deadline.running()
        ):
            break
        before = allowed
        better = work.improve(allowed, tuning.CHECKMATE_PRUNED_NODES)
        idle = 0 if better or not work.fits() else idle + 1
        if idle == tuning.CHECKMATE_PATIENCE:
            break
    return work.plan()


@dataclass
class _CheckmateCall:
    """One call: the best plan so far and what is proven."""

    name: str
    model: IndexedProblem
    budget: int | None
    options: SolverOptions
    deadline: Deadline
    best: Plan
    time_bound_us: float = 0.0
    peak_bound_bytes: int = 0

    @staticmethod
    def begin(
        name: str, problem: Problem, budget_bytes: int | None, options: SolverOptions
    ) -> _CheckmateCall:
        """Start from keep-all where that fits, else from a known plan."""
        deadline, model = Deadline(options.time_limit_s), build_model(problem)
        best = make_plan(problem, problem.base_steps(), name)
        if budget_bytes is not None and best.peak_bytes > budget_bytes:
            best = known_plan(problem, budget_bytes, options)
        bound = max(peak_bound(model), best.peak_bound_bytes or 0)
        return _CheckmateCall(name, model, budget_bytes, options, deadline, best, 0.0, bound)

    @property
    def best_runs(self) -> list[ExtraRun]:
        """The extra runs of the best plan."""
        return runs_of(self.model, self.best.ops)

    def fits(self) -> bool:
        """Whether the best plan is within the budget."""
        return self.budget is None or self.best.peak_bytes <= self.budget

    def settled(self) -> bool:
        """Whether nothing can be better, or the budget is proven to be too small."""
        if not self.fits():
            return self.budget is not None and self.peak_bound_bytes > self.budget
        return self.best.time_us <= self.model.problem.base_time_us

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

    def improve(self, allowed: Allowed, nodes: int, full: bool = False) -> bool:
        """Look for a better plan among the allowed repeats; whether one was found.

        ``room`` is what the programme believes to be the budget: less than it, where a schedule
        whose order was modelled exceeds it all the same, by the solver's rounding.
        """
        assert self.budget is not None
        ordered: set[int] = set()
        room = self.budget
        for turn in range(2 * tuning.CHECKMATE_ROUNDS):
            staged = programme(self.model, room, allowed, ordered)
            solution = self._solve(staged, nodes, proves=full and turn == 0)
            if full and turn == 0:
                self._learn(staged, solution)
            if solution.values is None:
                return False
            steps, over = self._judge(staged, solution)
            if not over:
                return self._take(steps)
            if not self.deadline.running() or self.settled():
                return False
            if over <= ordered:
                room -= max(1, replay(self.model.problem, steps).peak_bytes - room)
            ordered |= over if turn + 1 < tuning.CHECKMATE_ROUNDS else set(range(self.model.n))
        return False

    def _solve(self, staged: Staged, nodes: int, proves: bool) -> Solution:
        start = None
        if self.fits():
            start = columns_of(staged, self.best_runs)
        time = self.best.time_us if self.fits() else math.inf

        def watch(objective: float, bound: float) -> None:
            if self.options.progress is not None:
                bound_us = max(self.model.problem.base_time_us, bound * staged.time_unit)
                best_us = None if math.isinf(time) else time
                seconds = self.deadline.seconds()
                told = Progress(self.name, seconds, best_us, bound_us if proves else None)
                self.options.progress(told)

        return staged.mip.solve(self.deadline, nodes=nodes, start=start, watch=watch)

    def _learn(self, staged: Staged, solution: Solution) -> None:
        """What a programme over all schedules proves."""
        assert self.budget is not None
        if solution.status is Status.INFEASIBLE:
            self.peak_bound_bytes = max(self.peak_bound_bytes, self.budget + 1)
        elif solution.bound > -math.inf:
            self.time_bound_us = solution.bound * staged.time_unit * (1 - CAREFUL)

    def _judge(self, staged: Staged, solution: Solution) -> tuple[Sequence[str], set[int]]:
        """The steps of a solution, and the stages in which they exceed the budget."""
        assert self.budget is not None
        model = self.model
        runs = [
            (op, stage)
            for stage, again in enumerate(staged.allowed)
            for op in again
            if solution.chosen(staged.run[stage][op])
        ]
        tidy = model.names(steps_of(model.n, without_idle(model, runs)))
        if replay(model.problem, tidy).peak_bytes <= self.budget:
            return tidy, set()
        steps = steps_of(model.n, runs)
        live = replay(model.problem, model.names(steps)).live_bytes
        over, stage = set(), 0
        for op, size in zip(steps, live, strict=True):
            if size > self.budget:
                over.add(stage)
            stage += op == stage
        return model.names(steps), over

    def _take(self, steps: Sequence[str]) -> bool:
        """Keep a schedule that fits, if it is better than the best."""
        plan = make_plan(self.model.problem, steps, self.name)
        if self.fits() and plan.time_us >= self.best.time_us:
            return False
        self.best = plan
        return True

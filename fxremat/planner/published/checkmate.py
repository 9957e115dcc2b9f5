"""Checkmate: the schedule of least time as an integer programme, solved by HiGHS.

Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization"
(arXiv 1910.02653), section 4; the programme is in `fxremat.planner.published.checkmate_milp`.

Checkmate runs the repeats of a stage in base order. Here that order counts only in stages that
exceed the budget without it: first in none, then in more and more. So the first programme is a
relaxation of all schedules, and its bound holds for them all. Mostly its schedule fits too, and is
then optimal. Both come sooner than with Checkmate's own rows.

``solve`` allows every repeat. ``solve_pruned`` allows those a few reads away from the op of their
stage, then more as long as it pays. What it finds is good, but it proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxremat.core.constants import ROUNDS
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.timeline import replay
from fxremat.planner import constants
from fxremat.planner.local.stage_schedule import steps_of
from fxremat.planner.milp.highs import BOUND_MARGIN, Solution
from fxremat.planner.published.checkmate_milp import Allowed, CheckmateMilp
from fxremat.planner.published.known_schedule import (
    Incumbent,
    all_runs,
    near_runs,
    with_runs,
    without_unread,
)
from fxremat.planner.solvers import ProblemRefused, SolverOptions

NAME, PRUNED = "checkmate", "checkmate_pruned"


def solve(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """The plan of least time within the budget, proven so where the limits allow."""
    work = _CheckmateSearch(NAME, problem, budget_bytes, options)
    if not work.is_decided():
        allowed = all_runs(work.model)
        count = sum(map(len, allowed))
        if count > constants.MOST_RUNS:
            raise ProblemRefused(
                f"solver {NAME!r} takes up to {constants.MOST_RUNS:,} repeats to choose from, "
                f"and this problem has {count:,}. What to do: use solver {PRUNED!r}, which looks "
                "at the likely ones"
            )
        work.improve(allowed, 3 * constants.NODES, full=True)
    return work.plan()


def solve_pruned(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """The best plan found with repeats near to where they are read."""
    work = _CheckmateSearch(PRUNED, problem, budget_bytes, options)
    if work.is_decided():
        return work.plan()
    idle, before, hops = 0, None, 1
    while idle < 2 and work.deadline.running():
        allowed = with_runs(near_runs(work.model, hops), work.runs)
        if allowed == before or sum(map(len, allowed)) > constants.MOST_RUNS:
            break
        before, hops = allowed, 2 * hops
        better = work.improve(allowed, constants.NODES // 2)
        idle = 0 if better or not work.fits() else idle + 1
    return work.plan()


class _CheckmateSearch(Incumbent):
    """A call that asks programmes."""

    def improve(self, allowed: Allowed, nodes: int, full: bool = False) -> bool:
        """Look for a better plan among the allowed repeats; whether one was found.

        ``room`` are the bytes that the programme may use. That is the budget, or a little less
        where a schedule exceeds it, by the solver's rounding, although its order was in the rows.
        Programmes have more and more stages in order; then all stages are, in as many rounds again.
        """
        assert self.budget is not None
        ordered: set[int] = set()
        room = self.budget
        for round_number in range(2 * ROUNDS):
            programme = CheckmateMilp(self.model, room, allowed, ordered)
            solution = self._solve(programme, nodes, proves=full and round_number == 0)
            if full and round_number == 0:
                self._note_bounds(programme, solution)
            if solution.values is None:
                return False
            steps, over = self._steps_of(programme, solution)
            if not over:
                return self.keep_if_better(steps)
            if not self.deadline.running() or self.is_decided():
                return False
            if over <= ordered:
                room -= max(1, replay(self.model.problem, steps).peak_bytes - room)
            ordered |= over if round_number + 1 < ROUNDS else set(range(self.model.n))
        return False

    def _solve(self, programme: CheckmateMilp, nodes: int, proves: bool) -> Solution:
        start = programme.start_values(self.runs) if self.fits() else None

        def on_progress(objective: float, bound: float) -> None:
            bound_us = max(self.model.problem.base_time_us, bound * programme.time_unit)
            self.tell(bound_us if proves else None)

        return programme.milp.solve(
            self.deadline, nodes=nodes, start=start, on_progress=on_progress
        )

    def _note_bounds(self, programme: CheckmateMilp, solution: Solution) -> None:
        """What a programme over all schedules proves."""
        assert self.budget is not None
        if solution.bound == math.inf:
            self.peak_bound_bytes = max(self.peak_bound_bytes, self.budget + 1)
        elif solution.bound > -math.inf:
            self.time_bound_us = solution.bound * programme.time_unit * (1 - BOUND_MARGIN)

    def _steps_of(
        self, programme: CheckmateMilp, solution: Solution
    ) -> tuple[Sequence[str], set[int]]:
        """The steps of a solution, and the stages in which they exceed the budget."""
        assert self.budget is not None
        model = self.model
        runs = [
            (op, stage)
            for stage, reruns in enumerate(programme.allowed)
            for op in reruns
            if solution.chosen(programme.run[stage][op])
        ]
        tidy = model.names(steps_of(model.n, without_unread(model, runs)))
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

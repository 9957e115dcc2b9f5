"""Plans from the relaxation over program points, refined where their real bytes exceed the budget.

The relaxation (`fxremat.planner.milp.relaxation`) says what to hold at a few program points. What
is missing later is computed again when it is read. If that schedule exceeds the budget, its worst
stages become program points too, as violated rows are added to a programme. The bound rises, and a
schedule that fits is optimal. The relaxation does not see the bytes of the runs between program
points; what exceeds the budget for that is left to evictions.

Source: ours. The relaxation is one of Checkmate's MILP, and the refinement is that of lazy rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

from fxremat.core.constants import ROUNDS
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.schedule import store_all
from fxremat.core.timeline import store_all_peak
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem, peak_bound
from fxremat.planner.local import greedy
from fxremat.planner.local.editable_schedule import EditableSchedule, descend
from fxremat.planner.local.ruin_and_repair import polish
from fxremat.planner.local.stage_schedule import ExtraRun, ParetoFront, StageSchedule
from fxremat.planner.milp.highs import BOUND_MARGIN
from fxremat.planner.milp.relaxation import Relaxation, extra_runs_for
from fxremat.planner.plans import make_plan
from fxremat.planner.solvers import Progress, SolverOptions

NAME = "moments"


def solve(
    problem: Problem, budget_bytes: int | None, options: SolverOptions, gap: float = 0.0
) -> Plan:
    """The plan of least time within the budget, or of least peak where none fits.

    ``gap`` is a part of the time of store-all: a plan so near to its bound is not worked on; after
    some rounds, nor is one that is twice as far.
    """
    deadline, steps = Deadline(options.time_limit_s), store_all(problem)
    if budget_bytes is None or store_all_peak(problem) <= budget_bytes:
        seconds = deadline.seconds()
        return make_plan(problem, steps, NAME, budget_bytes=budget_bytes, seconds=seconds)
    known: greedy.GreedyFront | None = None
    front = greedy.quick_front(problem, budget_bytes, options)
    if front.best(budget_bytes) is None:
        known = greedy.whole_front(problem, options)
        front = known.front
    return improved(front, known, budget_bytes, options, deadline, gap)


def improved(
    front: ParetoFront,
    known: greedy.GreedyFront | None,
    budget_bytes: int,
    options: SolverOptions,
    deadline: Deadline,
    gap: float = 0.0,
) -> Plan:
    """The best plan of all rounds, and of the greedy solver where the first ones do not do.

    ``known`` is what that found, if it was asked before; its front stays as it is.
    """
    problem, front = front.model.problem, replace(front, entries=[*front.entries])
    refinement = Refinement(front, budget_bytes, deadline, gap * problem.base_time_us)
    for number, state in enumerate(refinement.rounds(), start=1):
        front.offer(state)
        if state.max_peak() > budget_bytes:
            descend(EditableSchedule(state), front, budget_bytes, constants.WORK // 5)
        if options.progress is not None:
            fits = front.best(budget_bytes)
            time_us = None if fits is None else fits.time
            options.progress(Progress(NAME, deadline.seconds(), time_us, refinement.bound_us))
        if known is None and number == 2 and not refinement.proven():
            known = _join(front, greedy.whole_front(problem, options))
        if number == ROUNDS:  # later programmes are slow
            refinement.near_us *= 2
    if known is None and not refinement.proven():
        known = _join(front, greedy.whole_front(problem, options))
    if not refinement.proven():
        polish(front, budget_bytes, deadline)
    none_fits = refinement.bound_us == math.inf
    least = peak_bound(front.model) if known is None else known.bound
    return make_plan(
        problem,
        front.steps(front.choose(budget_bytes)),
        NAME,
        budget_bytes=budget_bytes,
        seconds=deadline.seconds(),
        time_bound_us=None if none_fits else refinement.bound_us,
        peak_bound_bytes=max(least, budget_bytes + 1) if none_fits else least,
    )


def _join(front: ParetoFront, known: greedy.GreedyFront) -> greedy.GreedyFront:
    """The front with all that the greedy solver found."""
    for entry in known.front.entries:
        front.insert(entry)
    return known


def time_bound(problem: Problem, budget_bytes: int, options: SolverOptions) -> float:
    """Microseconds that every schedule within the budget takes; infinite if there is none."""
    model = IndexedProblem(problem)
    relaxation = Relaxation(model, budget_bytes, [int(StageSchedule(model).peak.argmax())])
    return relaxation.time_bound_us(relaxation.solve(Deadline(options.time_limit_s)))


def apart(places: Iterable[int], length: int) -> list[int]:
    """The first few of the places that are not close to one before them."""
    found: list[int] = []
    for place in places:
        if all(abs(place - other) >= max(1, length // constants.APART) for other in found):
            found.append(place)
        if len(found) == constants.POINTS // 4:
            break
    return found


@dataclass
class Refinement:
    """The program points so far, at first the highest stage of store-all; the bound proven."""

    front: ParetoFront
    budget: int
    deadline: Deadline
    near_us: float = 0.0
    """A plan so near to the bound is good enough."""
    bound_us: float = 0.0

    def __post_init__(self) -> None:
        peak = StageSchedule(self.front.model).peak
        self.points = {int(peak.argmax())} if peak.size else set[int]()

    def proven(self) -> bool:
        """Whether the best plan so far is as good as the bound, or near enough to it."""
        best = self.front.best(self.budget)
        return best is not None and best.time <= self.bound_us * (1 + BOUND_MARGIN) + self.near_us

    def rounds(self) -> Iterator[StageSchedule]:
        """A schedule for each set of program points; the caller may change it."""
        for _ in range(constants.POINTS // 2):
            if not self.points or not self.deadline.running() or self.proven():
                return
            runs = self._cheapest_runs()
            if runs is None:
                return
            state = StageSchedule(self.front.model, runs)
            new = [*dict.fromkeys(filter(None, map(self._new_point, self._worst(state))))]
            self.points.update(new[: constants.POINTS - len(self.points)])
            yield state
            if not new or len(self.points) == constants.POINTS:
                return

    def _new_point(self, stage: int) -> int | None:
        """The stage as a new point; if it is one already, the stage before it."""
        return next((s for s in (stage, stage - 1) if s > 0 and s not in self.points), None)

    def _cheapest_runs(self) -> list[ExtraRun] | None:
        """Extra runs of the cheapest choice; None where there is none."""
        relaxation = Relaxation(self.front.model, self.budget, sorted(self.points))
        solution = relaxation.solve(self.deadline, self.near_us / 2)
        self.bound_us = max(self.bound_us, relaxation.time_bound_us(solution))
        if solution.values is None:
            return None
        return extra_runs_for(self.front.model, dict(relaxation.held_in(solution)))

    def _worst(self, state: StageSchedule) -> list[int]:
        """A few stages over the budget, worst first, and not next to each other."""
        highest = map(int, (-state.peak).argsort(kind="stable"))
        over = takewhile(lambda stage: state.peak[stage] > self.budget, highest)
        return apart(over, state.model.n)

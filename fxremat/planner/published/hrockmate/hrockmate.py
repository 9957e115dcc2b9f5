"""H-Rockmate: clusters planned apart, and an integer programme that puts their plans together.

Gusak et al., "HiRemate: Hierarchical approach for efficient re-materialization of neural networks"
(ICML 2025, PMLR 267; earlier named H-Rockmate). The graph is cut into clusters
(`decomposition`). Each distinct one is a problem of its own: its forward,
a pause that needs memory, its backward. Planned for several budgets and pauses it gives the options
of the level above (`level`), where an integer programme chooses one for each cluster and lets
clusters run again. Large clusters are cut again, down to those that the solver `moments` takes
whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from fxremat.core.constants import ROUNDS
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem, build_model
from fxremat.planner.local.editable_schedule import EditableSchedule, descend
from fxremat.planner.local.greedy import extra_runs
from fxremat.planner.local.pareto_front import ParetoFront, steps_of
from fxremat.planner.local.ruin_and_repair import polish
from fxremat.planner.local.stage_schedule import StageSchedule
from fxremat.planner.milp.moments import Refinement
from fxremat.planner.options import Progress, SolverOptions
from fxremat.planner.peak_bound import peak_bound
from fxremat.planner.plans import make_plan
from fxremat.planner.published.hrockmate.decomposition import Decomposition, decompose, turn_of
from fxremat.planner.published.hrockmate.level import Level
from fxremat.planner.published.known_schedule import start_plan, without_unread
from fxremat.planner.published.parts import (
    Part,
    PartPlans,
    Steps,
    most_alive,
    not_beaten,
    read_later,
)

NAME = "hrockmate"
GRID = 10
"""Options of a cluster, and as many budgets and pauses as give them."""


def solve(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """The plan of least time within the budget, or of least peak where none fits."""
    deadline = Deadline(options.time_limit_s)
    best = make_plan(problem, problem.base_steps(), NAME)
    model = build_model(problem)
    if budget_bytes is not None and best.peak_bytes > budget_bytes:
        known = start_plan(problem, budget_bytes, options)
        front = ParetoFront(model)
        front.offer(StageSchedule(model, without_unread(model, extra_runs(model, known.ops))))
        if options.progress is not None:
            time_us = known.time_us if known.peak_bytes <= budget_bytes else None
            options.progress(Progress(NAME, deadline.seconds(), time_us, None))
        Hierarchy(PartPlans(deadline)).fill(front, budget_bytes)
        polish(front, budget_bytes, options.seed, deadline)
        entry = front.best(budget_bytes) or front.least()
        found = make_plan(problem, model.names(steps_of(model.n, entry.runs())), NAME)
        best = min((known, found), key=lambda p: (max(p.peak_bytes, budget_bytes), p.time_us))
    return make_plan(
        problem,
        best.steps,
        NAME,
        budget_bytes=budget_bytes,
        seconds=deadline.seconds(),
        peak_bound_bytes=max(peak_bound(model), best.peak_bound_bytes or 0),
    )


@dataclass(frozen=True)
class Hierarchy:
    """Plans for graphs of any size; the options of each distinct cluster are found once."""

    plans: PartPlans

    @property
    def deadline(self) -> Deadline:
        """When to stop."""
        return self.plans.deadline

    def fill(self, front: ParetoFront, budget: int) -> None:
        """Offer what the programme over clusters finds for the budget."""
        level = self.level(front.model)
        if level is not None:
            self._fill(front, level, budget, ROUNDS)

    def _fill(self, front: ParetoFront, level: Level, budget: int, tries: int) -> None:
        """Offer the schedules of a level for the budget, and for what it really turns out to be.

        Where options are too coarse to fit, evictions may make a schedule of more bytes fit.
        """
        room, model = budget, front.model
        for _ in range(tries):
            steps = model.names(level.steps(room, self.deadline))
            if not steps:
                room += int((1 - constants.LESS) * budget)
                continue
            state = StageSchedule(model, without_unread(model, extra_runs(model, steps)))
            front.offer(state)
            over = state.max_peak() - budget
            if over > 0:
                descend(EditableSchedule(state), front, budget, constants.WORK // 5)
            room -= over

    def level(self, model: IndexedProblem) -> Level | None:
        """The clusters of a model with their options; None where there is nothing to cut."""
        decomposition = self._cut(model)
        if len(decomposition.clusters) < 2:
            return None
        return Level(decomposition, [self.options(part) for part in decomposition.clusters])

    def _cut(self, model: IndexedProblem) -> Decomposition:
        """The decomposition with the fewest ops in distinct clusters."""
        forward = turn_of(model) + 1
        most = max(2, min(constants.POINTS, forward // 3))
        fewest = min(most, max(2, min(constants.POINTS // 2, forward // constants.FEW_OPS)))
        cuts = [decompose(model, count) for count in range(fewest, most + 1)]
        return min(cuts, key=lambda cut: (_distinct_ops(cut.clusters), -len(cut.clusters)))

    def options(self, part: Part) -> list[Steps]:
        """Store-all and the others that are worth a choice; none without a backward."""
        return self.plans.of(part, lambda: self._search(part)) if part.backward else []

    def _search(self, part: Part) -> list[Steps]:
        """Schedules of the cluster's own problem, for several pauses and budgets."""
        model = part.model
        written = {v for op in part.forward for v in model.writes[op] if model.evictable(v)}
        whole = sum(model.bytes[v] for v in written) + max(model.own_bytes[op] for op in part.ops)
        found = part.schedules(whole, lambda op: model.repeatable[op], self.deadline, self._improve)
        figures = ((_figures(part, steps), steps) for steps in dict.fromkeys(found))
        return not_beaten(figures, GRID)

    def _improve(self, front: ParetoFront) -> None:
        """What the level below finds, or the solver `moments`."""
        model = front.model
        most, least = StageSchedule(model).max_peak(), front.least().peak
        level = self.level(model) if turn_of(model) + 1 > constants.FEW_OPS else None
        for part in (0.75, 0.5, 0.25, 0.0):
            budget = least + int(part * (most - least))
            if not self.deadline.running():
                break
            if level is not None:
                self._fill(front, level, budget, 1)
            else:
                rounds = Refinement.at_the_peak(front, budget, self.deadline).rounds()
                for state in islice(rounds, 3):
                    front.offer(state)


def _figures(part: Part, steps: Steps) -> tuple[float, ...]:
    """What a level above chooses an option by: bytes saved, time, the peak of the backward."""
    model = part.model
    saved = sum(model.bytes[v] for v in read_later(model, steps) if model.evictable(v))
    return saved, sum(model.time[op] for op in steps), most_alive(model, steps, frozenset())


def _distinct_ops(clusters: Iterable[Part]) -> int:
    """Forward ops that are to be planned where clusters of one shape are planned once."""
    return sum({part.shape: len(part.forward) for part in clusters}.values())

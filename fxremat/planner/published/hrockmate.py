"""H-Rockmate: clusters planned apart, and an integer programme that puts their plans together.

Gusak et al., "HiRemate: Hierarchical approach for efficient re-materialization of neural networks"
(ICML 2025, PMLR 267; earlier named H-Rockmate). The graph is cut into clusters
(`clusters`). Each distinct one is a problem of its own: its forward, a pause that needs memory, its
backward. Planned for several budgets and pauses it gives the options of the level above
(`clusters.Level`), where an integer programme chooses one for each cluster and lets clusters run
again. Large clusters are cut again, down to those that the solver `moments` takes whole.
"""

from __future__ import annotations

from itertools import islice

from fxremat.core.constants import ROUNDS
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner import constants
from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.local.editable_schedule import EditableSchedule, descend
from fxremat.planner.local.greedy import extra_runs
from fxremat.planner.local.ruin_and_repair import polish
from fxremat.planner.local.stage_schedule import ParetoFront, StageSchedule
from fxremat.planner.milp.moments import Refinement
from fxremat.planner.published.clusters import Cluster, Level, decompose, turn_of
from fxremat.planner.published.known_schedule import Incumbent, without_unread
from fxremat.planner.published.parts import (
    Part,
    PartPlans,
    Steps,
    most_alive,
    read_later,
    worth_a_choice,
)
from fxremat.planner.solvers import SolverOptions

NAME = "hrockmate"
GRID = 10
"""Options of a cluster, and as many budgets and pauses as give them."""


def solve(problem: Problem, budget_bytes: int | None, options: SolverOptions) -> Plan:
    """The plan of least time within the budget, or of least peak where none fits."""
    call = Incumbent(NAME, problem, budget_bytes, options)
    model = call.model
    if budget_bytes is not None and not call.is_fastest():
        front = ParetoFront(model)
        front.offer(StageSchedule(model, without_unread(model, call.runs)))
        call.tell(None)
        hierarchy = Hierarchy(call.deadline)
        level = hierarchy.level(model)
        if level is not None:
            hierarchy.fill(front, level, budget_bytes, ROUNDS)
        polish(front, budget_bytes, call.deadline)
        call.keep_if_better(front.steps(front.choose(budget_bytes)))
    return call.plan()


class Hierarchy(PartPlans):
    """Plans for graphs of any size; the options of each distinct cluster are found once."""

    def fill(self, front: ParetoFront, level: Level, budget: int, tries: int) -> None:
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
        clusters = self._cut(model)
        if len(clusters) < 2:
            return None
        return Level(clusters, [self.options(part) for part in clusters])

    def _cut(self, model: IndexedProblem) -> list[Cluster]:
        """The clusters with the fewest ops in distinct ones."""
        forward = turn_of(model) + 1
        most = max(2, min(constants.POINTS, forward // 3))
        fewest = min(most, max(2, min(constants.POINTS // 2, forward // constants.FEW_OPS)))
        cuts = [decompose(model, count) for count in range(fewest, most + 1)]

        def ops(cut: list[Cluster]) -> int:
            """Forward ops to be planned, as clusters of one shape are planned once."""
            return sum({part.shape: len(part.forward) for part in cut}.values())

        return min(cuts, key=lambda cut: (ops(cut), -len(cut)))

    def options(self, part: Part) -> list[Steps]:
        """Store-all and the others that are worth a choice; none without a backward."""
        return self.of(part, lambda: self._search(part)) if part.backward else []

    def _search(self, part: Part) -> list[Steps]:
        """Schedules of the cluster's own problem, for several pauses and budgets."""
        model = part.model

        def figures(steps: Steps) -> tuple[float, ...]:
            """What a level above chooses by: bytes saved, time, the peak of the backward."""
            saved = model.size_of(filter(model.evictable, read_later(model, steps)))
            return saved, model.time_of(steps), most_alive(model, steps, frozenset())

        written = {v for op in part.forward for v in model.writes[op] if model.evictable(v)}
        repeatable = model.repeatable.__getitem__
        found = part.schedules(written, repeatable, self.deadline, self._improve)
        return worth_a_choice(found, figures, GRID)

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
                self.fill(front, level, budget, 1)
            else:
                rounds = Refinement(front, budget, self.deadline).rounds()
                for state in islice(rounds, 3):
                    front.offer(state)

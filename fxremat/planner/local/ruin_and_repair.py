"""Large neighbourhood search at a target peak: ruin a part of a schedule, repair it.

Ruin takes out a few related extra runs, or adds an eviction. Repair evicts until the target holds,
and then leaves out the runs that fit (Shaw, "Using constraint programming and local search methods
to solve vehicle routing problems", CP 1998; here for retention). What saves time is kept and tried
at alike ops (`fxremat.planner.local.repeated_changes`). Numbers of rounds are fixed beforehand and
random numbers are seeded, so the outcome is deterministic.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np

from fxremat.planner.deadline import Deadline
from fxremat.planner.local import tuning
from fxremat.planner.local.editable_schedule import EditableSchedule, GapRanking
from fxremat.planner.local.evictions import plan_eviction
from fxremat.planner.local.pareto_front import ParetoFront
from fxremat.planner.local.repeated_changes import RepeatedChanges, RunChange
from fxremat.planner.local.stage_schedule import ExtraRun

NO_LIMIT = 1 << 62


@dataclass
class Improver:
    """Improves one schedule at one target after another; what it finds goes to the front."""

    search: EditableSchedule
    front: ParetoFront
    seed: int
    repeated_changes: RepeatedChanges
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.normal = np.random.default_rng(self.seed)

    def rounds(self, target: int, count: int, work: int) -> None:
        """At most so many rounds and so much work, fewer where they win nothing any more.

        The state must meet the target already.
        """
        state = self.search.state
        best, in_vain = state.time, 0
        for _ in range(count):
            if state.work >= work or in_vain == tuning.RUIN_IN_VAIN:
                break
            self._round(target)
            in_vain = 0 if state.time < best else in_vain + 1
            best = state.time

    def _round(self, target: int) -> None:
        search = self.search
        search.commit()
        before = search.state.time
        self.ruin()
        if not self._repair(target, before):
            search.roll_back(0)
            return
        self.front.offer(search.state)
        if search.state.time < before - 1e-9 * before:
            self._repeat(RunChange.of(search.journal), target)

    def ruin(self) -> None:
        """Ruin a part of the state, and rank gaps in another way for its repair."""
        self._new_ranking()
        self._ruin()

    def _new_ranking(self) -> None:
        search, rng = self.search, self.random
        search.ranking = GapRanking(rng.choice(tuning.RUIN_LENGTHS))
        search.noise = None
        if rng.random() < 0.5:
            search.noise = np.exp(self.normal.normal(0.0, tuning.RUIN_NOISE, search.state.model.n))
        search.gaps.unblock()

    # -- ruin ------------------------------------------------------------------------------

    def _ruin(self) -> None:
        rng, runs = self.random, self.search.state.all_extra()
        if runs and rng.random() < 0.75:
            self._take_out(runs, rng.choice(runs), rng.randint(1, 4), rng.randrange(2))
        else:
            self._drop_one()

    def _take_out(self, runs: list[ExtraRun], seed: ExtraRun, count: int, key: int) -> None:
        """Take out runs of nearby ops (key 0) or in nearby stages (key 1)."""
        rng = self.random
        near = [(abs(run[key] - seed[key]) + 3 * rng.random(), run) for run in runs]
        for _, (op, stage) in sorted(near)[:count]:
            if op in self.search.state.extra[stage]:
                self.search.remove_runs(((op, stage),))

    def _drop_one(self) -> None:
        gaps, state = self.search.gaps, self.search.state
        slots = np.flatnonzero(gaps.last_use < state.model.n)
        if not len(slots):
            return
        slot = slots[self.random.randrange(len(slots))]
        rate = self.random.choice((0.0, 0.0, math.inf))
        op, stage = int(gaps.op[slot]), int(gaps.next_use[slot])
        eviction = plan_eviction(state, op, stage, rate, NO_LIMIT, int(gaps.bytes[slot]))
        if eviction is not None:
            self.search.change(eviction.add, eviction.remove)

    # -- repair ----------------------------------------------------------------------------

    def _repair(self, target: int, before: float) -> bool:
        """Bring the peak within target; False if that fails or takes longer than before."""
        search = self.search
        for _ in range(tuning.RUIN_MOST_EVICTIONS):
            if search.state.max_peak() <= target:
                break
            if search.state.time > before * (1 + tuning.RUIN_SLACK) or not search.evict():
                return False
        else:
            return False
        search.keep_what_fits(target, self._touched_runs())
        return search.state.time <= before

    def _touched_runs(self) -> list[ExtraRun]:
        """Extra runs in the stages changed since the journal began."""
        stages = {
            stage for undo in self.search.journal for _, stage in (*undo.added, *undo.removed)
        }
        extra = self.search.state.extra
        near = {s for stage in stages for s in range(stage - 2, stage + 3) if 0 <= s < len(extra)}
        return [(op, stage) for stage in sorted(near) for op in extra[stage]]

    def _repeat(self, change: RunChange, target: int) -> None:
        for other in self.repeated_changes.of(change):
            search = self.search
            search.commit()
            before = search.state.time
            add, remove = other.on(search.state)
            if not add and not remove:
                continue
            search.change(add, remove)
            search.remove_unread(add)
            if self._repair(target, before):
                self.front.offer(search.state)
            else:
                search.roll_back(0)


def polish(front: ParetoFront, budget: int, seed: int, deadline: Deadline) -> None:
    """Improve the best schedule of the front within the budget, if there is one."""
    best = front.best(budget)
    if best is None or not deadline.running():
        return
    search = EditableSchedule(front.state(best))
    improver = Improver(search, front, seed, RepeatedChanges(front.model))
    improver.rounds(
        budget, tuning.POLISH_ROUNDS, tuning.POLISH + tuning.POLISH_PER_OP * front.model.n
    )

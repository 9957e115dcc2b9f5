"""Large neighbourhood search at a target peak: ruin a part of a schedule, repair it.

Ruin takes out a few related extra runs, or adds an eviction. Repair evicts until the target holds,
and then leaves out the runs that fit (Shaw, "Using constraint programming and local search methods
to solve vehicle routing problems", CP 1998; here for retention). Numbers of rounds are fixed
beforehand and random numbers are seeded, so the outcome is deterministic.
"""

from __future__ import annotations

import random

import numpy as np

from fxremat.core.constants import MEASURABLE
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.local.editable_schedule import EditableSchedule, plan_eviction
from fxremat.planner.local.stage_schedule import ExtraRun, ParetoFront, StageSchedule

NO_LIMIT = 1 << 62
SLACK = 2 * MEASURABLE
"""A repair is given up once it costs this part of the schedule's time more than before."""


class Improver:
    """Improves one schedule at one target after another; what it finds goes to the front."""

    def __init__(self, search: EditableSchedule, front: ParetoFront, seed: int = 0) -> None:
        self.search, self.front = search, front
        self.random, self.normal = random.Random(seed), np.random.default_rng(seed)

    @staticmethod
    def at(front: ParetoFront, target: int, seed: int = 0) -> Improver:
        """An improver of the best schedule within the target, or of the lowest one."""
        state = StageSchedule(front.model, front.choose(target).runs())
        return Improver(EditableSchedule(state), front, seed)

    def rounds(self, target: int, work: int) -> None:
        """A few hundred rounds and so much work at most, fewer where they win nothing any more.

        The state must meet the target already.
        """
        search, state = self.search, self.search.state
        best, in_vain = state.time, 0
        for _ in range(5 * constants.TRIES):
            if state.work >= work or in_vain == constants.TRIES:
                break
            search.commit()
            self.ruin()
            if self._repair(target, best):
                self.front.offer(state)
            else:
                search.roll_back()
            in_vain = 0 if state.time < best else in_vain + 1
            best = state.time

    def lower(self, work: int) -> None:
        """Ruin and evict again, with so much work; lower peaks are offered to the front."""
        search, state = self.search, self.search.state
        for _ in range(5 * constants.TRIES):
            if state.work >= work:
                break
            search.commit()
            before = (state.max_peak(), state.time)
            self.ruin()
            while state.work < work and search.evict():
                pass
            search.keep_what_fits(state.max_peak())
            if (state.max_peak(), state.time) <= before:
                self.front.offer(state)
            else:
                search.roll_back()

    def ruin(self) -> None:
        """Ruin a part of the state, and rank gaps in another way for its repair."""
        search, rng = self.search, self.random
        search.length_exponent = rng.choice((0.0, *constants.HALVES))
        search.noise = None
        if rng.random() < 0.5:
            search.noise = np.exp(self.normal.normal(0.0, constants.NOISE, search.state.model.n))
        search.gaps.unblock()
        runs = search.state.all_extra()
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
        hold = self.random.choice((True, True, False))
        op, stage = int(gaps.op[slot]), int(gaps.next_use[slot])
        eviction = plan_eviction(state, op, stage, hold, NO_LIMIT, int(gaps.bytes[slot]))
        self.search.change(eviction.add, eviction.remove)

    # -- repair ----------------------------------------------------------------------------

    def _repair(self, target: int, before: float) -> bool:
        """Bring the peak within target; False if that fails or takes longer than before."""
        search = self.search
        for _ in range(constants.TRIES):
            if search.state.max_peak() <= target:
                break
            if search.state.time > before * (1 + SLACK) or not search.evict():
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


def polish(front: ParetoFront, budget: int, deadline: Deadline) -> None:
    """Improve the best schedule of the front within the budget, if there is one."""
    if front.best(budget) is not None and deadline.running():
        work = 3 * constants.WORK // 5 + 100 * front.model.n
        Improver.at(front, budget).rounds(budget, work)

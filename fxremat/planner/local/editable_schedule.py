"""A stage schedule with its gap table and a journal: what every local search works on.

``EditableSchedule`` offers three changes and knows no strategy: evict, keep, and roll back.
``descend`` is the strategy that all searches share, an eviction path. Each step lowers the highest
stage by the eviction that costs least time per byte. DTR does the same at run time (arXiv
2006.09616, its heuristic without staleness, since here the whole schedule is known). Every state on
the way is a plan of its own, so that one path is a whole front.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fxremat.planner import constants
from fxremat.planner.indexed_problem import INPUT
from fxremat.planner.local.evictions import Eviction, fits_without, plan_eviction, unread_after
from fxremat.planner.local.gap_table import GapTable
from fxremat.planner.local.pareto_front import ParetoFront
from fxremat.planner.local.stage_schedule import ExtraRun, StageSchedule, Undo


@dataclass(frozen=True)
class GapRanking:
    """How gaps are ranked: by added time per byte, divided by a power of the gap's length.

    ``length_exponent`` is that power. ``hold_rates`` are tried in turn: a read that costs more
    time per byte than this is held, and not computed again as well.
    """

    length_exponent: float = 0.0
    hold_rates: tuple[float, ...] = (math.inf, 0.0)


@dataclass
class EditableSchedule:
    """A stage schedule under local search.

    ``noise`` has a factor for each op, by which its gaps are ranked lower or higher.
    """

    state: StageSchedule
    ranking: GapRanking = GapRanking()
    noise: npt.NDArray[np.float64] | None = None
    journal: list[Undo] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gaps = GapTable(self.state)

    # -- journal ---------------------------------------------------------------------------

    def mark(self) -> int:
        """A point to come back to."""
        return len(self.journal)

    def roll_back(self, mark: int) -> None:
        """Take back every change since the mark."""
        touched: set[int] = set()
        while len(self.journal) > mark:
            undo = self.journal.pop()
            self.state.revert(undo)
            touched |= self._touched((*undo.added, *undo.removed))
        self.gaps.refresh(touched)

    def commit(self) -> None:
        """Make every change so far final."""
        self.journal.clear()

    def change(self, add: tuple[ExtraRun, ...], remove: tuple[ExtraRun, ...]) -> None:
        """Change the state; the change can be taken back."""
        self.journal.append(self.state.change(add, remove))
        self.gaps.refresh(self._touched((*add, *remove)))

    def _touched(self, runs: Iterable[ExtraRun]) -> set[int]:
        model, out = self.state.model, set()
        for op, _ in runs:
            out.add(op)
            out.update(model.writer[value] for value in model.reads[op])
        out.discard(INPUT)
        return out

    # -- evict -----------------------------------------------------------------------------

    def evict(self) -> bool:
        """Lower the highest stage by the best eviction; False if none does."""
        worst = int(self.state.peak.argmax())
        limit = int(self.state.peak[worst])
        for _ in range(constants.TRIES):
            found = self._best(worst, limit)
            if found is None:
                return False
            op, stage, eviction = found
            if self._lowers(eviction, worst, limit):
                self.gaps.invalidate(stage)
                return True
            self.gaps.block(op, stage)
        return False

    def _best(self, worst: int, limit: int) -> tuple[int, int, Eviction] | None:
        """The (op, stage) of the best gap over the stage, and its eviction.

        Scores in the table may be stale: the best gap is scored again until a fresh score is best.
        """
        gaps = self.gaps
        slots = gaps.covering(worst)
        factors = self._factors(slots)
        scores = gaps.score[slots] * factors
        fresh: dict[int, Eviction] = {}
        while len(slots):
            k = int(scores.argmin())
            slot = int(slots[k])
            if scores[k] == np.inf:
                return None
            found = fresh.get(k)
            if found is None:
                found, gaps.score[slot] = self._score(slot, worst, limit)
                before, scores[k] = scores[k], gaps.score[slot] * factors[k]
                if found is None:
                    continue
                fresh[k] = found
                if scores[k] > max(before, scores.min()):
                    continue
            return int(gaps.op[slot]), int(gaps.next_use[slot]), found
        return None

    def _factors(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
        """What the ranking multiplies each gap's score by."""
        gaps, ranking = self.gaps, self.ranking
        out = np.ones(len(slots))
        if ranking.length_exponent:
            out /= (gaps.next_use[slots] - gaps.last_use[slots]) ** ranking.length_exponent
        if self.noise is not None:
            out *= self.noise[gaps.op[slots]]
        return out

    def _score(self, slot: int, worst: int, limit: int) -> tuple[Eviction | None, float]:
        """The cheaper way to evict a gap's values: run all reads again, or hold the dear ones."""
        gaps = self.gaps
        op, stage = int(gaps.op[slot]), int(gaps.next_use[slot])
        relief = int(gaps.bytes[slot])
        best, least = None, math.inf
        if not relief:
            return None, math.inf
        for rate in self.ranking.hold_rates:
            eviction = plan_eviction(self.state, op, stage, rate, limit, relief)
            score = self._price(eviction, stage, worst, relief)
            if score < least:
                best, least = eviction, score
            if len(eviction.add) == 1:
                break
        return best, least

    def _price(self, eviction: Eviction, stage: int, worst: int, relief: int) -> float:
        """Added time per byte relieved at the highest stage."""
        state = self.state
        for value in eviction.held_longer:
            if state.held_until(value, stage) < worst:
                relief -= state.model.bytes[value]
        return max(eviction.added_time, 1e-9) / relief if relief > 0 else math.inf

    def _lowers(self, eviction: Eviction, worst: int, limit: int) -> bool:
        mark = self.mark()
        self.change(eviction.add, eviction.remove)
        before, after = self.journal[-1].peak, self.state.peak
        if after[worst] < limit and not ((after >= limit) & (after > before)).any():
            return True
        self.roll_back(mark)
        return False

    # -- keep ------------------------------------------------------------------------------

    def keep(self, run: ExtraRun, limit: int) -> bool:
        """Leave out an extra run, and what only it needed, if the peak stays within limit."""
        if not self._may_keep(run, limit):
            return False
        state, done = self.state, []
        runs: tuple[ExtraRun, ...] = (run,)
        while runs:
            done.append(state.change((), runs))
            runs = unread_after(state, runs)
        if state.max_peak() > limit:
            # The gap table does not know of the change yet, so only the state is reverted.
            for undo in reversed(done):
                state.revert(undo)
            return False
        self.journal.extend(done)
        self.gaps.refresh(self._touched(gone for undo in done for gone in undo.removed))
        return True

    def remove_runs(self, runs: tuple[ExtraRun, ...]) -> None:
        """Leave out extra runs and all that nothing reads any more."""
        while runs:
            self.change((), runs)
            runs = unread_after(self.state, runs)

    def remove_unread(self, runs: tuple[ExtraRun, ...]) -> None:
        """Leave out those of the runs that nothing reads."""
        idle = tuple(run for run in runs if not self.state.is_read(run))
        self.remove_runs(idle)

    def _may_keep(self, run: ExtraRun, limit: int) -> bool:
        """Whether the values fit between the stages; the stages that use them are not looked at."""
        op, stage = run
        since = max(self.state.held_until(value, stage) for value in self.gaps.values[op])
        k = bisect_left(self.state.runs[op], stage)
        return fits_without(self.state, op, k, since, limit + 1)

    def keep_what_fits(self, limit: int, runs: Iterable[ExtraRun] | None = None) -> None:
        """Leave out every extra run without which the peak stays within the limit.

        The runs of most time per byte come first.
        """
        state, time_per_byte = self.state, self.state.model.time_per_byte
        todo = list(state.all_extra() if runs is None else runs)
        todo.sort(key=lambda run: -time_per_byte[run[0]])
        for op, stage in todo:
            if op in state.extra[stage]:
                self.keep((op, stage), limit)


def path_work(ops: int) -> int:
    """Work of one eviction path: less per op for larger problems."""
    per_op = constants.WORK_PER_OP
    return min(per_op * ops, constants.WORK + per_op // 10 * ops)


def level_work(ops: int) -> int:
    """Work of the repairs at one peak: a sixteenth of nearly that of a path."""
    most = 9 * constants.WORK // 10 + constants.WORK_PER_OP // 20 * ops
    return min(constants.WORK // 100 * ops, most) // constants.LEVELS


def descend(search: EditableSchedule, front: ParetoFront, target: int, work: int) -> None:
    """Evict until the peak is at most ``target`` bytes, no eviction helps or ``work`` is done.

    States on the way are offered to the front.
    """
    state = search.state
    grain = state.max_peak() // 512  # what lies closer together makes no other plan
    offered = state.max_peak() + grain + 1
    steps, next_keep = 0, constants.KEEP_EVERY
    while state.max_peak() > target and state.work < work:
        if state.max_peak() < offered - grain:
            offered = state.max_peak()
            front.offer(state)
        if not _step(search):
            break
        steps += 1
        if steps >= next_keep:
            search.keep_what_fits(state.max_peak())
            next_keep = steps + max(
                constants.KEEP_EVERY, len(state.all_extra()) // (3 * constants.KEEP_EVERY + 1)
            )
        search.commit()
    search.keep_what_fits(state.max_peak())
    search.commit()
    front.offer(state)


def _step(search: EditableSchedule) -> bool:
    return search.evict() or (search.gaps.unblock() and search.evict())


def evict_all(search: EditableSchedule, work: int) -> None:
    """Evict until no eviction helps or the work is done; every change can be rolled back."""
    while search.state.work < work and search.evict():
        pass

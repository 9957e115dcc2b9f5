"""A state with its gap table and a journal: what every local search works on.

``EditableSchedule`` offers the moves drop, keep and take back; it holds no strategy.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fxremat.planner.indexed_problem import INPUT
from fxremat.planner.local import tuning
from fxremat.planner.local.drops import Drop, fits_without, plan_drop, useless_after
from fxremat.planner.local.gap_table import GapTable
from fxremat.planner.local.stage_schedule import ExtraRun, StageSchedule, Undo


@dataclass(frozen=True)
class Taste:
    """How gaps are ranked: added time per byte, times factors.

    ``length`` is the exponent of the gap's length, ``rates`` the times per byte, tried in turn,
    above which a recompute holds its read instead of recomputing that as well.
    """

    length: float = 0.0
    rates: tuple[float, ...] = (math.inf, 0.0)


@dataclass
class EditableSchedule:
    """A state under local search."""

    state: StageSchedule
    taste: Taste = Taste()
    noise: npt.NDArray[np.float64] | None = None
    journal: list[Undo] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gaps = GapTable(self.state)

    # -- journal ---------------------------------------------------------------------------

    def mark(self) -> int:
        """A point to come back to."""
        return len(self.journal)

    def back_to(self, mark: int) -> None:
        """Take back every change since the mark."""
        touched: set[int] = set()
        while len(self.journal) > mark:
            undo = self.journal.pop()
            self.state.revert(undo)
            touched |= self._touched((*undo.added, *undo.removed))
        self.gaps.refresh(touched)

    def settle(self) -> None:
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

    # -- drop ------------------------------------------------------------------------------

    def evict(self) -> bool:
        """Lower the highest stage by the best drop; False if no drop does."""
        worst = int(self.state.peak.argmax())
        limit = int(self.state.peak[worst])
        for _ in range(tuning.DROP_TRIES):
            found = self._best(worst, limit)
            if found is None:
                return False
            op, stage, drop = found
            if self._lowers(drop, worst, limit):
                self.gaps.forget(stage)
                return True
            self.gaps.block(op, stage)
        return False

    def _best(self, worst: int, limit: int) -> tuple[int, int, Drop] | None:
        """The best row over the stage, scored afresh until the best is fresh."""
        gaps = self.gaps
        slots = gaps.covering(worst)
        factors = self._factors(slots)
        scores = gaps.score[slots] * factors
        fresh: dict[int, Drop | None] = {}
        least = math.inf
        while len(slots):
            k = int(scores.argmin())
            slot = int(slots[k])
            if scores[k] == np.inf:
                return None
            found = fresh.get(k)
            if found is None:
                # Not worked out, or given up at a ceiling that is no longer above the rest.
                ceiling = math.inf if k in fresh else tuning.DROP_CEILING * least / factors[k]
                found, gaps.score[slot] = self._score(slot, worst, limit, ceiling)
                fresh[k] = found
                before, scores[k] = scores[k], gaps.score[slot] * factors[k]
                if found is None or scores[k] > max(before, scores.min()):
                    least = least if found is None else min(least, scores[k])
                    continue
            return int(gaps.op[slot]), int(gaps.high[slot]), found
        return None

    def _factors(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
        """What taste makes of each row's price."""
        gaps, taste = self.gaps, self.taste
        out = np.ones(len(slots))
        if taste.length:
            out /= (gaps.high[slots] - gaps.low[slots]) ** taste.length
        if self.noise is not None:
            out *= self.noise[gaps.op[slots]]
        return out

    def _score(
        self, slot: int, worst: int, limit: int, ceiling: float
    ) -> tuple[Drop | None, float]:
        """The cheaper way to drop a row: run all reads again, or hold the dear ones.

        Work on a drop stops once its price must be above the ceiling; that is then its score.
        """
        gaps = self.gaps
        op, stage = int(gaps.op[slot]), int(gaps.high[slot])
        relief = int(gaps.bytes[slot])
        best, least = None, math.inf
        if not relief:
            return None, math.inf
        for rate in self.taste.rates:
            most = min(ceiling, tuning.DROP_CEILING * least) * relief
            drop = plan_drop(self.state, op, stage, rate, limit, relief, most)
            if drop is None:
                continue
            score = self._price(drop, stage, worst, relief)
            if score < least:
                best, least = drop, score
            if len(drop.add) == 1:
                break
        return best, least if best is not None else ceiling

    def _price(self, drop: Drop, stage: int, worst: int, relief: int) -> float:
        """Added time per byte relieved at the highest stage."""
        state = self.state
        for value in drop.held:
            if state.last_hold(value, stage) < worst:
                relief -= state.model.bytes[value]
        return max(drop.added_time, 1e-9) / relief if relief > 0 else math.inf

    def _lowers(self, drop: Drop, worst: int, limit: int) -> bool:
        mark = self.mark()
        self.change(drop.add, drop.remove)
        before, after = self.journal[-1].peak, self.state.peak
        if after[worst] < limit and not ((after >= limit) & (after > before)).any():
            return True
        self.back_to(mark)
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
            runs = useless_after(state, runs)
        if state.max_peak() > limit:
            # The table was not told, so there is nothing to take back in it.
            for undo in reversed(done):
                state.revert(undo)
            return False
        self.journal.extend(done)
        self.gaps.refresh(self._touched(gone for undo in done for gone in undo.removed))
        return True

    def drop_runs(self, runs: tuple[ExtraRun, ...]) -> None:
        """Leave out extra runs and all that nothing reads any more."""
        while runs:
            self.change((), runs)
            runs = useless_after(self.state, runs)

    def sweep(self, runs: tuple[ExtraRun, ...]) -> None:
        """Leave out those of the runs that nothing reads."""
        idle = tuple(run for run in runs if not self.state.useful(run))
        self.drop_runs(idle)

    def _may_keep(self, run: ExtraRun, limit: int) -> bool:
        """Whether there is room between the stages; the stages of use are not looked at."""
        op, stage = run
        since = max(self.state.last_hold(value, stage) for value in self.gaps.values[op])
        k = bisect_left(self.state.runs[op], stage)
        return fits_without(self.state, op, k, since, limit + 1)

    def keep_all(self, limit: int, runs: Iterable[ExtraRun] | None = None) -> None:
        """Leave out all extra runs that can be, most time per byte first."""
        state, worth = self.state, self.state.model.worth
        todo = list(state.all_extra() if runs is None else runs)
        todo.sort(key=lambda run: -worth[run[0]])
        for op, stage in todo:
            if op in state.extra[stage]:
                self.keep((op, stage), limit)

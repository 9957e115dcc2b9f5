"""The table of gaps: where values are held over stages that do not use them.

A gap belongs to an op and ends at a stage that uses the op's values. Running the op again in that
stage would make it needless to hold them since their use before. Gaps carry a score that may be
stale: a search scores the best one again, and goes on to the next unless it is still the best
(lazy greedy; Minoux, "Accelerated greedy algorithms", 1978).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from fxremat.planner.local.stage_schedule import StageSchedule

Gap = tuple[int, int, int]
"""(last use, next use, bytes): the stages between the two hold the bytes and do not use them."""
UNKNOWN = -np.inf


class GapTable:
    """Gaps of all ops in flat arrays; an op's gaps are replaced together.

    A gap's place in the arrays is its *slot*; a free slot has the number of ops as ``last_use``.
    """

    def __init__(self, state: StageSchedule) -> None:
        self.state = state
        model = state.model
        self.rows: npt.NDArray[np.int64] = np.empty((4, 0), dtype=np.int64)
        self.score: npt.NDArray[np.float64] = np.empty(0)
        self.free_slots: list[int] = []
        self._grow(max(16, 2 * len(model.bytes)))
        self.slots: list[dict[Gap, int]] = [{} for _ in range(model.n)]
        self.values = [
            tuple(v for v in model.writes[op] if model.evictable(v)) for op in range(model.n)
        ]
        self.refresh(range(model.n))

    def refresh(self, ops: Iterable[int]) -> None:
        """Bring the gaps of these ops up to date; the score stays where the next use does."""
        for op in ops:
            if not self.values[op]:
                continue
            old, gaps = self.slots[op], self._gaps_of(op)
            self.state.work += 4 * len(old)
            if len(gaps) == len(old) and all(gap in old for gap in gaps):
                continue
            kept = {gap: old.pop(gap) for gap in gaps if gap in old}
            scores = {end: float(self.score[slot]) for (_, end, _), slot in old.items()}
            for slot in old.values():
                self.last_use[slot] = self.state.model.n
                self.free_slots.append(slot)
            self.slots[op] = kept
            for gap in gaps:
                if gap not in kept:
                    kept[gap] = self._fill(op, gap, scores)

    def covering(self, stage: int) -> npt.NDArray[np.intp]:
        """Slots of the gaps that hold values over the stage without using them.

        A stage of several ops may use a value early and hold it to its end: such gaps count too.
        """
        early = stage + 1 if self.state.extra[stage] else stage
        return np.flatnonzero((self.last_use < early) & (self.next_use > stage))

    def invalidate(self, stage: int) -> None:
        """Take the scores of the gaps that end in this stage as unknown."""
        self.score[self.next_use == stage] = UNKNOWN

    def block(self, op: int, stage: int) -> None:
        """Pass the gap over until `unblock`, or until it changes."""
        for (_, high, _), slot in self.slots[op].items():
            if high == stage:
                self.score[slot] = np.inf

    def unblock(self) -> bool:
        """Let gaps that were passed over be scored again; False if there were none."""
        passed = self.score == np.inf
        self.score[passed] = UNKNOWN
        return bool(passed.any())

    def _fill(self, op: int, gap: Gap, scores: dict[int, float]) -> int:
        if not self.free_slots:
            self._grow(self.score.size)
        slot = self.free_slots.pop()
        self.rows[:, slot] = (op, *gap)
        self.score[slot] = scores.get(gap[1], UNKNOWN)
        return slot

    def _grow(self, more: int) -> None:
        size = self.score.size
        new = np.full((4, more), self.state.model.n, dtype=np.int64)
        self.rows = np.hstack([self.rows, new])
        self.op, self.last_use, self.next_use, self.bytes = self.rows
        self.score = np.append(self.score, np.full(more, np.inf))
        self.free_slots.extend(reversed(range(size, size + more)))

    def _gaps_of(self, op: int) -> list[Gap]:
        """The op's gaps, one for each next use, with the bytes of all values that a run makes."""
        found: dict[int, tuple[int, int]] = {}
        values, state, sizes = self.values[op], self.state, self.state.model.bytes
        for value in values:
            for low, high in self._gaps_of_value(value):
                if high not in found or sizes[value] > found[high][1]:
                    found[high] = (low, sizes[value])
        if len(values) == 1:
            return [(low, high, size) for high, (low, size) in found.items()]
        return [
            (low, high, sum(sizes[v] for v in values if state.live_in(v, high)))
            for high, (low, _) in found.items()
        ]

    def _gaps_of_value(self, value: int) -> list[tuple[int, int]]:
        out = []
        uses = self.state.uses[value]
        for start, stop in self.state.spans[value]:
            low = start
            for high in uses[bisect_left(uses, start) : bisect_right(uses, stop)]:
                if high > low + 1 or self.state.extra[max(low, 0)]:
                    out.append((low, high))
                low = high
        return out

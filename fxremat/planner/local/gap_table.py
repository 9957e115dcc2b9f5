"""The table of gaps: where values are held over stages that do not use them.

One row per (op, stage): running the op again in that stage would end the hold of the op's
values since their previous use. Rows carry a score that may be stale; a search takes the best
row, scores it afresh and goes on to the next unless it is still the best (lazy greedy).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from fxremat.planner.local.stage_schedule import StageSchedule

Row = tuple[int, int, int]
"""(low, high, bytes): held over the stages low + 1 .. high - 1, next used in ``high``."""
UNKNOWN = -np.inf


class GapTable:
    """Rows of all ops in flat arrays; the rows of one op are replaced together."""

    def __init__(self, state: StageSchedule) -> None:
        self.state = state
        model = state.model
        size = max(16, 2 * len(model.bytes))
        self.op: npt.NDArray[np.int64] = np.zeros(size, dtype=np.int64)
        self.low: npt.NDArray[np.int64] = np.full(size, model.n, dtype=np.int64)
        self.high: npt.NDArray[np.int64] = np.zeros(size, dtype=np.int64)
        self.bytes: npt.NDArray[np.int64] = np.zeros(size, dtype=np.int64)
        self.score: npt.NDArray[np.float64] = np.full(size, np.inf)
        self.free = list(range(size - 1, -1, -1))
        self.slots: list[dict[Row, int]] = [{} for _ in range(model.n)]
        self.values = [
            tuple(v for v in model.writes[op] if model.droppable(v)) for op in range(model.n)
        ]
        self.refresh(range(model.n))

    def refresh(self, ops: Iterable[int]) -> None:
        """Bring the rows of these ops up to date; one that ends where one did keeps its score."""
        for op in ops:
            if not self.values[op]:
                continue
            old, rows = self.slots[op], self._rows(op)
            self.state.work += 4 * len(old)
            if len(rows) == len(old) and all(row in old for row in rows):
                continue
            kept = {row: old.pop(row) for row in rows if row in old}
            scores = {high: float(self.score[slot]) for (_, high, _), slot in old.items()}
            for slot in old.values():
                self.low[slot] = self.state.model.n
                self.free.append(slot)
            self.slots[op] = kept
            for row in rows:
                if row not in kept:
                    kept[row] = self._fill(op, row, scores)

    def covering(self, stage: int) -> npt.NDArray[np.intp]:
        """Slots of the rows that hold something over the stage without using it.

        Where the stage runs several ops, also of those it may use early and hold to its end.
        """
        early = stage + 1 if self.state.extra[stage] else stage
        return np.flatnonzero((self.low < early) & (self.high > stage))

    def forget(self, stage: int) -> None:
        """Take the scores of the rows that end in this stage as unknown."""
        self.score[self.high == stage] = UNKNOWN

    def block(self, op: int, stage: int) -> None:
        """Pass the row over until `unblock`, or until it changes."""
        for (_, high, _), slot in self.slots[op].items():
            if high == stage:
                self.score[slot] = np.inf

    def unblock(self) -> bool:
        """Take the scores of all rows that were passed over as unknown; False if none was."""
        passed = self.score == np.inf
        self.score[passed] = UNKNOWN
        return bool(passed.any())

    def _fill(self, op: int, row: Row, scores: dict[int, float]) -> int:
        if not self.free:
            self._grow()
        slot = self.free.pop()
        self.op[slot] = op
        self.low[slot], self.high[slot], self.bytes[slot] = row
        self.score[slot] = scores.get(row[1], UNKNOWN)
        return slot

    def _grow(self) -> None:
        size = len(self.op)
        none = self.state.model.n
        self.op = np.concatenate([self.op, np.zeros(size, dtype=np.int64)])
        self.low = np.concatenate([self.low, np.full(size, none, dtype=np.int64)])
        self.high = np.concatenate([self.high, np.zeros(size, dtype=np.int64)])
        self.bytes = np.concatenate([self.bytes, np.zeros(size, dtype=np.int64)])
        self.score = np.concatenate([self.score, np.full(size, np.inf)])
        self.free.extend(range(2 * size - 1, size - 1, -1))

    def _rows(self, op: int) -> list[Row]:
        """Gaps of the op's values; values that a run in ``high`` also makes are added up."""
        found: dict[int, tuple[int, int]] = {}
        values = self.values[op]
        for value in values:
            size = self.state.model.bytes[value]
            for low, high in self._gaps(value):
                if high not in found or size > found[high][1]:
                    found[high] = (low, size)
        if len(values) == 1:
            return [(low, high, size) for high, (low, size) in found.items()]
        return [(low, high, self._relief(values, high)) for high, (low, _) in found.items()]

    def _relief(self, values: tuple[int, ...], stage: int) -> int:
        state = self.state
        return sum(state.model.bytes[v] for v in values if state.live_in(v, stage))

    def _gaps(self, value: int) -> list[tuple[int, int]]:
        out = []
        uses = self.state.uses[value]
        for start, stop in self.state.spans[value]:
            low = start
            for high in uses[bisect_left(uses, start) : bisect_right(uses, stop)]:
                if high > low + 1 or self.state.extra[max(low, 0)]:
                    out.append((low, high))
                low = high
        return out

"""The Pareto front: schedules of which none is beaten in both peak and time by another.

A solver offers everything it meets. Plans are made at the end, from a replay of the steps, so
that no figure of a plan comes from a solver's own arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.local.stage_schedule import ExtraRun, StageSchedule


@dataclass(frozen=True)
class Entry:
    """One schedule by its extra runs (rows of op, stage), with its peak and time."""

    peak: int
    time: float
    extra: npt.NDArray[np.int32]

    def runs(self) -> list[ExtraRun]:
        """The extra runs, by stage and then by op."""
        return [(op, stage) for op, stage in self.extra.tolist()]


@dataclass
class ParetoFront:
    """Entries by increasing peak, hence by decreasing time."""

    model: IndexedProblem
    exact_peak: int | None = None
    """The least peak of any schedule, once it is proven."""
    entries: list[Entry] = field(default_factory=list)

    def offer(self, state: StageSchedule) -> None:
        """Keep the state's schedule unless another is as good in both."""
        peak, time = state.max_peak(), state.time
        if self._wants(peak, time):
            self.add(peak, time, state.all_extra())

    def add(self, peak: int, time: float, runs: list[ExtraRun]) -> None:
        """Keep a schedule, in stage form or not, unless another is as good in both."""
        if self._wants(peak, time):
            self._insert(Entry(peak, time, np.array(runs, dtype=np.int32).reshape(-1, 2)))

    def _wants(self, peak: int, time: float) -> bool:
        best = self.best(peak)
        # Sums of the same times in another order differ in the last digits.
        return best is None or time < best.time * (1 - 1e-12)

    def _insert(self, entry: Entry) -> None:
        start = bisect_left(self.entries, entry.peak, key=lambda other: other.peak)
        stop = start
        while stop < len(self.entries) and self.entries[stop].time >= entry.time:
            stop += 1
        self.entries[start:stop] = [entry]

    def best(self, peak: int) -> Entry | None:
        """The entry of least time whose peak is at most ``peak``."""
        k = bisect_right(self.entries, peak, key=lambda entry: entry.peak)
        return self.entries[k - 1] if k else None

    def least(self) -> Entry:
        """The entry of least peak."""
        return self.entries[0]

    def state(self, entry: Entry) -> StageSchedule:
        """The entry as a state to start from."""
        return StageSchedule(self.model, entry.runs())

    def final_entries(self) -> tuple[Entry, ...]:
        """Entries by increasing time and decreasing peak; times are summed in `replay`'s order."""
        rows = []
        for entry in self.entries:
            time = sum(self.model.time[op] for op in steps_of(self.model.n, entry.runs()))
            rows.append(Entry(entry.peak, time, entry.extra))
        out: list[Entry] = []
        for entry in sorted(rows, key=lambda row: (row.time, row.peak)):
            if not out or entry.peak < out[-1].peak:
                out.append(entry)
        return tuple(out)


def steps_of(n: int, extra: Iterable[ExtraRun]) -> list[int]:
    """Steps of a schedule given by its extra runs, which come by stage and then by op."""
    out: list[int] = []
    done = 0
    for op, stage in extra:
        out.extend(range(done, stage))
        done = stage
        out.append(op)
    out.extend(range(done, n))
    return out

"""The pool: schedules of which none is beaten in both peak and time by another.

A solver offers everything it meets; the plans are made at the end, from a replay of the
steps, so that no figure of a plan comes from a solver's own arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from fxremat.core.plan import Plan
from fxremat.core.timeline import replay
from fxremat.planner.bound import peak_bound
from fxremat.planner.model import Model
from fxremat.planner.state import Run, State


@dataclass(frozen=True)
class Entry:
    """One schedule by its extra runs, with the peak and time that the state claims."""

    peak: int
    time: float
    extra: tuple[Run, ...]


@dataclass
class Pool:
    """Entries by increasing peak, hence by decreasing time."""

    model: Model
    entries: list[Entry] = field(default_factory=list)

    def offer(self, state: State) -> bool:
        """Keep the state's schedule unless another is as good in both; True if kept."""
        peak, time = state.max_peak(), state.time
        if not self._beats(peak, time):
            return False
        self._insert(Entry(peak, time, tuple(state.all_extra())))
        return True

    def _beats(self, peak: int, time: float) -> bool:
        best = self.best(peak)
        return best is None or time < best.time * (1 - 1e-12)

    def _insert(self, entry: Entry) -> None:
        peaks = [other.peak for other in self.entries]
        start = bisect_left(peaks, entry.peak)
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

    def state(self, entry: Entry) -> State:
        """The entry as a state to start from."""
        return State(self.model, entry.extra)

    def plans(self, solver: str, seconds: float) -> tuple[Plan, ...]:
        """Replayed plans, peak strictly decreasing and time strictly increasing."""
        problem = self.model.problem
        bound = peak_bound(self.model)
        rows = []
        for entry in self.entries:
            line = replay(problem, self.model.names(_steps(self.model.n, entry.extra)))
            rows.append((line.peak_bytes, line.time_us, line.steps))
        out: list[Plan] = []
        for peak, time, steps in sorted(rows, key=lambda row: (row[1], row[0])):
            if not out or peak < out[-1].peak_bytes:
                if out and time <= out[-1].time_us:
                    out.pop()
                plan = Plan(steps, solver, None, peak, time, seconds, problem.base_time_us, bound)
                out.append(plan)
        return tuple(out)


def _steps(n: int, extra: tuple[Run, ...]) -> list[int]:
    """Steps of a schedule given by its extra runs, which come by stage and then by op."""
    out: list[int] = []
    k = 0
    for stage in range(n):
        while k < len(extra) and extra[k][1] == stage:
            out.append(extra[k][0])
            k += 1
        out.append(stage)
    return out

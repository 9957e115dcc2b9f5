"""A schedule in stage form, with its byte profile kept up to date, and the front of such schedules.

Stage ``t`` runs some earlier ops again, in base order, and then op ``t`` for the first time:
the frontier-advancing schedules of Checkmate (arXiv 1910.02653, section 4.2). A state is the
set of extra runs of each stage. Which values are held from stage to stage follows from it: a copy
lives from its run to its last use before the next run of the same op. So no list of held values
is stored, and no copy is ever held for nothing.

Invariants: every extra run is of a repeatable op, in a stage after its first run; every read of
every run finds a copy. ``peak[t]`` is the largest number of bytes live at a step of stage
``t``, exactly as `fxremat.core.timeline.replay` counts them. ``bytes_at_start[t]`` are the bytes
live at the start of stage ``t``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxremat.planner.indexed_problem import INPUT, IndexedProblem, live_bytes

ExtraRun = tuple[int, int]
"""(op, stage): one extra run."""
Span = tuple[int, int]
"""(start, stop): a copy is live at the start of the stages start + 1 .. stop."""

_largest = np.maximum.reduce


class Undo(NamedTuple):
    """What `StageSchedule.revert` needs to take a change back."""

    added: tuple[ExtraRun, ...]
    removed: tuple[ExtraRun, ...]
    bytes_at_start: npt.NDArray[np.int64]
    peak: npt.NDArray[np.int64]
    time: float
    spans: tuple[tuple[int, list[Span]], ...]
    """Where the copies were that the change moved, by value."""


class StageSchedule:
    """Extra runs of each stage and the profile that follows from them.

    ``runs`` has the stages in which each op runs; ``uses`` those in which each value is read.
    ``work`` counts what was done, about in microseconds: searches are bounded by it.
    """

    def __init__(self, model: IndexedProblem, extra: Iterable[ExtraRun] = ()) -> None:
        self.model = model
        self.work = 0
        self.time = sum(model.time)
        self.extra: list[list[int]] = [[] for _ in range(model.n)]
        self.runs: list[list[int]] = [[op] for op in range(model.n)]
        self.uses: list[list[int]] = [[] for _ in model.bytes]
        for op, reads in enumerate(model.reads):
            for value in reads:
                self.uses[value].append(op)
        for run in extra:
            self._insert(run)
        self.spans = [self._spans(value) for value in range(len(model.bytes))]
        """The stages over which each copy of each value is held, in order."""
        count = model.n + 1
        held = [(0, count, model.problem.resident_bytes)]
        for size, spans in zip(model.bytes, self.spans, strict=True):
            held += ((start + 1, stop + 1, size) for start, stop in spans)
        self.bytes_at_start = np.array(live_bytes(held, count), dtype=np.int64)
        peaks = [self._simulate(stage) for stage in range(model.n)]
        self.peak = np.array(peaks, dtype=np.int64)

    # -- questions -------------------------------------------------------------------------

    def max_peak(self) -> int:
        """Peak bytes of the schedule."""
        return int(_largest(self.peak)) if self.model.n else self.model.problem.resident_bytes

    def all_extra(self) -> list[ExtraRun]:
        """Every extra run, by stage."""
        return [(op, stage) for stage, ops in enumerate(self.extra) for op in ops]

    def _spans(self, value: int) -> list[Span]:
        model, uses = self.model, self.uses[value]
        op = model.writer[value]
        if model.is_output[value]:
            return [(op, model.n)]
        runs = [-1] if op == INPUT else self.runs[op]
        before = [*(bisect_left(uses, run) for run in runs[1:]), len(uses)]
        lasts = (uses[count - 1] if count else 0 for count in before)
        return [(run, max(run, last)) for run, last in zip(runs, lasts, strict=True)]

    def live_in(self, value: int, stage: int) -> bool:
        """Whether a copy is live at the start of the stage."""
        spans = self.spans[value]
        k = bisect_left(spans, (stage,))
        return k > 0 and spans[k - 1][1] >= stage

    def available(self, value: int, stage: int) -> bool:
        """Whether an op of the stage may read the value without any further run."""
        op = self.model.writer[value]
        return self.live_in(value, stage) or (op != INPUT and stage in self.runs[op])

    def peak_between(self, since: int, stage: int) -> int:
        """The highest peak strictly between two stages; -1 where none is between."""
        window = self.peak[since + 1 : stage]
        return int(_largest(window)) if window.size else -1

    def held_until(self, value: int, stage: int) -> int:
        """The stage up to which the last copy made before ``stage`` is held."""
        uses, spans = self.uses[value], self.spans[value]
        k = bisect_left(uses, stage)
        start, _ = spans[bisect_left(spans, (stage,)) - 1]
        return max(start, uses[k - 1]) if k else start

    def is_read(self, run: ExtraRun) -> bool:
        """Whether a copy that the run makes is read before the op runs again."""
        op, stage = run
        runs, uses = self.runs[op], self.uses
        k = bisect_right(runs, stage)
        limit = runs[k] if k < len(runs) else self.model.n
        return any(
            bisect_left(uses[value], stage) < bisect_left(uses[value], limit)
            for value in self.model.writes[op]
            if not self.model.is_output[value]
        )

    # -- changes ---------------------------------------------------------------------------

    def change(self, add: Sequence[ExtraRun], remove: Sequence[ExtraRun]) -> Undo:
        """Add and remove extra runs; the caller sees to it that every read finds a copy."""
        before = tuple((value, self.spans[value]) for value in self._touched((*add, *remove)))
        profile = self.bytes_at_start.copy(), self.peak.copy(), self.time
        undo = Undo(tuple(add), tuple(remove), *profile, before)
        for run in remove:
            self._delete(run)
        for run in add:
            self._insert(run)
        dirty = {stage for _, stage in add} | {stage for _, stage in remove}
        self.work += 10 * (len(before) + len(dirty))
        for value, old in before:
            self.spans[value] = self._spans(value)
            self._move(value, old, self.spans[value], dirty)
        for stage in dirty:
            if 0 <= stage < self.model.n:
                self.peak[stage] = self._simulate(stage)
        return undo

    def revert(self, undo: Undo) -> None:
        """Take back the latest change that was not yet taken back."""
        for run in undo.added:
            self._delete(run)
        for run in undo.removed:
            self._insert(run)
        self.bytes_at_start, self.peak, self.time = undo.bytes_at_start, undo.peak, undo.time
        for value, spans in undo.spans:
            self.spans[value] = spans

    def _touched(self, runs: Iterable[ExtraRun]) -> set[int]:
        model = self.model
        touched = {value for op, _ in runs for value in (*model.reads[op], *model.writes[op])}
        return {value for value in touched if not model.is_output[value]}

    def _insert(self, run: ExtraRun) -> None:
        op, stage = run
        insort(self.extra[stage], op)
        insort(self.runs[op], stage)
        for value in self.model.reads[op]:
            insort(self.uses[value], stage)
        self.time += self.model.time[op]

    def _delete(self, run: ExtraRun) -> None:
        op, stage = run
        self.extra[stage].remove(op)
        self.runs[op].remove(stage)
        for value in self.model.reads[op]:
            uses = self.uses[value]
            del uses[bisect_left(uses, stage)]
        self.time -= self.model.time[op]

    # -- the profile -----------------------------------------------------------------------

    def _move(self, value: int, old: list[Span], new: list[Span], dirty: set[int]) -> None:
        if old == new:
            return
        size = self.model.bytes[value]
        self.work += len(old) + len(new)
        for spans, other, change in ((old, new, -size), (new, old, size)):
            for start, stop in spans:
                if (start, stop) not in other:
                    self.bytes_at_start[start + 1 : stop + 1] += change
                    self.peak[start + 1 : stop + 1] += change
                    dirty.update((start, stop))

    def _simulate(self, stage: int) -> int:
        """Bytes at the worst step of a stage, counted as `replay` counts them."""
        model, sizes, kept = self.model, self.model.bytes, self.model.is_output
        extra = self.extra[stage]
        if not extra and not model.inplace[stage]:
            return int(self.bytes_at_start[stage]) + model.own_bytes[stage]
        order = (*extra, stage)
        self.work += 4 * len(order)
        last = {
            value: step
            for step, op in enumerate(order)
            for value in (*model.reads[op], *model.writes[op])
        }
        dies: list[list[int]] = [[] for _ in order]
        for value, step in last.items():
            if not kept[value] and not self.live_in(value, stage + 1):
                dies[step].append(value)
        live, worst = int(self.bytes_at_start[stage]), 0
        for step, op in enumerate(order):
            begins = [v for v in model.writes[op] if op == stage or not kept[v]]
            for value in begins:
                live += sizes[value]
            now = live + model.workspace[op]
            if model.inplace[op]:
                now -= model.overtaken(op, dies[step], begins)
            if now > worst:
                worst = now
            for value in dies[step]:
                live -= sizes[value]
        return worst


# -- the front of peak and time --------------------------------------------------------------


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
    """Entries by increasing peak, hence by decreasing time: none is beaten in both.

    A solver offers everything it meets. Plans are made at the end, from a replay of the steps, so
    that no figure of a plan comes from a solver's own arithmetic.
    """

    model: IndexedProblem
    entries: list[Entry] = field(default_factory=list)

    def offer(self, state: StageSchedule) -> None:
        """Keep the state's schedule unless another is as good in both."""
        peak = state.max_peak()
        best = self.best(peak)
        # Sums of the same times in another order differ in the last digits.
        if best is None or state.time < best.time * (1 - 1e-12):
            self.add(peak, state.all_extra())

    def add(self, peak: int, runs: list[ExtraRun]) -> None:
        """Keep a schedule, in stage form or not, unless another is as good in both."""
        time = self.model.time_of(steps_of(self.model.n, runs))
        self.insert(Entry(peak, time, np.array(runs, dtype=np.int32).reshape(-1, 2)))

    def insert(self, entry: Entry) -> None:
        """Keep an entry unless another is as good in both."""
        best = self.best(entry.peak)
        if best is None or entry.time < best.time:
            start = bisect_left(self.entries, entry.peak, key=lambda other: other.peak)
            worse = takewhile(lambda other: other.time >= entry.time, self.entries[start:])
            self.entries[start : start + sum(1 for _ in worse)] = [entry]

    def best(self, peak: int) -> Entry | None:
        """The entry of least time whose peak is at most ``peak``."""
        k = bisect_right(self.entries, peak, key=lambda entry: entry.peak)
        return self.entries[k - 1] if k else None

    def least(self) -> Entry:
        """The entry of least peak."""
        return self.entries[0]

    def choose(self, budget: int) -> Entry:
        """The entry of least time within the budget, or of least peak where none fits."""
        return self.best(budget) or self.least()

    def steps(self, entry: Entry) -> tuple[str, ...]:
        """The schedule of an entry, by the names of ops."""
        return self.model.names(steps_of(self.model.n, entry.runs()))


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

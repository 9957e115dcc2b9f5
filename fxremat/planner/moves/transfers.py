"""Where in a schedule its transfers start and are waited for.

Given are the ops in the order they run, and which of them read a value that comes back from the
host. A value leaves as soon as it is written: what is produced first leaves first. It is waited
for where it has left by then, or earlier where its bytes are needed. A value comes back as late
as its transfer, and those after it on the same engine, still end in time, and as early as that
only where there is room for its bytes until it is read.

    ops       a  b  c  d  ...  c'  b'  a'
    out       |--a--||--b--|
    in                            |--b--||--a--|       latest start of b: the end minus both

Bytes follow from the order of the steps alone, so a schedule within its budget stays there
however fast the real transfers are. Values that live in host memory come for each fetch, and
those of them that an op writes leave as soon as they are written.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fxremat.core.problem import Problem
from fxremat.core.schedule import Move, Step
from fxremat.core.timeline import Timeline, replay, transfer_us


@dataclass(frozen=True)
class Fetch:
    """The next op reads the value, which is to come from the host."""

    value: str


Item = str | Fetch


def place(problem: Problem, items: Sequence[Item], budget_bytes: int | None) -> Timeline:
    """The fastest schedule found of these ops and fetches, within the budget where that can be.

    Without regard to time, the fewest bytes are those of `Route.synchronous`; a schedule that needs
    no more than the budget there is within it here.
    """
    route = Route(problem, items)
    best = replay(problem, route.synchronous())
    if len(best.steps) == len(items):
        return best
    pairs = zip(best.steps, best.live_bytes, strict=True)
    live = np.array([size for step, size in pairs if isinstance(step, str)], dtype=np.int64)
    budget = sys.maxsize if budget_bytes is None else budget_bytes
    delays = [0.0] * len(live)
    for _ in range(3):  # placed anew by the times at which ops really ran
        line = replay(problem, route.steps(live.copy(), budget, delays))
        fits = line.peak_bytes <= max(budget, best.peak_bytes)
        if fits and line.time_us < best.time_us:
            best = line
        delays = _delays(line)
    return best


def _grouped(pairs: Iterable[tuple[int, str]]) -> dict[int, list[str]]:
    """The names by position."""
    found: dict[int, list[str]] = {}
    for position, name in pairs:
        found.setdefault(position, []).append(name)
    return found


def _delays(line: Timeline) -> list[float]:
    """How long each op had to wait for what it reads from the host."""
    delays, stalled, before = [], 0.0, 0.0
    for step, end in zip(line.steps, line.timing.step_end_us, strict=True):
        if isinstance(step, str):
            delays.append(stalled)
            stalled = 0.0
        elif step.kind == "wait":
            stalled += end - before
        before = end
    return delays


@dataclass
class _Leaving:
    """A value on its way to the host: written by op ``born``, last used by op ``last``."""

    value: str
    born: int
    last: int
    until: int
    """The op before which it must have left: it is written again, or fetched, there."""


@dataclass(frozen=True)
class _Coming:
    """A fetch: for op ``need``, not before op ``since`` (its former copy is used until then)."""

    value: str
    since: int
    need: int


class Route:
    """The ops by position, and what leaves and comes between them."""

    def __init__(self, problem: Problem, items: Sequence[Item]) -> None:
        assert problem.copies is not None
        self.problem, self.copies, self.sizes = problem, problem.copies, problem.bytes_of
        self.ops = [item for item in items if isinstance(item, str)]
        self.coming = list[_Coming]()
        leaving, used, end = dict[str, _Leaving](), dict[str, int](), len(self.ops)
        moved = {item.value for item in items if isinstance(item, Fetch)} | {*problem.host}
        position = 0
        for item in items:
            if isinstance(item, Fetch):
                if item.value in leaving:
                    leaving[item.value].until = min(leaving[item.value].until, position)
                self.coming.append(_Coming(item.value, used.get(item.value, -1) + 1, position))
                continue
            op = problem.op_of[item]
            for name in (each for each in op.writes if each in moved):
                if name in leaving:
                    leaving[name].until = min(leaving[name].until, position)
                else:
                    leaving[name] = _Leaving(name, position, position, end)
                used[name] = position
            for name in moved.intersection(op.reads):
                used[name] = position
                if name in leaving and leaving[name].until == end:
                    leaving[name].last = position
            position += 1
        self.leaving = sorted(leaving.values(), key=lambda row: row.born)

    def synchronous(self) -> tuple[Step, ...]:
        """The ops with each transfer right after the last use before it, or before its reader.

        Nothing runs beside a transfer: it is the schedule of fewest bytes.
        """
        leave = _grouped((row.last, row.value) for row in self.leaving)
        come = _grouped((row.need, row.value) for row in self.coming)
        out: list[Step] = []
        for position, op in enumerate(self.ops):
            for name in come.get(position, ()):
                out += [Move("to device", name), Move("wait", name)]
            out.append(op)
            for name in leave.get(position, ()):
                out += [Move("to host", name), Move("wait", name)]
        return tuple(out)

    # -- to the host -------------------------------------------------------------------------

    def _leave(
        self, live: npt.NDArray[np.int64], budget: int, delays: Sequence[float]
    ) -> tuple[list[float], dict[int, list[str]]]:
        """When each op starts, and before which op what has left is waited for.

        ``live`` gets the bytes of what is held until then.
        """
        sizes, now, engine = self.sizes, 0.0, 0.0
        starts: list[float] = []
        waits: dict[int, list[str]] = {}
        queue = list(self.leaving)
        on_the_way: list[tuple[float, _Leaving]] = []
        for position, name in enumerate(self.ops):
            now += delays[position]
            held: list[tuple[float, _Leaving]] = []
            over = int(live[position]) - budget
            over += sum(sizes[row.value] for _, row in on_the_way if row.last < position)
            for arrival, row in on_the_way:
                used = row.last >= position
                must = row.until <= position or (not used and over > 0)
                if used or (arrival > now and not must):
                    held.append((arrival, row))
                    continue
                now = max(now, arrival)
                over -= sizes[row.value]
                waits.setdefault(position, []).append(row.value)
            on_the_way = held
            live[position] += sum(sizes[row.value] for _, row in held if row.last < position)
            starts.append(now)
            now += self.problem.op_of[name].time_us
            while queue and queue[0].born == position:
                row = queue.pop(0)
                engine = max(engine, now) + transfer_us(self.copies, "to host", sizes[row.value])
                on_the_way.append((engine, row))
        waits[len(self.ops)] = [row.value for _, row in on_the_way]
        return starts, waits

    # -- to the device -----------------------------------------------------------------------

    def _come(
        self, live: npt.NDArray[np.int64], budget: int, starts: Sequence[float],
        waits: dict[int, list[str]],
    ) -> dict[int, list[str]]:  # fmt: skip
        """Before which op each fetch starts: the last first, each as late as is in time."""
        left = {name: position for position, names in waits.items() for name in names}
        found = list[tuple[int, str]]()
        free = float("inf")
        for row in reversed(self.coming):
            size = self.sizes[row.value]
            begin = min(free, starts[row.need]) - transfer_us(self.copies, "to device", size)
            wanted = max(0, bisect_right(starts, begin) - 1)
            earliest = max(row.since, left.get(row.value, 0))
            full = np.flatnonzero(live[earliest : row.need] + size > budget)
            if full.size:
                earliest += int(full[-1]) + 1
            position = min(row.need, max(wanted, earliest))
            live[position : row.need] += size
            free = max(begin, starts[position])
            found.append((position, row.value))
        return _grouped(reversed(found))

    # -- the schedule ------------------------------------------------------------------------

    def steps(
        self, live: npt.NDArray[np.int64], budget: int, delays: Sequence[float]
    ) -> tuple[Step, ...]:
        """The ops with their moves in between; ``live`` is changed to the bytes at each op."""
        starts, waits = self._leave(live, budget, delays)
        fetches = self._come(live, budget, starts, waits)
        leave = _grouped((row.born, row.value) for row in self.leaving)
        needed = _grouped((row.need, row.value) for row in self.coming)
        out: list[Step] = []
        for position, op in enumerate([*self.ops, None]):
            out += (Move("wait", name) for name in waits.get(position, ()))
            out += (Move("to device", name) for name in fetches.get(position, ()))
            out += (Move("wait", name) for name in needed.get(position, ()))
            out += () if op is None else (op,)
            out += (Move("to host", name) for name in leave.get(position, ()))
        return tuple(out)

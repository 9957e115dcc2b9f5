"""What runs again because of the bytes at a few program points: a small MILP and a proven bound.

A *program point* is the first run of some op. The window after it reaches to the next point, or to
the end. Of Checkmate's MILP (arXiv 1910.02653, section 4) only this is left: which values are live
at each point, and which ops run again in each window, whenever in it that is.

    held[v, j]         value v is live at point j
    rerun[q, j]        op q runs again in the window after point j
    rerun_from[q, j]   op q runs again in the window after point j or a later one

Every schedule gives a solution of no more cost. So the optimum, or any bound on it, bounds the time
of all schedules within the budget. With one point it is a knapsack with precedence, and mostly as
good as the whole programme. With each further point it gets closer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.milp.highs import (
    BOUND_MARGIN,
    SCALE,
    Milp,
    Solution,
    Term,
    present,
)

Affine = tuple[float, list[Term]]
"""A constant, and the terms that are added to it."""
ALWAYS: Affine = (1.0, [])
"""The condition that holds whatever is chosen."""


class Relaxation:
    """The MILP of one budget and some program points, which are stages in order."""

    def __init__(
        self, model: IndexedProblem, budget: int, points: Sequence[int], milp: Milp | None = None
    ) -> None:
        self.model, self.budget, self.points, self.milp = model, budget, points, milp or Milp()
        self.per_byte, self.fits = SCALE / max(1, budget), True
        self.held = [self._held_at(stage) for stage in points]
        """Column of each value that may be live at the point; None where it must be."""
        self.rerun = [self._runs_after(j) for j in range(len(points))]
        self.overwritten = list[dict[int, int]]()
        """Column of each value that the first run at the point may write over."""
        for j in range(len(self.points)):
            self._bytes_fit(j)
            self._first_runs_find_their_reads(j)
            self._runs_find_their_reads(j)
            self._held_values_come_from_somewhere(j)
        for j in range(len(self.points) - 1):
            self._once_for_all_windows(j)
            if self._are_neighbours(j):
                self._runs_fit(j)

    # -- columns ---------------------------------------------------------------------------

    def _held_at(self, stage: int) -> dict[int, int | None]:
        """Outputs are left out: they are live for good, and always there to be read."""
        model, found = self.model, dict[int, int | None]()
        own, certain = {*model.reads[stage], *model.writes[stage]}, self._certain(stage)
        for value, op in enumerate(model.writer):
            if op > stage or model.is_output[value]:
                continue
            if value in certain:
                found[value] = None
            elif model.last_needs[value] > stage or value in own:
                found[value] = self.milp.binary()
        return found

    def _certain(self, stage: int) -> set[int]:
        """What is live in any case: what the stage touches, and what cannot be computed again."""
        model = self.model
        its = enumerate(model.last_reads)
        stay = {v for v, last in its if last > stage and not self._may_go(v)}
        return stay | {*model.reads[stage], *model.writes[stage]}

    def _may_go(self, value: int) -> bool:
        """Whether the value may be missing before its last read."""
        return self.model.evictable(value)

    def _are_neighbours(self, j: int) -> bool:
        """Whether nothing runs for the first time between point j and the next."""
        return self.points[j + 1] - self.points[j] == 1

    def _other_sources(self, value: int) -> list[Term]:
        """Other columns that bring the value after the only point; none here."""
        return []

    def _cost(self, op: int) -> float:
        """The cost of running the op again, in the units of the MILP."""
        return self.model.time[op] * SCALE / max(self.model.problem.base_time_us, 1e-9)

    def _runs_after(self, j: int) -> dict[int, int]:
        model, stage = self.model, self.points[j]
        return {
            op: self.milp.binary(self._cost(op))
            for op in range(stage + 1)
            if model.repeatable[op]
            and any(
                not model.is_output[v] and self.model.last_needs[v] > stage
                for v in model.writes[op]
            )
        }

    # -- rows ------------------------------------------------------------------------------

    def _bytes_fit(self, j: int) -> None:
        """sum(bytes[v] held[v, j]) + what is there in any case <= budget"""
        model, stage = self.model, self.points[j]
        overwritten, terms = self._write_over(j)
        fixed = self._outputs(stage)[0] + model.workspace[stage] - overwritten
        for value, column in self.held[j].items():
            if column is None:
                fixed += model.bytes[value]
            else:
                terms.append((column, model.bytes[value] * self.per_byte))
        room = (self.budget - fixed) * self.per_byte
        self.fits = self.fits and room >= sum(factor for _, factor in terms if factor < 0)
        self._fit(terms, fixed)

    def _fit(self, terms: list[Term], fixed: float) -> None:
        """terms + fixed <= budget"""
        self.milp.row(terms, high=(self.budget - fixed) * self.per_byte)

    def _outputs(self, stage: int) -> Affine:
        """Bytes of resident values and of the outputs there are."""
        model = self.model
        there = (v for v, op in enumerate(model.writer) if model.is_output[v] and op <= stage)
        return model.problem.resident_bytes + model.size_of(there), []

    def _write_over(self, j: int) -> Affine:
        """Bytes that the first run may write over what it reads for the last time, at most.

        Where a later first run reads the value, too, it must be written again in between:
        overwritten[v] <= sum(rerun[writer of v, i], i >= j)
        """
        model, stage = self.model, self.points[j]
        shared, terms = dict[int, int](), list[Term]()
        self.overwritten.append({})
        for read, write in model.inplace[stage]:
            size = min(model.bytes[read], model.bytes[write])
            if self.model.last_reads[read] <= stage:
                shared[write] = max(size, shared.get(write, 0))
            elif model.evictable(read):
                overwritten = self.overwritten[j].setdefault(read, self.milp.binary())
                runs = [window.get(model.writer[read]) for window in self.rerun[j:]]
                found = present(*runs, factor=-1.0)
                found += [(column, -factor) for column, factor in self._other_sources(read)]
                self.milp.row([(overwritten, 1.0), *found], high=0.0)
                terms.append((overwritten, -size * self.per_byte))
        return sum(shared.values()), terms

    def _first_runs_find_their_reads(self, j: int) -> None:
        """held[v, j] + rerun[writer of v, j] >= condition for first runs in the window that read v

        The condition is 1 where nothing is chosen but what is live and what runs again.
        """
        for value, demand in self._demands(j):
            self._at_least(j, value, demand)

    def _runs_find_their_reads(self, j: int) -> None:
        """held[v, j] + rerun[writer of v, j] >= rerun[q, j] + condition - 1 for all that q reads"""
        done = self._read_in_window(j)
        for op, column in self.rerun[j].items():
            for value, (low, terms) in self._reads_of_run(op):
                if value not in done and not self.model.is_output[value]:
                    self._at_least(j, value, (low - 1.0, [*terms, (column, 1.0)]))

    def _demands(self, j: int) -> Iterable[tuple[int, Affine]]:
        """What first runs of the window after point j read, and the condition for each."""
        return ((value, ALWAYS) for value in self._read_in_window(j))

    def _reads_of_run(self, op: int) -> Iterable[tuple[int, Affine]]:
        """What an op reads that runs again, and the condition for each."""
        return ((value, ALWAYS) for value in self.model.reads[op])

    def _held_values_come_from_somewhere(self, j: int) -> None:
        """held[v, j + 1] <= held[v, j] + rerun[writer of v, j] for v that is there at j"""
        if j + 1 == len(self.points):
            return
        done = self._read_in_window(j)
        for value, column in self.held[j + 1].items():
            if self.model.writer[value] <= self.points[j] and value not in done:
                demand = ALWAYS if column is None else (0.0, [(column, 1.0)])
                self._at_least(j, value, demand)

    def _runs_fit(self, j: int) -> None:
        """The bytes of an op that runs again fit beside what stays from point j to the next.

        stays[v] >= held[v, j] + held[v, j + 1] - 1 - rerun[writer of v, j]
        sum(bytes[v] stays[v], v that q does not touch) + bytes of q rerun[q, j] <= budget
        """
        model, per_byte, stays = self.model, self.per_byte, dict[int, int]()
        fixed, outputs = self._outputs(self.points[j])
        for value, column in self.held[j].items():
            if value not in self.held[j + 1]:
                continue
            known = present(column, self.held[j + 1][value], factor=-1.0)
            run = present(self.rerun[j].get(model.writer[value]))
            if not known and not run:
                fixed += model.bytes[value]
                continue
            stays[value] = self.milp.real()
            self.milp.row([(stays[value], 1.0), *known, *run], low=1.0 - len(known))
        total = self.milp.real(high=math.inf)
        parts = [(column, model.bytes[value] * per_byte) for value, column in stays.items()]
        self.milp.row([*parts, (total, -1.0)], 0.0, 0.0)
        for op, column in self.rerun[j].items():
            touched = {*(v for v, when in self._reads_of_run(op) if when == ALWAYS)}
            touched |= {*model.writes[op]}
            own = [value for value in touched if value in stays or self._comes_and_goes(j, value)]
            shared = dict[int, int]()
            for read, write in model.inplace[op]:
                size = min(model.bytes[read], model.bytes[write])
                shared[write] = max(size, shared.get(write, 0))
            size = model.workspace[op] + model.size_of(own)
            own_bytes = (size - sum(shared.values())) * per_byte
            terms = [(total, 1.0), (column, own_bytes), *outputs]
            terms += [(stays[v], -model.bytes[v] * per_byte) for v in touched if v in stays]
            self._fit(terms, fixed)

    def _comes_and_goes(self, j: int, value: int) -> bool:
        """Whether the value's bytes may be missing somewhere in the window."""
        if self.model.is_output[value]:
            return False
        certain = self.held[j].get(value, -1) is None and self.held[j + 1].get(value, -1) is None
        return not certain or self.model.writer[value] in self.rerun[j]

    def _once_for_all_windows(self, j: int) -> None:
        """Reads find their values from point j to the end, and not only to the next point.

        This is tighter where runs in several windows add up.

        rerun_from[q, j] <= sum(rerun[q, i], i >= j)
        rerun_from[q, j] >= rerun[q, i]
        held[v, j] + rerun_from[writer of v, j] >= 1
        rerun_from[q, j] <= held[v, j] + rerun_from[writer of v, j]
        """
        model, stage = self.model, self.points[j]
        rerun_from: dict[int, int] = {}
        for op in self.rerun[j]:
            parts = [window[op] for window in self.rerun[j:] if op in window]
            if len(parts) == 1:
                rerun_from[op] = parts[0]
                continue
            rerun_from[op] = self.milp.real()
            self.milp.row([(rerun_from[op], -1.0), *((part, 1.0) for part in parts)], low=0.0)
            for part in parts:
                self.milp.row([(rerun_from[op], 1.0), (part, -1.0)], low=0.0)
        for value, op in enumerate(model.writer):
            if op <= stage < self.model.last_reads[value] and not model.is_output[value]:
                self._at_least(j, value, ALWAYS, rerun_from)
        for op, column in rerun_from.items():
            for value in model.reads[op]:
                if not model.is_output[value]:
                    self._at_least(j, value, (0.0, [(column, 1.0)]), rerun_from)

    def _at_least(
        self, j: int, value: int, demand: Affine, rerun: Mapping[int, int] | None = None
    ) -> None:
        """held[value, j] + rerun[writer of value, j] >= demand"""
        if self.held[j].get(value, -1) is None:
            return  # held in any case
        run = (self.rerun[j] if rerun is None else rerun).get(self.model.writer[value])
        terms = present(self.held[j].get(value), run)
        self._demand([*terms, *self._other_sources(value)], demand)

    def _demand(self, found: Iterable[Term], demand: Affine) -> None:
        """found >= demand"""
        low, wanted = demand
        self.milp.row([*found, *((column, -factor) for column, factor in wanted)], low=low)

    def _read_in_window(self, j: int) -> set[int]:
        """Values there at point j that first runs of the window after it read."""
        model, start = self.model, self.points[j]
        stop = self.points[j + 1] if j + 1 < len(self.points) else model.n - 1
        return {
            value
            for op in range(start + 1, stop + 1)
            for value in model.reads[op]
            if model.writer[value] <= start and not model.is_output[value]
        }

    # -- solve -----------------------------------------------------------------------------

    def solve(self, deadline: Deadline, near_us: float = 0.0) -> Solution:
        """The cheapest choice but for ``near_us``; with many columns a good one.

        In objective and bound, `SCALE` stands for the time of store-all.
        """
        if not self.fits:
            return Solution(None, float("inf"), float("inf"))
        enough = near_us * SCALE / max(self.model.problem.base_time_us, 1e-9)
        few, gap = constants.NODES // 8, constants.RELAXATION_GAP
        if len(self.milp.cost) <= constants.MANY_COLUMNS // 2:
            nodes = constants.NODES if len(self.points) == 1 else few
            return self.milp.solve(deadline, nodes=nodes, gap=gap, absolute_gap=enough)
        near = self.milp.solve_near(deadline, nodes=few, gap=gap, absolute_gap=enough)
        close = near.objective - near.bound <= max(enough, 10 * gap * SCALE)
        if close or len(self.milp.cost) > constants.MANY_COLUMNS:
            return near
        found = self.milp.solve(
            deadline, nodes=few, gap=gap, absolute_gap=enough, start=near.values
        )
        return found if found.values is not None else replace(near, bound=found.bound)

    def time_bound_us(self, solution: Solution) -> float:
        """Time of any schedule within the budget: at least this; infinite if there is none."""
        base = self.model.problem.base_time_us
        return base + max(0.0, solution.bound / SCALE * base * (1 - BOUND_MARGIN))

    def held_in(self, solution: Solution) -> Iterator[tuple[int, set[int]]]:
        """The program points, as stages, and the values that outlive each."""
        for stage, columns, overwritten in zip(
            self.points, self.held, self.overwritten, strict=True
        ):
            gone = {v for v, c in overwritten.items() if solution.chosen(c)}
            yield stage, {v for v, c in columns.items() if c is None or solution.chosen(c)} - gone


def extra_runs_for(model: IndexedProblem, held: Mapping[int, set[int]]) -> list[tuple[int, int]]:
    """The extra runs of a schedule that holds only these values over the program points.

    ``held`` is by stage. Values that cannot be computed again are always held. What is missing is
    computed again when it is first read, with whatever that needs in turn.
    """
    there = [not model.evictable(value) for value in range(len(model.bytes))]
    out: list[tuple[int, int]] = []
    for stage in range(model.n):
        rerun: set[int] = set()
        missing = [v for v in model.reads[stage] if not there[v]]
        while missing:
            op = model.writer[missing.pop()]
            if op not in rerun:
                rerun.add(op)
                missing.extend(v for v in model.reads[op] if not there[v])
        for op in (*sorted(rerun), stage):
            for value in model.writes[op]:
                there[value] = True
        out.extend((op, stage) for op in sorted(rerun))
        for value, op in enumerate(model.writer) if stage in held else ():
            if op <= stage and model.evictable(value):
                there[value] = there[value] and value in held[stage]
    return out

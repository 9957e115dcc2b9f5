"""Which variants to take: a MILP over choices, what is held when, and what runs again.

The relaxation over program points (`fxremat.planner.milp.relaxation`), with operator choice as in
MONeT (Shah et al., "Memory Optimization for Deep Networks", arXiv 2010.14501, section 4.3): which
variant an op takes, what is kept and what runs again are chosen together.

    z[a]          variant a is taken; of those that exclude each other at most one
    held[v, j]    value v is live at point j
    rerun[q, j]   op q runs again in the window after point j

    minimise      sum(adds[a] z[a]) + sum(time[q] rerun[q, j])
    bytes         sum(bytes[v] held[v, j]) + outputs + workspace <= budget
    reads         held[v, j] + rerun[writer of v, j] >= condition       first runs in window j
                  held[v, j] + rerun[writer of v, j] >= rerun[q, j] + condition - 1     runs again
    origin        held[v, j + 1] <= held[v, j] + rerun[writer of v, j]
    runs          what op q needs that runs again in the window after point j, beside what stays
                  from point j to the next, fits as well, where these are neighbours

where *condition* is 1, z[a] or 1 - z[a], as `fxremat.planner.variants.all_variants` says. The MILP
only chooses: the figures of a plan come from the problem that is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fxremat.core.constants import MEASURABLE
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.milp.highs import SCALE, Milp, Solution, Term, present
from fxremat.planner.variants.all_variants import AllVariants, Condition, Read


@dataclass
class ChoiceMilp:
    """The MILP of a budget and some program points, which are stages of ``combined``.

    Without a budget it looks for the least peak.
    """

    combined: AllVariants
    points: Sequence[int]
    budget: int | None
    milp: Milp = field(default_factory=lambda: Milp(may_restart=False))
    taken: dict[int, int] = field(default_factory=dict)
    held: list[dict[str, int]] = field(default_factory=list)
    """Column of each value that may be live at the point."""
    rerun: list[dict[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        combined = self.combined
        base = max(combined.problem.base_time_us, 1e-9)
        self.per_us = SCALE / base if self.budget is not None else constants.GAP * SCALE / base
        self.bytes_of = combined.problem.bytes_of
        self.per_byte = SCALE / max(1, self.budget or sum(self.bytes_of.values()))
        self.peak = self.milp.real(1.0, high=float("inf")) if self.budget is None else None
        # The last stage whose first run reads each value.
        self.last_read = {read.value: read.stage for reads in combined.reads for read in reads}
        self.last_needed = _last_needed(combined)
        for index in combined.usable:
            self.taken[index] = self.milp.binary(combined.added_us[index] * self.per_us)
        for group in combined.excluding:
            self.milp.row([(self.taken[index], 1.0) for index in group], high=1.0)
        for stage in self.points:
            self.held.append(self._held_at(stage))
        for j in range(len(self.points)):
            self.rerun.append(self._runs_after(j))
        for j in range(len(self.points)):
            self._bytes_fit(j)
            self._what_stays_is_held(j)
            self._first_runs_find_their_reads(j)
            self._runs_find_their_reads(j)
            self._held_values_come_from_somewhere(j)
        for j in range(len(self.points) - 1):
            if self._is_short(j):
                self._runs_fit(j)

    @property
    def size(self) -> int:
        """Columns of the MILP."""
        return len(self.milp.cost)

    # -- columns ---------------------------------------------------------------------------

    def _held_at(self, stage: int) -> dict[str, int]:
        own = {
            *self.combined.ops[stage].writes,
            *(read.value for read in self.combined.reads[stage]),
        }
        return {
            name: self.milp.binary()
            for name, last_needed in self.last_needed.items()
            if self._written(name) <= stage and (last_needed > stage or name in own)
        }

    def _written(self, name: str) -> int:
        return self.combined.writer.get(name, -1)

    def _runs_after(self, j: int) -> dict[int, int]:
        stage = self.points[j]
        return {
            q: self.milp.binary(op.time_us * self.per_us)
            for q, op in enumerate(self.combined.ops[: stage + 1])
            if op.repeatable and any(self.last_needed.get(name, -1) > stage for name in op.writes)
        }

    # -- rows ------------------------------------------------------------------------------

    def _terms(self, condition: Condition) -> list[Term]:
        return [(self.taken[index], float(factor)) for index, factor in condition.factors]

    def _bytes_fit(self, j: int) -> None:
        stage, combined = self.points[j], self.combined
        op = combined.ops[stage]
        fixed, terms = self._outputs(stage)
        terms += [(c, self.bytes_of[name] * self.per_byte) for name, c in self.held[j].items()]
        run = combined.run_condition(stage)
        fixed += op.workspace_bytes * run.constant
        terms += [(c, f * op.workspace_bytes * self.per_byte) for c, f in self._terms(run)]
        terms += [
            (self.taken[index], change.workspace_bytes * self.per_byte)
            for index in combined.usable
            for change in combined.problem.variants[index].changes
            if change.op == op.name and change.workspace_bytes
        ]
        self._fit(terms, fixed)

    def _outputs(self, stage: int) -> tuple[float, list[Term]]:
        """Bytes that are there for good once ``stage`` has run, and those by the variants taken."""
        fixed, terms = float(self.combined.problem.resident_bytes), list[Term]()
        resident = set(self.combined.problem.resident)
        for name, condition in self.combined.output_conditions.items():
            if name not in resident and self._written(name) <= stage:
                fixed += self.bytes_of[name] * condition.constant
                terms += [
                    (c, f * self.bytes_of[name] * self.per_byte) for c, f in self._terms(condition)
                ]
        return fixed, terms

    def _fit(self, terms: list[Term], fixed: float) -> None:
        """terms + fixed <= the budget, or the peak."""
        if self.peak is not None:
            self.milp.row([*terms, (self.peak, -1.0)], high=-fixed * self.per_byte)
        else:
            assert self.budget is not None
            self.milp.row(terms, high=(self.budget - fixed) * self.per_byte)

    def _is_short(self, j: int) -> bool:
        """Whether only ops of variants run for the first time before the next point."""
        between = range(self.points[j] + 1, self.points[j + 1])
        return all(self.combined.variant_of[stage] is not None for stage in between)

    def _runs_fit(self, j: int) -> None:
        """What runs again in the window fits beside what stays from its begin to its end.

        As in `fxremat.planner.milp.relaxation`, where no variant is chosen:

        stays[v] >= held[v, j] + held[v, j + 1] - 1 - rerun[writer of v, j]
        sum(bytes[v] stays[v], v that q does not touch) + bytes of q rerun[q, j] <= budget
        """
        fixed, outputs = self._outputs(self.points[j])
        stays: dict[str, int] = {}
        for name, begin in self.held[j].items():
            end = self.held[j + 1].get(name)
            if end is None:
                continue
            stays[name] = self.milp.real()
            ends = [(begin, -1.0), (end, -1.0)]
            runs = present(self.rerun[j].get(self._written(name)))
            self.milp.row([(stays[name], 1.0), *ends, *runs], low=-1.0)
        total = self.milp.real(high=float("inf"))
        parts = [(column, self.bytes_of[name] * self.per_byte) for name, column in stays.items()]
        self.milp.row([*parts, *outputs, (total, -1.0)], 0.0, 0.0)
        for q, column in self.rerun[j].items():
            touched = self._touched(q)
            own = [(stays[v], -self.bytes_of[v] * self.per_byte) for v in touched if v in stays]
            self._fit(
                [(total, 1.0), (column, self._own_bytes(q, touched) * self.per_byte), *own], fixed
            )

    def _touched(self, q: int) -> list[str]:
        """What the op reads and writes whatever is taken, if it is not there in any case."""
        is_form = self.combined.variant_of[q] is not None
        reads = (read.value for read in self.combined.reads[q] if is_form or read.condition.always)
        names = dict.fromkeys((*reads, *self.combined.ops[q].writes))
        return [name for name in names if name in self.last_needed]

    def _own_bytes(self, q: int, touched: list[str]) -> int:
        """Bytes of the op and of these values; what it may write over counts once."""
        op, shared = self.combined.ops[q], dict[str, int]()
        for read, write in op.inplace:
            if read in touched and write in touched:
                size = min(self.bytes_of[read], self.bytes_of[write])
                shared[write] = max(size, shared.get(write, 0))
        own = sum(self.bytes_of[name] for name in touched)
        return op.workspace_bytes + own - sum(shared.values())

    def _what_stays_is_held(self, j: int) -> None:
        """held[v, j] >= condition: what the point's op touches, and what cannot be computed again.

        What the op may write over is held only if it is there afterwards: it has no bytes of its
        own where this is its last read, or where it is computed again for those that follow.
        """
        stage, combined = self.points[j], self.combined
        op, run = combined.ops[stage], combined.run_condition(stage)
        over = {r for r, _ in op.inplace if self._may_go(r, stage)}
        for name in op.writes:
            self._held(j, name, run)
        for read in combined.reads[stage]:
            if read.value not in over:
                self._held(j, read.value, read.condition)
        for read in self._reads_between(stage, len(combined.ops)):
            if not self._comes_back(read.value):
                self._held(j, read.value, read.condition)

    def _may_go(self, name: str, stage: int) -> bool:
        """Whether the value need not be there once the stage has run."""
        return self.last_read.get(name, -1) <= stage or self._comes_back(name)

    def _comes_back(self, name: str) -> bool:
        """Whether the value can be computed again."""
        writer = self._written(name)
        return writer >= 0 and self.combined.ops[writer].repeatable

    def _held(self, j: int, name: str, condition: Condition) -> None:
        column = self.held[j].get(name)
        if column is not None and self._written(name) <= self.points[j]:
            self._demand([(column, 1.0)], condition)

    def _demand(self, found: list[Term], condition: Condition, more: Iterable[Term] = ()) -> None:
        """found >= condition + more"""
        negative = [(column, -factor) for column, factor in (*self._terms(condition), *more)]
        self.milp.row([*found, *negative], low=float(condition.constant))

    def _reads_between(self, after: int, stop: int) -> list[Read]:
        """Reads by first runs of the stages between, of what was written up to ``after``; once."""
        found = {
            (read.value, read.condition): read
            for stage in range(after + 1, stop)
            for read in self.combined.reads[stage]
            if self._written(read.value) <= after and read.value in self.last_needed
        }
        always = {value for value, condition in found if condition.always}
        return [r for r in found.values() if r.condition.always or r.value not in always]

    def _sources(self, j: int, name: str) -> list[Term]:
        return present(self.held[j].get(name), self.rerun[j].get(self._written(name)))

    def _first_runs_find_their_reads(self, j: int) -> None:
        last = j + 1 == len(self.points)
        stop = len(self.combined.ops) if last else self.points[j + 1] + 1
        for read in self._reads_between(self.points[j], stop):
            self._demand(self._sources(j, read.value), read.condition)

    def _runs_find_their_reads(self, j: int) -> None:
        for q, column in self.rerun[j].items():
            own = self.combined.variant_of[q]
            for read in self.combined.reads[q]:
                if read.value not in self.last_needed:
                    continue
                sources = self._sources(j, read.value)
                if own is not None or read.condition.always:
                    self.milp.row([*sources, (column, -1.0)], low=0.0)
                else:
                    condition = Condition(read.condition.constant - 1, read.condition.factors)
                    self._demand(sources, condition, [(column, 1.0)])

    def _held_values_come_from_somewhere(self, j: int) -> None:
        if j + 1 == len(self.points):
            return
        for name, column in self.held[j + 1].items():
            if self._written(name) <= self.points[j]:
                self.milp.row([*self._sources(j, name), (column, -1.0)], low=0.0)

    # -- solve -----------------------------------------------------------------------------

    def solve(self, deadline: Deadline) -> Solution:
        """A good choice; where there are many columns, near the linear relaxation."""
        nodes = 1  # what comes after the root mostly raises the bound, which proves nothing here
        gap, absolute = (MEASURABLE, 0.0) if self.budget is None else (0.0, constants.GAP * SCALE)
        near = self.milp.solve_near(deadline, nodes=nodes, gap=gap, absolute_gap=absolute)
        enough = gap * abs(near.objective) + absolute
        if near.values is not None and near.objective - near.bound <= enough:
            return near
        found = self.milp.solve(
            deadline, nodes=nodes, gap=gap, absolute_gap=absolute, start=near.values
        )
        return found if found.values is not None else near

    def names(self, solution: Solution) -> tuple[str, ...]:
        """The variants that the solution takes."""
        variants = self.combined.problem.variants
        return tuple(variants[i].name for i, c in self.taken.items() if solution.chosen(c))

    def held_at(self, solution: Solution) -> dict[int, set[str]]:
        """What outlives each point, by name."""
        return {
            stage: {name for name, c in columns.items() if solution.chosen(c)}
            for stage, columns in zip(self.points, self.held, strict=True)
        }


def _last_needed(combined: AllVariants) -> dict[str, int]:
    """The last stage that may need each value, also by ops that run again.

    Outputs are left out: they stay. So are values that nothing reads.
    """
    last: dict[str, int] = {}
    for stage, op in enumerate(combined.ops):
        for name in op.writes:
            last.setdefault(name, stage)
        for read in combined.reads[stage]:
            last[read.value] = stage
    kept = combined.output_conditions.keys()
    for q in reversed(range(len(combined.ops))):
        if combined.ops[q].repeatable:
            last_needed = max(
                (last[name] for name in combined.ops[q].writes if name not in kept), default=-1
            )
            for read in combined.reads[q]:
                last[read.value] = max(last[read.value], last_needed)
    return {name: stage for name, stage in last.items() if name not in kept}

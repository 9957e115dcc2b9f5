"""The programme of Checkmate: which ops run again in which stage, and what it costs in bytes.

Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization"
(arXiv 1910.02653), section 4: stage ``t`` runs some earlier ops again, in base order, and then op
``t`` for the first time. Columns, by the paper's names:

* R: ``run[t][k]``, op ``k`` runs in stage ``t``;
* S: ``stay[t][v]``, value ``v`` is there at the start of stage ``t``. Where nothing that touches
  ``v`` can run in a stage, the next stage has the same column;
* FREE: ``free[t][v, k]``, value ``v`` goes right after op ``k``: continuous, and bounded by rows
  that say how much of ``v`` is left, which are tighter than the paper's;
* U: bytes while an op runs, and ``through[t]``, bytes between two stages.

R is per op and S per value, so ops may write several. Given whole R the least S and the largest
FREE are whole too. S is declared whole all the same, which makes HiGHS many times as fast.

Repeats could also run in another order than the base order, and then hold fewer bytes. A stage
that is not in ``ordered`` has, instead of FREE and U, only rows that hold for every order. With
no ordered stage the programme is a relaxation of all schedules, and its bound is one on the time
of each of them; with all stages ordered it is Checkmate's.

Bytes are in units of a thousandth of the budget, times in thousandths of the base time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from fxremat.planner.indexed_problem import INPUT, IndexedProblem
from fxremat.planner.milp.highs import FREE, Mip, Term

SCALE = 1000.0
Allowed = Sequence[Sequence[int]]
"""For each stage the ops that may run again in it, in base order."""


@dataclass
class Staged:
    """The columns and rows for one problem, one budget and one choice of allowed runs."""

    model: IndexedProblem
    budget: int
    allowed: Allowed
    ordered: Collection[int]
    mip: Mip = field(default_factory=Mip)
    run: list[dict[int, int]] = field(default_factory=list)
    stay: list[dict[int, int]] = field(default_factory=list)
    free: list[dict[tuple[int, int], int]] = field(default_factory=list)
    held: list[dict[int, int]] = field(default_factory=list)
    through: list[int] = field(default_factory=list)
    sums: list[tuple[int, list[Term]]] = field(default_factory=list)
    """Columns of bytes and what they are the sum of, in an order that they can be worked out."""

    def __post_init__(self) -> None:
        model, mip = self.model, self.mip
        self.unit = max(1, self.budget) / SCALE
        self.time_unit = max(1e-9, model.problem.base_time_us) / SCALE
        self.none = mip.real(high=0.0)
        self.one = mip.real(low=1.0)
        self.touched = [self._touched(stage) for stage in range(model.n)]
        self._add_runs()
        self._add_stays()
        self._balance_stages()
        for stage in range(model.n):
            self._fit_first_run(stage)
            self.free.append({})
            self.held.append({})

    # -- columns ---------------------------------------------------------------------------

    def _touched(self, stage: int) -> list[int]:
        """Values that something in the stage may write, read, or that are there at the start."""
        model = self.model
        values = dict.fromkeys(model.inputs if stage == 0 else ())
        for op in (*self.allowed[stage], stage):
            values |= dict.fromkeys(model.reads[op])
            values |= dict.fromkeys(model.writes[op])
        return list(values)

    def _add_runs(self) -> None:
        """R[t,k] for the allowed k < t; R[t,t] = 1."""
        for stage, again in enumerate(self.allowed):
            cost = self.model.time
            row = {op: self.mip.binary(cost[op] / self.time_unit) for op in again}
            row[stage] = self.one
            self.run.append(row)
        self.mip.cost[self.one] = sum(self.model.time) / self.time_unit

    def _add_stays(self) -> None:
        """S[t,v]: nothing, everything, the column of the stage before, or one of its own."""
        model = self.model
        self.stay = [{} for _ in range(model.n + 1)]
        first = self._first_uses()
        last = self._last_uses(first)
        again = {op for ops in self.allowed for op in ops}
        touched = [set(values) for values in self.touched]
        for value in range(len(model.bytes)):
            writer = model.writer[value]
            begin = 0 if writer == INPUT else writer + 1
            pinned = model.n if model.is_output[value] else -1
            if writer not in again:
                pinned = max(pinned, first[value], 0 if writer == INPUT else -1)
            for stage in range(begin, max(pinned, last[value]) + 1):
                if stage <= pinned:
                    column = self.one
                elif stage == begin or value in touched[stage - 1]:
                    column = self.mip.binary()
                else:
                    column = self.stay[stage - 1][value]
                self.stay[stage][value] = column

    def _first_uses(self) -> list[int]:
        """The last stage in which an op reads each value in its first run."""
        out = [-1] * len(self.model.bytes)
        for op, reads in enumerate(self.model.reads):
            for value in reads:
                out[value] = op
        return out

    def _last_uses(self, first: Sequence[int]) -> list[int]:
        """The last stage in which an op may read each value."""
        out = list(first)
        for stage, again in enumerate(self.allowed):
            for op in again:
                for value in self.model.reads[op]:
                    out[value] = max(out[value], stage)
        return out

    def stays(self, stage: int, value: int) -> int:
        """S[t,v], also where it can only be 0."""
        return self.stay[stage].get(value, self.none)

    def size(self, value: int) -> float:
        """m_v: bytes of the value in units of the programme."""
        return self.model.bytes[value] / self.unit

    def there(self, stage: int, value: int) -> list[Term]:
        """S[t,v] + R[t,w] for the writer w: how much of the value the stage has."""
        terms: list[Term] = [(self.stays(stage, value), 1.0)]
        writer = self.model.writer[value]
        if writer in self.run[stage]:
            terms.append((self.run[stage][writer], 1.0))
        return terms

    def sum_of(self, terms: list[Term]) -> int:
        """A column of bytes, at most the budget, that is the sum of the terms."""
        column = self.mip.real(high=SCALE)
        self.sums.append((column, terms))
        self.mip.row([*terms, (column, -1.0)], 0.0, 0.0)
        return column

    def at_most(self, left: Iterable[Term], right: Iterable[Term], slack: float = 0.0) -> None:
        """left <= right + slack; no row where all columns are fixed, as then it holds."""
        terms = [*left, *((column, -factor) for column, factor in right)]
        if any(column > self.one for column, _ in terms):
            self.mip.row(terms, -FREE, slack)

    # -- rows of every programme -----------------------------------------------------------

    def _balance_stages(self) -> None:
        """through[t+1] = through[t] + sum of m_v (S[t+1,v] - S[t,v]) over what may change."""
        model = self.model
        floor = model.problem.resident_bytes + sum(model.bytes[value] for value in model.inputs)
        self.through = [self.sum_of([(self.one, floor / self.unit)])]
        for stage, values in enumerate(self.touched):
            terms: list[Term] = [(self.through[stage], 1.0)]
            for value in values:
                old, new = self.stays(stage, value), self.stays(stage + 1, value)
                if old != new:
                    terms += [(new, self.size(value)), (old, -self.size(value))]
            self.through.append(self.sum_of(terms))

    def _fit_first_run(self, stage: int) -> None:
        """through[t+1] + what goes after op t + workspace - what it takes over <= budget.

        What goes is m_v (1 - S[t+1,v]) for every v that op t reads or writes.
        """
        model = self.model
        touches = {*model.reads[stage], *model.writes[stage]}
        if stage == 0:
            touches |= set(model.inputs)
        saved = self.taken_over(stage, stage)
        terms: list[Term] = [(self.through[stage + 1], 1.0)]
        for value in sorted(touches):
            size = self.size(value) - saved.get(value, 0.0)
            terms += [(self.one, size), (self.stays(stage + 1, value), -size)]
        self.mip.row(terms, -FREE, SCALE - model.workspace[stage] / self.unit)

    def taken_over(self, stage: int, op: int) -> dict[int, float]:
        """Bytes that the op takes over of each value that it reads, where that value goes.

        A value is part of one pair at most, earlier pairs first. In an ordered stage only pairs
        count that no earlier one can stand in the way of, else the best pair of each read: too
        few and too many bytes where pairs share a value, and exact where none do.
        """
        model = self.model
        out: dict[int, float] = {}
        met: set[int] = set()
        for read, write in model.inplace[op]:
            if op != stage and model.is_output[write]:
                continue
            size = min(self.size(read), self.size(write))
            if stage not in self.ordered:
                out[read] = max(out.get(read, 0.0), size)
            elif not met & {read, write}:
                out[read] = size
            met |= {read, write}
        return out

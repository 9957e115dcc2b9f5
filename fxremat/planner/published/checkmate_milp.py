"""The programme of Checkmate: which ops run again in which stage, and what it costs in bytes.

Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization"
(arXiv 1910.02653), section 4: stage ``t`` runs some earlier ops again, in base order, and then op
``t`` for the first time. Columns, by the paper's names:

* R: ``run[t][k]``, op ``k`` runs in stage ``t``;
* S: ``stay[t][v]``, value ``v`` is there at the start of stage ``t``. Where nothing that touches
  ``v`` can run in a stage, the next stage has the same column;
* FREE: ``free[t][v, k]``, value ``v`` goes right after op ``k``: continuous, and bounded by rows
  that say how much of ``v`` is left, which are tighter than the paper's;
* U: bytes while an op runs; ``bytes_at_start[t]`` are the bytes at the start of a stage.

R is per op and S per value, so that an op may write several values. Given an integral R, the least
S and the largest FREE are integral too. S is declared integral all the same, which makes HiGHS many
times as fast.

Repeats could also run in another order than the base order, and then hold fewer bytes. So a stage
that is not in ``ordered`` has no FREE and no U, but only rows that hold for every order. With no
ordered stage the programme is a relaxation of all schedules, and its bound holds for the time of
each of them. With all stages ordered it is Checkmate's.

Bytes are in units of a thousandth of the budget, times in thousandths of the base time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from fxremat.planner.indexed_problem import INPUT, IndexedProblem
from fxremat.planner.local.stage_schedule import ExtraRun, StageSchedule
from fxremat.planner.milp.highs import FREE, SCALE, Milp, Term, present
from fxremat.planner.published.known_schedule import pairs_apart

Allowed = Sequence[Sequence[int]]
"""For each stage the ops that may run again in it, in base order."""


class CheckmateMilp:
    """The columns and rows for one problem, one budget and one choice of allowed repeats.

    The order of repeats counts in the stages ``ordered``.
    """

    def __init__(
        self, model: IndexedProblem, budget: int, allowed: Allowed, ordered: Collection[int]
    ) -> None:
        self.model, self.allowed, self.ordered, self.milp = model, allowed, ordered, Milp()
        self.byte_unit = max(1, budget) / SCALE
        self.time_unit = max(1e-9, model.problem.base_time_us) / SCALE
        self.zero = self.milp.real(high=0.0)
        self.one = self.milp.real(low=1.0)
        self.free: list[dict[tuple[int, int], int]] = [{} for _ in range(model.n)]
        self.touched = [self._touched(stage) for stage in range(model.n)]
        self.run = self._runs()
        self.stay = self._stays()
        self.bytes_at_start = self._balanced_stages()
        for stage in range(model.n):
            self._fit_first_run(stage)
        for stage in range(model.n):
            if stage in ordered:
                self._add_frees(stage)
                self._track_order(stage)
                self._fit_in_order(stage)
            else:
                self._provide_reads(stage)
                self._fit_in_any_order(stage)

    # -- columns ---------------------------------------------------------------------------

    def _touched(self, stage: int) -> list[int]:
        """Values that an op of the stage may read or write; in the first stage also the inputs."""
        model = self.model
        values = dict.fromkeys(model.inputs if stage == 0 else ())
        for op in (*self.allowed[stage], stage):
            values |= dict.fromkeys(model.reads[op])
            values |= dict.fromkeys(model.writes[op])
        return list(values)

    def _runs(self) -> list[dict[int, int]]:
        """R[t,k] for the allowed k < t; R[t,t] = 1."""
        costs = [time / self.time_unit for time in self.model.time]
        self.milp.cost[self.one] = sum(self.model.time) / self.time_unit
        return [
            {op: self.milp.binary(costs[op]) for op in reruns} | {stage: self.one}
            for stage, reruns in enumerate(self.allowed)
        ]

    def _stays(self) -> list[dict[int, int]]:
        """S[t,v]: nothing, everything, the column of the stage before, or one of its own."""
        model = self.model
        stay: list[dict[int, int]] = [{} for _ in range(model.n + 1)]
        last = self._last_uses()
        reruns = {op for ops in self.allowed for op in ops}
        touched = [set(values) for values in self.touched]
        for value, writer in enumerate(model.writer):
            begin = 0 if writer == INPUT else writer + 1
            pinned = model.n if model.is_output[value] else -1
            if writer not in reruns:
                pinned = max(pinned, model.last_reads[value], 0 if writer == INPUT else -1)
            for stage in range(begin, max(pinned, last[value]) + 1):
                if stage <= pinned:
                    column = self.one
                elif stage == begin or value in touched[stage - 1]:
                    column = self.milp.binary()
                else:
                    column = stay[stage - 1][value]
                stay[stage][value] = column
        return stay

    def _last_uses(self) -> list[int]:
        """The last stage in which an op may read each value."""
        out = list(self.model.last_reads)
        for stage, reruns in enumerate(self.allowed):
            for op in reruns:
                for value in self.model.reads[op]:
                    out[value] = max(out[value], stage)
        return out

    def stays(self, stage: int, value: int) -> int:
        """S[t,v], also where it can only be 0."""
        return self.stay[stage].get(value, self.zero)

    def size(self, value: int) -> float:
        """m_v: bytes of the value in units of the programme."""
        return self.model.bytes[value] / self.byte_unit

    def available(self, stage: int, value: int) -> list[Term]:
        """S[t,v] + R[t,w] for the writer w: how much of the value the stage has."""
        run = self.run[stage].get(self.model.writer[value])
        return present(self.stays(stage, value), run)

    def sum_of(self, terms: list[Term]) -> int:
        """A column of bytes, at most the budget, that is the sum of the terms."""
        column = self.milp.real(high=SCALE)
        self.milp.row([*terms, (column, -1.0)], 0.0, 0.0)
        return column

    def at_most(self, left: Iterable[Term], right: Iterable[Term], slack: float = 0.0) -> None:
        """left <= right + slack; no row where all columns are fixed, as then it holds."""
        terms = [*left, *((column, -factor) for column, factor in right)]
        if any(column > self.one for column, _ in terms):
            self.milp.row(terms, -FREE, slack)

    # -- rows of every programme -----------------------------------------------------------

    def _balanced_stages(self) -> list[int]:
        """bytes_at_start[t+1] - bytes_at_start[t] = sum of m_v (S[t+1,v] - S[t,v])

        over the values that stage t may change.
        """
        model = self.model
        floor = model.problem.resident_bytes + model.size_of(model.inputs)
        found = [self.sum_of([(self.one, floor / self.byte_unit)])]
        for stage, values in enumerate(self.touched):
            terms: list[Term] = [(found[stage], 1.0)]
            for value in values:
                old, new = self.stays(stage, value), self.stays(stage + 1, value)
                if old != new:
                    terms += [(new, self.size(value)), (old, -self.size(value))]
            found.append(self.sum_of(terms))
        return found

    def _fit_first_run(self, stage: int) -> None:
        """bytes_at_start[t+1] + what goes after op t + workspace - what it takes over <= budget.

        What goes is m_v (1 - S[t+1,v]) for every v that op t reads or writes.
        """
        model = self.model
        touches = {*model.reads[stage], *model.writes[stage]}
        if stage == 0:
            touches |= set(model.inputs)
        saved = self.taken_over(stage, stage)
        terms: list[Term] = [(self.bytes_at_start[stage + 1], 1.0)]
        for value in sorted(touches):
            size = self.size(value) - saved.get(value, 0.0)
            terms += [(self.one, size), (self.stays(stage + 1, value), -size)]
        self.milp.row(terms, -FREE, SCALE - model.workspace[stage] / self.byte_unit)

    def taken_over(self, stage: int, op: int) -> dict[int, float]:
        """Of each value that the op reads, the bytes that it takes over if the value is freed.

        A value can be in one pair only, and earlier pairs come first. In an ordered stage a pair
        counts if no pair before shares a value with it: too few bytes, if anything. In other stages
        the best pair of each read counts: too many, if anything. Both are exact where no pairs
        share a value.
        """
        model, out = self.model, dict[int, float]()
        ordered = stage in self.ordered
        for read, write in pairs_apart(model, op, op == stage) if ordered else model.inplace[op]:
            if op == stage or not self.model.is_output[write]:
                size = min(self.size(read), self.size(write))
                out[read] = max(out.get(read, 0.0), size)
        return out

    # -- rows of stages whose order counts -------------------------------------------------

    def _users(self, stage: int, value: int) -> list[int]:
        """The ops that may read the value in the stage, in order."""
        return [op for op in self.run[stage] if value in self.model.reads[op]]

    def _add_frees(self, stage: int) -> None:
        """FREE[t,v,k] <= R[t,k], for repeats k that write or read v, unless op t reads it too."""
        model = self.model
        kept_on = {*model.reads[stage], *model.writes[stage]}
        for op in self.allowed[stage]:
            for value in (*model.reads[op], *model.writes[op]):
                if value not in kept_on and not model.is_output[value]:
                    column = self.milp.real()
                    self.free[stage][value, op] = column
                    self.at_most([(column, 1.0)], [(self.run[stage][op], 1.0)])

    def _track_order(self, stage: int) -> None:
        """R[t,k] + sum of FREE[t,v,i] over i before k <= S[t,v] + R[t,w], for users k of v.

        After the last user the same holds of S[t+1,v]; the paper's bounds on FREE follow. No
        stage that runs w has v before, as its readers come later: S[t,v] + R[t,w] <= 1.
        """
        for value in self.touched[stage]:
            if self.model.is_output[value]:
                continue
            available, writer = self.available(stage, value), self.model.writer[value]
            gone: list[Term] = []
            if writer in self.allowed[stage]:
                self.at_most(available, [], 1.0)
            for op in sorted({*self._users(stage, value), *{writer} & {*self.run[stage]}}):
                if op != writer:
                    self.at_most([(self.run[stage][op], 1.0), *gone], available)
                gone += present(self.free[stage].get((value, op)))
            self.at_most([(self.stays(stage + 1, value), 1.0), *gone], available)

    def _fit_in_order(self, stage: int) -> None:
        """U[t,k] = U after the repeat before k + R[t,k] (writes + workspace) - taken over <= budget

        for the repeats k, in base order.
        After k its workspace goes, and m_v FREE[t,v,k] of what it reads and writes, less what it
        took over from v: these bytes went before. A pair counts wherever its read goes, so what
        is taken over is a part of FREE.
        """
        model = self.model
        before: list[Term] = [(self.bytes_at_start[stage], 1.0)]
        for op in self.allowed[stage]:
            ran = self.run[stage][op]
            # Outputs are there already, so that a repeat does not write them.
            written = sum(self.size(v) for v in model.writes[op] if not model.is_output[v])
            own = written + model.workspace[op] / self.byte_unit
            saved = self.taken_over(stage, op)
            gone, shared = list[Term](), list[Term]()
            for value in (*model.reads[op], *model.writes[op]):
                column, taken = self.free[stage].get((value, op)), saved.get(value, 0.0)
                gone += present(column, factor=taken - self.size(value))
                shared += present(column, factor=-taken)
            used = self.sum_of([*before, (ran, own), *shared])
            before = [(used, 1.0), (ran, -model.workspace[op] / self.byte_unit), *gone]

    # -- rows of other stages --------------------------------------------------------------

    def _provide_reads(self, stage: int) -> None:
        """R[t,k] <= S[t,v] + R[t,w] for reads v of k; S[t+1,v] <= S[t,v] + R[t,w]."""
        for value in self.touched[stage]:
            if not self.model.is_output[value]:
                available = self.available(stage, value)
                for op in self._users(stage, value):
                    self.at_most([(self.run[stage][op], 1.0)], available)
                self.at_most([(self.stays(stage + 1, value), 1.0)], available)

    def _fit_in_any_order(self, stage: int) -> None:
        """Other values held + R[t,k] (reads + writes + workspace - taken over) <= budget."""
        if not self.allowed[stage]:
            return
        model = self.model
        held = self._add_held_throughout(stage)
        changes: list[Term] = []
        for value, column in held.items():
            size = self.size(value)
            changes += [(self.stay[stage][value], -size), (column, size)]
        others = self.sum_of([(self.bytes_at_start[stage], 1.0), *changes])
        for op in self.allowed[stage]:
            terms: list[Term] = [(others, 1.0)]
            saved = self.taken_over(stage, op).values()
            own = model.workspace[op] / self.byte_unit - sum(saved)
            for value in (*model.reads[op], *model.writes[op]):
                if not model.is_output[value]:
                    own += self.size(value)
                    terms += present(held.get(value), factor=-self.size(value))
            self.at_most([*terms, (self.run[stage][op], own)], [], SCALE)

    def _add_held_throughout(self, stage: int) -> dict[int, int]:
        """held_throughout[t,v] >= S[t,v] + S[t+1,v] - 1 - R[t,w]

        with 1 for S[t+1,v] if op t reads v.
        A copy is held throughout the stage if it is there at its start, must be there at its
        end, and is not written again. Values that nothing in the stage touches need no column.
        """
        model, one, held = self.model, self.one, dict[int, int]()
        for value in self.touched[stage]:
            if value not in self.stay[stage] or model.is_output[value]:
                continue
            needed = one if value in model.reads[stage] else self.stays(stage + 1, value)
            run = self.run[stage].get(model.writer[value])
            terms = [(self.stay[stage][value], 1.0), (needed, 1.0), (one, -1.0)]
            terms += present(run, factor=-1.0)
            held[value] = self.milp.real()
            self.at_most(terms, [(held[value], 1.0)])
        return held

    # -- a known schedule ------------------------------------------------------------------

    def start_values(self, runs: Collection[ExtraRun]) -> list[float] | None:
        """R and S of a schedule, infinite for what HiGHS is to find: `FREE`, U and others.

        None where the programme does not allow the schedule.
        """
        if any(op not in self.run[stage] for op, stage in runs):
            return None
        state, values = StageSchedule(self.model, runs), [math.inf] * len(self.milp.cost)
        for stage, row in enumerate(self.run):
            for op, column in row.items():
                values[column] = float(op == stage or op in state.extra[stage])
        for stage, row in enumerate(self.stay):
            for value, column in row.items():
                values[column] = float(column == self.one or state.live_in(value, stage))
        return values

"""Which variants to take: a MILP over choices, what is held when, and what runs again.

The relaxation over program points (`fxremat.planner.milp.relaxation`), with operator choice as in
MONeT (Shah et al., "Memory Optimization for Deep Networks", arXiv 2010.14501, section 4.3): which
variant an op takes, what is kept and what runs again are chosen together.

    z[a]       variant a is taken; of those that exclude each other at most one

    minimise   sum(adds[a] z[a]) + sum(time[q] rerun[q, j])

Its rows have conditions here: 1, z[a] or 1 - z[a], as `fxremat.planner.variants.all_variants` says.
The MILP only chooses: the figures of a plan come from the problem that is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from fxremat.core.constants import MEASURABLE
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.milp.highs import SCALE, Milp, Solution, Term, present
from fxremat.planner.milp.relaxation import ALWAYS, Affine, Relaxation
from fxremat.planner.variants.all_variants import AllVariants, Condition


class ChoiceMilp(Relaxation):
    """The MILP of a budget and some program points, which are stages of ``combined``.

    Without a budget it looks for the least peak.
    """

    def __init__(self, combined: AllVariants, points: Iterable[int], budget: int | None) -> None:
        problem, milp = combined.problem, Milp(may_restart=False)
        self.combined = combined
        self.per_us = SCALE / max(problem.base_time_us, 1e-9)
        self.per_us *= 1.0 if budget is not None else constants.GAP
        self.peak = milp.real(1.0, high=inf) if budget is None else None
        added = combined.added_us
        self.taken = {a: milp.binary(added[a] * self.per_us) for a in combined.usable}
        for group in combined.excluding:
            milp.row([(self.taken[index], 1.0) for index in group], high=1.0)
        index = {name: value for value, name in enumerate(combined.model.value_names)}
        self.outputs = {
            index[name]: when for name, when in combined.output_conditions.items() if name in index
        }
        self.reads = [
            [(index[name], when) for name, when in reads if name in index]
            for reads in combined.reads
        ]
        whole = sum(problem.bytes_of.values())
        super().__init__(combined.model, whole if budget is None else budget, [*points], milp)

    # -- columns ---------------------------------------------------------------------------

    def _certain(self, stage: int) -> set[int]:
        return set()  # it depends on the choice

    def _cost(self, op: int) -> float:
        return self.model.time[op] * self.per_us

    def _are_neighbours(self, j: int) -> bool:
        """Whether only ops of variants run for the first time before the next point."""
        between = range(self.points[j] + 1, self.points[j + 1])
        return all(self.combined.variant_of[stage] is not None for stage in between)

    # -- rows ------------------------------------------------------------------------------

    def _terms(self, condition: Condition, factor: float = 1.0) -> list[Term]:
        return [(self.taken[index], number * factor) for index, number in condition.factors]

    def _affine(self, condition: Condition) -> Affine:
        return float(condition.constant), self._terms(condition)

    def _bytes_fit(self, j: int) -> None:
        stage, combined, per_byte = self.points[j], self.combined, self.per_byte
        name, workspace = combined.ops[stage].name, self.model.workspace[stage]
        fixed, terms = self._outputs(stage)
        for value, column in self.held[j].items():
            terms += present(column, factor=self.model.bytes[value] * per_byte)
        run = combined.run_condition(stage)
        terms += self._terms(run, workspace * per_byte)
        for index, column in self.taken.items():
            changes = combined.problem.variants[index].changes
            terms += [(column, c.workspace_bytes * per_byte) for c in changes if c.op == name]
        self._fit(terms, fixed + workspace * run.constant)
        self.overwritten.append({})
        self._what_stays_is_held(j)

    def _outputs(self, stage: int) -> Affine:
        """Bytes that are there for good once ``stage`` has run, and those by the variants taken."""
        model, terms = self.model, list[Term]()
        fixed = float(model.problem.resident_bytes)
        for value, condition in self.outputs.items():
            if model.writer[value] <= stage:
                fixed += model.bytes[value] * condition.constant
                terms += self._terms(condition, model.bytes[value] * self.per_byte)
        return fixed, terms

    def _fit(self, terms: list[Term], fixed: float) -> None:
        """terms + fixed <= the budget, or the peak."""
        if self.peak is None:
            super()._fit(terms, fixed)
        else:
            self.milp.row([*terms, (self.peak, -1.0)], high=-fixed * self.per_byte)

    def _what_stays_is_held(self, j: int) -> None:
        """held[v, j] >= condition: what the point's op touches, and what cannot be computed again.

        What the op may write over is held only if it is there afterwards: it has no bytes of its
        own where this is its last read, or where it is computed again for those that follow.
        """
        model, stage = self.model, self.points[j]
        over = {
            read
            for read, _ in model.inplace[stage]
            if model.last_reads[read] <= stage or self._may_go(read)
        }
        run = self.combined.run_condition(stage)
        needed = [(value, run) for value in model.writes[stage]]
        needed += [pair for pair in self.reads[stage] if pair[0] not in over]
        later = self._reads_between(stage, model.n)
        needed += [(value, when) for value, when in later if not self._may_go(value)]
        for value, condition in needed:
            if value in self.held[j]:
                self._demand(present(self.held[j][value]), self._affine(condition))

    def _reads_between(self, after: int, stop: int) -> list[tuple[int, Condition]]:
        """Reads by first runs of the stages between, of what was written up to ``after``; once."""
        model = self.model
        found = dict.fromkeys(
            (value, condition)
            for stage in range(after + 1, stop)
            for value, condition in self.reads[stage]
            if model.writer[value] <= after and not model.is_output[value]
        )
        always = {value for value, condition in found if condition.always}
        return [(v, when) for v, when in found if when.always or v not in always]

    def _demands(self, j: int) -> Iterator[tuple[int, Affine]]:
        last = j + 1 == len(self.points)
        stop = self.model.n if last else self.points[j + 1] + 1
        for value, condition in self._reads_between(self.points[j], stop):
            yield value, self._affine(condition)

    def _reads_of_run(self, op: int) -> Iterator[tuple[int, Affine]]:
        """An op of a variant runs again only where that is taken."""
        is_form = self.combined.variant_of[op] is not None
        for value, condition in self.reads[op]:
            yield value, ALWAYS if is_form else self._affine(condition)

    def _read_in_window(self, j: int) -> set[int]:
        return {value for value, demand in self._demands(j) if demand == ALWAYS}

    def _once_for_all_windows(self, j: int) -> None:
        """Not here: it would raise the bound, which proves nothing."""

    # -- solve -----------------------------------------------------------------------------

    def solve(self, deadline: Deadline, near_us: float = 0.0) -> Solution:
        """A good choice; where there are many columns, near the linear relaxation."""
        nodes = 1  # what comes after the root mostly raises the bound, which proves nothing here
        gap, absolute = (MEASURABLE, 0.0) if self.peak is not None else (0.0, constants.GAP * SCALE)
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
        names = self.model.value_names
        return {stage: {names[v] for v in held} for stage, held in self.held_in(solution)}

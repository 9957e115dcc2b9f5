"""A problem with all of its variants side by side: what the MILP that chooses is built from.

All ops, those of the problem and those of every variant, stand in one order. A read or a run that
depends on the variants taken has a *condition*, a sum over the choices z[a], which is 1 if variant
a is taken. For an op of variant a it is z[a]; for an op that a makes superfluous it is 1 - z[a].
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property

from fxremat.core.problem import InvalidProblem, Op, Problem
from fxremat.core.variants import exclude, take
from fxremat.planner.indexed_problem import IndexedProblem


@dataclass(frozen=True)
class Condition:
    """constant + sum(factor * z[variant]): it holds if that is 1 or more."""

    constant: int
    factors: tuple[tuple[int, int], ...] = ()

    @property
    def always(self) -> bool:
        """Whatever is taken."""
        return self.constant == 1 and not self.factors


class AllVariants:
    """All ops in one order: those of a variant stand where they do if it is taken alone.

    ``variant_of`` has the variant of each op, None for ops of the problem. ``usable`` are the
    variants that can be taken by themselves, by their place in the problem. ``superseded`` are the
    ops that are not needed once each of these is taken.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.usable = problem, list[int]()
        self.superseded = dict[int, frozenset[str]]()
        base = {op.name: index for index, op in enumerate(problem.ops)}
        over = defaultdict[str, list[tuple[str, str]]](list)
        for change in (change for one in problem.variants for change in one.changes):
            over[change.op].extend(change.inplace)
        placed: list[tuple[float, int, int, Op, int | None]] = [
            (float(index), -1, 0, replace(op, inplace=(*op.inplace, *over[op.name])), None)
            for index, op in enumerate(problem.ops)
        ]
        for index, one in enumerate(problem.variants):
            try:
                left = take(problem, [one.name])
            except InvalidProblem:
                continue
            self.usable.append(index)
            self.superseded[index] = frozenset(base.keys() - left.op_of.keys())
            mine = {op.name for op in one.ops}
            last = -1.0
            for number, op in enumerate(left.ops):
                if op.name in mine:
                    placed.append((last + 0.5, index, number, op, index))
                else:
                    last = float(base[op.name])
        placed.sort(key=lambda entry: entry[:3])
        self.ops = tuple(entry[3] for entry in placed)
        self.variant_of = tuple(entry[4] for entry in placed)

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """The place of each op in the order."""
        return {op.name: stage for stage, op in enumerate(self.ops)}

    @cached_property
    def reads(self) -> list[list[tuple[str, Condition]]]:
        """What the first run of each stage reads, and the condition for it."""
        reads = [
            [(name, self._read_condition(stage, name)) for name in op.reads]
            for stage, op in enumerate(self.ops)
        ]
        for index in self.usable:
            for change in self.problem.variants[index].changes:
                added = ((name, Condition(0, ((index, 1),))) for name in change.adds)
                reads[self.stage_of[change.op]].extend(added)
        return reads

    @cached_property
    def model(self) -> IndexedProblem:
        """Ops and values by index, as if every op read all that it may and all were taken."""
        ops = tuple(
            replace(op, reads=tuple(name for name, _ in reads))
            for op, reads in zip(self.ops, self.reads, strict=True)
        )
        outputs = tuple(self.output_conditions)
        return IndexedProblem(replace(self.problem, ops=ops, outputs=outputs, variants=()))

    def run_condition(self, stage: int) -> Condition:
        """The condition for an op to run at all."""
        own = self.variant_of[stage]
        if own is not None:
            return Condition(0, ((own, 1),))
        superseding = self._superseding.get(self.ops[stage].name, ())
        return Condition(1, tuple((index, -1) for index in superseding))

    @cached_property
    def _superseding(self) -> dict[str, list[int]]:
        """The variants that make each op superfluous."""
        found = defaultdict[str, list[int]](list)
        for index in self.usable:
            for name in self.superseded[index]:
                found[name].append(index)
        return found

    @cached_property
    def _dropping(self) -> dict[tuple[str, str], list[int]]:
        """The variants that drop each read, by op and value."""
        found = defaultdict[tuple[str, str], list[int]](list)
        for index in self.usable:
            for change in self.problem.variants[index].changes:
                for value in dict.fromkeys(change.drops):
                    found[change.op, value].append(index)
        return found

    def _read_condition(self, stage: int, value: str) -> Condition:
        condition = self.run_condition(stage)
        if self.variant_of[stage] is not None:
            return condition
        known = {index for index, _ in condition.factors}
        dropping = {*self._dropping.get((self.ops[stage].name, value), ())} - known
        factors = *condition.factors, *((index, -1) for index in sorted(dropping))
        return Condition(condition.constant, factors)

    @cached_property
    def output_conditions(self) -> dict[str, Condition]:
        """The condition for each output that there may be, old and new."""
        found = {name: dict[int, int]() for name in self.problem.outputs}
        out = dict[str, Condition]()
        for index in self.usable:
            for old, new in self.problem.variants[index].outputs:
                found[old][index] = -1
                out[new] = Condition(0, ((index, 1),))
        for name, factors in found.items():
            out[name] = Condition(1, tuple(factors.items()))
        return out

    @cached_property
    def added_us(self) -> dict[int, float]:
        """Microseconds that taking each variant adds to store-all; negative where it saves time."""
        by_name = self.problem.op_of
        out = {}
        for index in self.usable:
            one = self.problem.variants[index]
            new = sum(op.time_us for op in one.ops) + sum(c.time_us for c in one.changes)
            out[index] = new - sum(by_name[name].time_us for name in self.superseded[index])
        return out

    @cached_property
    def excluding(self) -> list[tuple[int, ...]]:
        """Sets of variants of which at most one can be taken: pairs, and whole cliques."""
        groups = defaultdict[object, list[int]](list)
        for index in self.usable:
            one = self.problem.variants[index]
            for old, _ in one.outputs:
                groups["output", old].append(index)
            for change in one.changes:
                for old in change.drops:
                    groups[change.op, old].append(index)
        return sorted({tuple(group) for group in groups.values() if len(group) > 1})

    def compatible(self, indices: list[int]) -> list[int]:
        """Those of ``indices`` that can be taken with all the earlier ones."""
        variants, out = self.problem.variants, list[int]()
        for index in indices:
            if not any(exclude(variants[index], variants[other]) for other in out):
                out.append(index)
        return out

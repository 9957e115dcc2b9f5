"""Solving problems with variants: choose variants, then plan what is left with any solver.

The MILP of `fxremat.planner.variants.choice_milp` chooses. What is left is planned, its highest
stages become program points of the MILP, and so on, as for a problem without variants. The best of
these choices is improved by one variant more or less at a time, if that is asked for. Of all
choices tried, with the one that takes no variant, the best goes to the named solver.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from fxremat.core.constants import OUT_OF_REACH, ROUNDS
from fxremat.core.plan import Plan
from fxremat.core.problem import InvalidProblem, Op, Problem
from fxremat.core.timeline import replay
from fxremat.core.variants import run_once, take
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.local import greedy
from fxremat.planner.local.stage_schedule import ExtraRun, StageSchedule
from fxremat.planner.milp.moments import apart
from fxremat.planner.milp.relaxation import extra_runs_for
from fxremat.planner.moves import offload
from fxremat.planner.plans import rank
from fxremat.planner.solvers import SolverOptions
from fxremat.planner.variants.all_variants import AllVariants
from fxremat.planner.variants.choice_milp import ChoiceMilp

Solve = Callable[[Problem], Plan]
Names = tuple[str, ...]


@dataclass(frozen=True)
class TriedChoice:
    """A choice of variants, the problem that is left, and a quick plan of it.

    It may be ``adapted`` from that of another choice.
    """

    names: Names
    problem: Problem
    plan: Plan
    adapted: bool


def solve(
    problem: Problem,
    budget_bytes: int | None,
    options: SolverOptions,
    solver: Solve,
    *,
    is_quick: bool,
) -> Plan:
    """The best plan over all choices tried. Quick plans rank them, ``solver`` plans the best.

    If it ``is_quick`` itself, its plan of a choice is known where none was adapted.
    The plan's steps are those of `take(problem, plan.variants)`, and so is what it proves.
    """
    search = _VariantSearch(problem, budget_bytes, options)
    found = sorted(search.tried(), key=lambda one: rank(one.plan, budget_bytes))
    near = _best_few(found, budget_bytes)
    if search.lowest is not None and search.lowest not in near:
        near.append(search.lowest)
    open_ones = [one for one in near if one.adapted or not is_quick]
    plans = [replace(solver(one.problem), variants=one.names) for one in open_ones]
    plans += [replace(one.plan, variants=one.names) for one in near]
    best_plan = min(plans, key=lambda plan: rank(plan, budget_bytes))
    return replace(best_plan, budget_bytes=budget_bytes, seconds=search.deadline.seconds())


def _best_few(found: Sequence[TriedChoice], budget_bytes: int | None) -> list[TriedChoice]:
    """The best choice, and a few others that a better solver may well find to be the best."""
    best = found[0]
    alike = [
        one
        for one in found[: constants.MOST_SOLVED]
        if rank(one.plan, budget_bytes)[0] == rank(best.plan, budget_bytes)[0]
        and one.plan.time_us <= best.plan.time_us * (2 - constants.LESS)
    ]
    limit = 0 if budget_bytes is None else budget_bytes * (2 - constants.LESS)
    a_little_over = [
        one
        for one in sorted(found, key=lambda one: (one.plan.peak_bytes, one.plan.time_us))
        if one not in alike
        and one.plan.peak_bytes <= limit
        and one.plan.time_us < best.plan.time_us
    ]
    return alike + a_little_over[: constants.MOST_SOLVED]


class _VariantSearch:
    def __init__(self, problem: Problem, budget: int | None, options: SolverOptions) -> None:
        self.problem, self.budget, self.options = problem, budget, options
        self.deadline = Deadline(options.time_limit_s)
        self.combined, self.tried_choices = AllVariants(problem), dict[Names, TriedChoice]()
        self.lowest: TriedChoice | None = None
        """Where nothing fits: the newest choice, mostly that of the MILP with the most points.

        A quick plan may miss by far what is the least of a long problem.
        """

    def tried(self) -> list[TriedChoice]:
        """All choices tried; the one that takes no variant is among them."""
        self._try(())
        if self.budget is None:
            self._try(self._fastest())
            return list(self.tried_choices.values())
        alone = self.tried_choices[()]
        if alone.plan.time_us > self.problem.base_time_us or self._over(alone):
            self._try_chosen(self.combined, self.budget)
            once = AllVariants(run_once(self.problem))  # variants first, then what has to run again
            if not self._try_chosen(once, self.budget):
                self._try_chosen(once, None)
        if self._over(self._leader()):
            self._try_chosen(self.combined, None)
            self.lowest = list(self.tried_choices.values())[-1]
        self._try(self._fastest())
        # Far from the budget, one variant more or less will not bring the best choice under it.
        lowest = self._leader().plan.peak_bytes
        if self.options.improved and lowest <= OUT_OF_REACH * (self.budget or inf):
            self._improve()
        return list(self.tried_choices.values())

    def _improve(self) -> None:
        """Take one variant more or less of the best choice, for as long as that makes it better.

        The MILP sees some program points of what may run again, and plans of its choices differ by
        more than it tells apart. Variants go first whose ops run where the plan is highest. Of
        equal variants, as those of equal layers are, two tell for all of them.
        """
        left, ops = 1.0, max(1, len(self.problem.ops))
        best, before = self._leader(), None
        while best is not before:
            before = best
            in_vain = Counter[tuple[object, ...]]()
            for index in self._highest_first(best):
                settled = self.problem.base_time_us * (1 + 2 * constants.GAP)
                done = not self._over(best) and best.plan.time_us <= settled
                if done or left <= 0 or not self.deadline.running():
                    return
                names = self._toggled(best.names, index)
                kind = self._kind(index, best.names)
                if names in self.tried_choices or in_vain[kind] >= 2:
                    continue
                left -= ops / constants.TRIED_OPS
                self._try(names, best.plan)
                if self._leader() is best:
                    in_vain[kind] += 1
                else:
                    best = self._leader()
                    in_vain.clear()

    def _kind(self, index: int, taken: Names) -> tuple[object, ...]:
        """Equal for variants that cost the same and give the same, both taken or both not."""
        variant, sizes = self.problem.variants[index], self.problem.bytes_of
        ops = tuple(
            (round(op.time_us, 3), op.workspace_bytes, tuple(sizes[name] for name in op.writes))
            for op in variant.ops
        )
        changes = tuple(
            (round(c.time_us, 3), c.workspace_bytes, len(c.drops), len(c.adds))
            for c in variant.changes
        )
        return ops, changes, variant.name in taken

    def _leader(self) -> TriedChoice:
        return min(self.tried_choices.values(), key=lambda one: rank(one.plan, self.budget))

    def _toggled(self, names: Names, index: int) -> Names:
        """The choice with one variant less, or with one more and without what that excludes."""
        taken = [i for i in self.combined.usable if self.problem.variants[i].name in names]
        return self._names([i for i in taken if i != index] if index in taken else [index, *taken])

    def _highest_first(self, one: TriedChoice) -> list[int]:
        """The variants by what is live where their ops run, or those that they do without."""
        steps = one.plan.steps
        live = dict[object, int]()
        for step, size in zip(steps, replay(one.problem, steps).live_bytes, strict=True):
            live[step] = max(size, live.get(step, 0))

        def height(index: int) -> int:
            variant = self.problem.variants[index]
            ops = (
                *self.combined.superseded[index],
                *(op.name for op in variant.ops),
                *(c.op for c in variant.changes),
            )
            return max((live.get(op, 0) for op in ops), default=0)

        return sorted(self.combined.usable, key=height, reverse=True)

    def _try_chosen(self, combined: AllVariants, budget: int | None) -> bool:
        """Try the MILP's choices, with more program points each time; whether there was a choice.

        The first points are those of the ops that hold most by themselves, whatever is kept around
        them. Then come those of the variants chosen, the highest of the plan that came of the
        choice and, under a budget, the highest of the MILP's own schedule. As long as what is left
        of its choices does not fit, the MILP gets less, and more again once it does. It ends when
        more points have led to nothing better.
        """
        points = self._highest() | self._largest(self.tried_choices[()])
        target, best, in_vain, found = budget, self._best(), 0, False
        for number in range(ROUNDS):
            choice = ChoiceMilp(combined, sorted(points), target)
            too_large = number > 1 and len(choice.milp.cost) > 3 * constants.MANY_COLUMNS // 2
            if too_large or not self.deadline.running():
                break
            solution = choice.solve(self.deadline)
            if solution.values is None:
                break
            found, tried, before = True, self._try(choice.names(solution)), target
            in_vain = 0 if self._best() < best else in_vain + 1
            best = self._best()
            enough = in_vain >= (2 if budget is None else 1)
            if enough and (budget is None or not self._over(self._leader())):
                break
            new = set[int]()
            if tried is not None:
                new |= self._peak(tried) | self._largest(tried)
            if tried is not None and budget is not None:
                new |= self._worst(tried, choice.held_at(solution))
            if number and budget is not None and target is not None:
                less, more = target * constants.LESS, min(budget, target / constants.LESS)
                target = int(less if self._over(tried) else more)
            if target == before and new <= points:
                break
            points |= new
        return found

    def _best(self) -> tuple[float, float]:
        return rank(self._leader().plan, self.budget)

    def _over(self, one: TriedChoice | None) -> bool:
        """Whether what is left of a choice does not fit, or nothing is."""
        return self.budget is not None and (one is None or one.plan.peak_bytes > self.budget)

    def _try(self, names: Names, near: Plan | None = None) -> TriedChoice | None:
        """The choice, planned once; None where it leaves no problem."""
        if names not in self.tried_choices:
            try:
                left = take(self.problem, names)
            except InvalidProblem:
                return None
            plan = self._quick(left, near)
            self.tried_choices[names] = TriedChoice(names, left, plan, near is not None)
        return self.tried_choices[names]

    def _quick(self, left: Problem, near: Plan | None) -> Plan:
        """A plan found with less work; ``near`` is that of an almost equal choice."""
        if left.copies is not None:
            return offload.quick(left, self.budget, self.options)
        if near is not None and self.budget is not None:
            return greedy.adapt(near, left, self.budget, self.options)
        return greedy.quick(left, self.budget, self.options)

    def _fastest(self) -> Names:
        """What saves time in any case."""
        added = self.combined.added_us
        return self._names(sorted((i for i, us in added.items() if us < 0), key=added.__getitem__))

    def _names(self, indices: list[int]) -> Names:
        """The choice of those that can be taken with all the earlier ones."""
        taken = self.combined.compatible(indices)
        return tuple(self.problem.variants[index].name for index in sorted(taken))

    def _highest(self) -> set[int]:
        """The highest stage without variants."""
        left = IndexedProblem(self.tried_choices[()].problem)
        highest = StageSchedule(left).peak.argmax() if left.n else 0
        return self._stages(left.problem.ops[highest:][:1])

    def _largest(self, tried: TriedChoice) -> set[int]:
        """The stages whose ops hold most by what they read, write and need meanwhile.

        Under a budget, of those that are over it by themselves.
        """
        left = tried.problem
        sizes, room = left.bytes_of, (self.budget or 0) - left.resident_bytes

        def own(op: Op) -> int:
            return op.workspace_bytes + sum(sizes[name] for name in {*op.reads, *op.writes})

        largest = heapq.nlargest(constants.POINTS // 4, left.ops, key=own)
        return self._stages(op for op in largest if own(op) > room)

    def _peak(self, tried: TriedChoice) -> set[int]:
        """Where the plan of a choice is highest, of the stages that are over the budget.

        Of an op that runs again there, the stages before and after.
        """
        if not self._over(tried):
            return set()
        left, steps = tried.problem, tried.plan.steps
        live = replay(left, steps).live_bytes
        first = sorted({step: i for i, step in reversed([*enumerate(steps)])}.values())
        highest = sorted(range(len(live)), key=lambda i: -live[i])
        over = itertools.takewhile(lambda i: live[i] > (self.budget or 0), highest)
        found = set[int]()
        for place in apart(over, len(live)):
            found.update(first[bisect_right(first, place) - 1 :][:1])
            found.update(first[bisect_left(first, place) :][:1])
        return self._stages(left.op_of[step] for i in found if isinstance(step := steps[i], str))

    def _worst(self, tried: TriedChoice, held: dict[int, set[str]]) -> set[int]:
        """The highest stages of the schedule that holds this, away from each other."""
        model = IndexedProblem(tried.problem)
        state = StageSchedule(model, runs_that_hold(model, self.combined, held))
        highest = [int(stage) for stage in (-state.peak).argsort(kind="stable") if stage < model.n]
        over = (stage for stage in highest if state.peak[stage] > (self.budget or 0))
        found = apart(itertools.chain(highest[:1], over), model.n)
        return self._stages(map(tried.problem.ops.__getitem__, found))

    def _stages(self, ops: Iterable[Op]) -> set[int]:
        """Their places; an op of a variant that is not needed with that alone has none."""
        places = self.combined.stage_of
        return {places[op.name] for op in ops if op.name in places}


def runs_that_hold(
    left: IndexedProblem, combined: AllVariants, held: Mapping[int, set[str]]
) -> list[ExtraRun]:
    """Of what is left of a choice: the runs of the schedule that holds this over each stage."""
    index = {name: value for value, name in enumerate(left.value_names)}
    place = {op.name: stage for stage, op in enumerate(left.problem.ops)}
    outlives = {
        place[combined.ops[stage].name]: {index[name] for name in its if name in index}
        for stage, its in held.items()
        if combined.ops[stage].name in place
    }
    return extra_runs_for(left, outlives)

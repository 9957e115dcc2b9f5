"""What to try for one graph: plans under a number of bytes, or plans of least peak.

Both are generators: they propose a candidate, are sent what it takes by a dry run, and propose the
next. The planner's peak and the real one differ, where the aim is in reserved bytes by
fragmentation too. So the planner's target moves by as much as the real peak missed the aim, by more
where it hardly followed the last move, and is halved in where that has been tried before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from fxremat.compile.constants import CLOSE_ENOUGH
from fxremat.compile.draft import Draft
from fxremat.compile.search.candidates import Candidate, Corrections, Evaluation
from fxremat.compile.search.planning import LOCAL_SEARCH, Planning
from fxremat.core.constants import MEASURABLE, OUT_OF_REACH, ROUNDS
from fxremat.core.plan import Plan
from fxremat.core.problem import Op, Problem
from fxremat.core.schedule import Step
from fxremat.core.timeline import replay

Proposals = Generator[Candidate, Evaluation, None]


def followed(
    proposals: Proposals, evaluate: Callable[[Candidate], Evaluation]
) -> Iterator[Evaluation]:
    """All that is proposed, evaluated one after the other."""
    with suppress(StopIteration):
        candidate = next(proposals)
        while True:
            evaluation = evaluate(candidate)
            yield evaluation
            candidate = proposals.send(evaluation)


@dataclass(frozen=True)
class UnderAim:
    """Plans of a graph whose real peak is to be under ``aim`` bytes, the cheapest that are found.

    The first is tried with its order held near the peak alone. Where that takes too much, the plan
    is made anew with the problem corrected, a few times. Where that does not help, orders are held
    everywhere from there on; what is found so is tried once more near the peak alone.
    """

    draft: Draft
    aim: int
    planning: Planning

    def proposals(self) -> Proposals:
        """Candidates, until there is nothing left to gain."""
        draft, aim, planning = self.draft, self.aim, self.planning
        if not planning.may_fit(draft.problem, aim):
            return
        plan = planning.solve(draft.problem, aim)
        if plan.peak_bytes > aim:
            return
        loose = yield Candidate.near_peak(draft, plan, aim)
        if loose.dry_run is None:  # nothing shows what Inductor's own order takes
            yield Candidate.planned(draft, plan)
            return
        problem = loose.corrections().apply_to(draft.problem)
        loose = _corrected(problem, loose)
        disorder = max(0, loose.allocated - loose.plan.peak_bytes)
        near = min(plan.peak_bytes, (1 - CLOSE_ENOUGH) * aim) <= loose.plan.peak_bytes <= aim
        kept = loose.plan if near else None
        fits, tried = (loose if loose.peak_bytes <= aim else None), {plan.steps}
        if fits is not None:
            first = kept or planning.solve(problem, aim)
            if not _is_seen(plan, first):
                yield from self._closer([fits], problem)
                return
            if first.steps not in tried:
                tried.add(first.steps)
                loose = yield Candidate.near_peak(draft, first, aim)
        loose, corrected = yield from self._anew(loose, tried)
        if loose.peak_bytes <= aim:
            yield from self._closer([loose], corrected)
            return
        first = kept or planning.solve(problem, aim)
        if fits is not None and not _is_seen(plan, first, tries=2):
            return
        held = yield Candidate.planned(draft, first)
        if loose.plan.steps == held.plan.steps:
            disorder = max(disorder, loose.peak_bytes - held.peak_bytes)
        history = [held]
        yield from self._closer(history, problem, fits)
        best = fastest_under(aim, history)
        if best is not None and best.peak_bytes + disorder // 2 <= aim:
            yield Candidate.near_peak(draft, best.plan, self._for_plans(best))

    def _anew(
        self, seen: Evaluation, tried: set[tuple[Step, ...]]
    ) -> Generator[Candidate, Evaluation, tuple[Evaluation, Problem]]:
        """Plans for the problem as dry runs correct it; the last of them, and the problem then."""
        corrections = seen.corrections_above(self._for_plans(seen))
        for _ in range(ROUNDS):
            if seen.peak_bytes <= self.aim:
                break
            target = self._for_plans(seen)
            plan = self.planning.solve(corrections.apply_to(self.draft.problem), target)
            if plan.peak_bytes > target or plan.steps in tried:
                break
            tried.add(plan.steps)
            seen = yield Candidate.near_peak(self.draft, plan, target)
            more = seen.corrections_above(self._for_plans(seen))
            corrections = Corrections.of_all((corrections, more))
        return seen, corrections.apply_to(self.draft.problem)

    def _for_plans(self, seen: Evaluation) -> int:
        """What plans may allocate, if they leave as much unused as what was seen."""
        return max(0, self.aim - seen.fragmentation_bytes)

    def _closer(
        self, history: list[Evaluation], problem: Problem, fits: Evaluation | None = None
    ) -> Proposals:
        """Plans for other targets, in the order of the first; adds what is said of them.

        ``fits`` is known to be under the aim already. Each further try has to promise more.
        """
        everywhere = history[0].candidate.held is None
        tried, known = {history[0].plan.steps}, [fits] if fits is not None else []
        while (target := next_target(history, self.aim)) is not None:
            best = fastest_under(self.aim, (*known, *history))
            tries = len(history) + 2 * len(known)
            if best is not None and not self._may_gain(best, target, tries):
                return
            plan = self.planning.solve(problem, target)
            if plan.steps in tried or (best is not None and not _is_seen(best.plan, plan, tries)):
                return
            tried.add(plan.steps)
            near = Candidate.near_peak(self.draft, plan, self._for_plans(history[-1]))
            history.append((yield Candidate.planned(self.draft, plan) if everywhere else near))

    def _may_gain(self, best: Evaluation, target: int, tries: int) -> bool:
        """Whether more bytes may save time that is seen, by the local search for both."""
        problem, peak = best.candidate.draft.problem, best.plan.peak_bytes
        less, more = (self.planning.local_search(problem, each) for each in (peak, target))
        return _is_seen(less, more, tries)


def _corrected(problem: Problem, evaluated: Evaluation) -> Evaluation:
    """The same candidate; its plan's peak is that in the ``problem`` as it is known now."""
    plan = evaluated.plan
    plan = replace(plan, peak_bytes=replay(problem, plan.steps).peak_bytes)
    return replace(evaluated, candidate=replace(evaluated.candidate, plan=plan))


def _is_seen(plan: Plan, better: Plan, tries: int = 1) -> bool:
    """Whether the other plan is faster by more than measured times can tell.

    By so many times as much where there have been ``tries``: each takes as long as compiling does.
    """
    return better.time_us < plan.time_us * (1 - tries * MEASURABLE)


def next_target(history: Sequence[Evaluation], aim: int) -> int | None:
    """The peak to plan for next; None where there is nothing left to gain.

    Plans that allocate more may reserve as little: fragmentation is something to gain.
    """
    last = history[-1]
    miss = last.peak_bytes - aim
    left = last.fragmentation_bytes - miss
    if miss <= 0 and (left <= CLOSE_ENOUGH * aim or not last.plan.repeats()):
        return None
    target = max(0, last.plan.peak_bytes - _step_down(history, miss, aim))
    best = fastest_under(aim, history)
    over = [each.plan.peak_bytes for each in history if each.peak_bytes > aim]
    if best is None or not over:
        return target
    low, high = best.plan.peak_bytes, min(over)
    if low < target < high:
        return target
    return (low + high) // 2 if high - low > CLOSE_ENOUGH * aim else None


def _step_down(history: Sequence[Evaluation], miss: int, aim: int) -> int:
    """How much lower to plan, given by how much the real peak is too high.

    By as much, the first time; then along the line through the last two plans that took too
    much, since the real peak may fall by far less than the planned one.
    """
    last = history[-1]
    before = [each for each in history[:-1] if each.peak_bytes > aim]
    if miss <= 0 or not before:
        return miss
    planned = before[-1].plan.peak_bytes - last.plan.peak_bytes
    real = before[-1].peak_bytes - last.peak_bytes
    if planned <= 0:
        return miss
    most = ROUNDS * planned
    step = min(miss * planned // real, most) if real > 0 else most
    return max(miss, step, int(CLOSE_ENOUGH * aim) // 2)


def fastest_under(aim: int, evaluated: Iterable[Evaluation]) -> Evaluation | None:
    """The one under the aim of least planned time; of these, of the fewest steps that are held.

    Where no dry run was made, nothing shows what Inductor's own order takes: one that holds it.
    """

    def rank(one: Evaluation) -> tuple[float, bool, int]:
        held, order = one.candidate.held, one.candidate.order
        steps = len(one.plan.steps) if held is None else len(held)
        return one.plan.time_us, one.dry_run is None and order != "planned", steps

    return min((one for one in evaluated if one.peak_bytes <= aim), key=rank, default=None)


def least(draft: Draft, planning: Planning, others: Sequence[Evaluation]) -> Proposals:
    """Plans of low peak: by what was known before, and by what each of them has shown.

    Which they are does not depend on the budget, so that the least that an error names is found
    again when it is asked for. A plan is left out that could only be the lowest by falling short of
    its planned peak by more than those before it. Those before are also ``others``, plans of low
    peak for the graph in other variants.
    """
    problem, evaluated, tried = draft.problem, list(others), set[tuple[Step, ...]]()
    shown = (one.corrections_above(one.plan.peak_bytes) for one in evaluated)
    corrections = Corrections.of_all(shown)
    for _ in range(2):
        plan = planning.local_search(corrections.apply_to(problem), 0)
        if plan.steps in tried or not _may_be_lowest(plan, evaluated):
            break
        tried.add(plan.steps)
        evaluated.append((yield Candidate.planned(draft, plan)))
        more = evaluated[-1].corrections_above(plan.peak_bytes)
        corrections = Corrections.of_all((corrections, more))
    if not tried:
        return
    for plan in _low_plans(corrections.apply_to(problem), planning):
        if plan.steps not in tried and _may_be_lowest(plan, evaluated):
            evaluated.append((yield Candidate.planned(draft, plan)))
            break
    lowest = min(evaluated[len(others) :], key=lambda one: one.peak_bytes)
    if lowest.peak_bytes > (1 + MEASURABLE) * lowest.plan.peak_bytes:
        yield Candidate.near_peak(draft, lowest.plan, lowest.plan.peak_bytes)


def _may_be_lowest(plan: Plan, evaluated: Sequence[Evaluation]) -> bool:
    """Whether it takes less than all of them, if it falls short of its plan as they have done."""
    if not evaluated:
        return True
    corrections = corrections_of(evaluated)
    shortfall = max(_shortfall(one, corrections) for one in evaluated)
    return plan.peak_bytes - shortfall < min(one.peak_bytes for one in evaluated)


def _shortfall(one: Evaluation, corrections: Corrections) -> int:
    """By how much a candidate takes less than planned, with all corrections; 0 or more."""
    if one.candidate.order.startswith("torch"):
        return 0
    problem = corrections.apply_to(one.candidate.draft.problem)
    return max(0, replay(problem, one.plan.steps).peak_bytes - one.peak_bytes)


def corrections_of(evaluated: Sequence[Evaluation]) -> Corrections:
    """What they have shown together of library calls."""
    return Corrections.of_all(one.corrections() for one in evaluated)


def _low_plans(problem: Problem, planning: Planning) -> Iterator[Plan]:
    """The local search decides by the bytes it is given: other bytes lead it elsewhere."""
    lowest = planning.local_search(problem, 0)
    for times in (OUT_OF_REACH, OUT_OF_REACH**2):
        yield planning.local_search(problem, int(lowest.peak_bytes * times))
    if planning.request.policy.solver != LOCAL_SEARCH:
        yield planning.solve(problem, 0)


def plan_of_torch(draft: Draft) -> Plan:
    """The plan that the halves of a draft come to, by what their backward computes again.

    What it does not compute counts as saved. Torch may save something inside of an op of ours
    instead, from which the op's value follows.
    """
    problem, backward = draft.problem, draft.halves[1]
    computed = {node.name for node in backward.graph.nodes if node.op == "call_function"}
    line = replay(problem, steps_again(problem, computed))
    return Plan(line.steps, "torch", None, line.peak_bytes, line.time_us)


def steps_again(problem: Problem, again: set[str]) -> tuple[str, ...]:
    """The schedule whose backward computes the values ``again``, and holds all others for it.

    The forward runs in base order, then the backward; in front of each op of it, what it reads
    of these values is computed, once. What may not run again is held.
    """
    op_of_value = {name: problem.op_of[op] for name, op in problem.writer_of.items()}
    steps = [op.name for op in problem.ops if op.phase == "forward"]
    kept = {*problem.inputs, *problem.resident, *problem.outputs}

    def is_again(name: str) -> bool:
        op = op_of_value.get(name)
        return name in again and name not in kept and op is not None and op.repeatable

    done = {name for op in problem.ops if op.phase == "forward" for name in op.writes}
    done = kept | {name for name in done if not is_again(name)}

    def run(op: Op) -> None:
        for name in op.reads:
            if name not in done:
                run(op_of_value[name])
        steps.append(op.name)
        done.update(op.writes)

    for op in problem.ops:
        if op.phase == "backward":
            run(op)
    return tuple(steps)

"""The search over candidates: what is tried, in which order, and which one is taken.

    attempts   the graph in some variants, cheapest first; each proposes candidates
    evaluate   the halves of a candidate are made and counted in a dry run
    correct    what dry runs show goes into the problem of the next proposal
    choose     of what is under the aim, and torch's own partition, the one of least planned time

The first attempt that gets under the aim ends the search. Where none gets there, the lowest is what
the error names.

* Same question, same answer: candidates depend on the graph, the request, what dry runs of the same
  attempt have shown, and the times of ops, which are kept on disk once they are measured.
* The least that is named does not depend on the budget: it is the minimum over torch's partition
  and plans of least peak, which are looked for in the same way whatever the budget is. So it is
  found again, and obeyed, when it is asked for.
* A part of a step (its aim is a soft limit) is known exactly once it is counted, and other parts
  are chosen by that: the first candidate near its aim is taken.
* Buffers are donated where nothing else fits: then a backward can no longer run twice.
* All dry runs have one budget, `DRY_RUNS`; those for the least peak have their own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from fxremat.compile.constants import CLOSE_ENOUGH, DRY_RUNS
from fxremat.compile.draft import Draft
from fxremat.compile.pipeline import AS_TORCH, DONATE
from fxremat.compile.search.candidates import Candidate, Evaluation, Evaluator
from fxremat.compile.search.planning import Planning
from fxremat.compile.search.proposals import (
    Proposals,
    UnderAim,
    corrections_of,
    fastest_under,
    followed,
    least,
    plan_of_torch,
)
from fxremat.compile.search.variant_sets import GraphInVariants, VariantSet
from fxremat.core.constants import MEASURABLE, OUT_OF_REACH
from fxremat.core.json_data import to_data
from fxremat.core.problem import Problem
from fxremat.errors import VerificationFailed
from fxremat.planner.plans import claimed_plan

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attempt:
    """Candidates to try in turn; ``for_least`` where they are the same whatever the budget is."""

    proposals: Proposals
    for_least: bool


@dataclass(frozen=True)
class SearchResult:
    """What the search ended with. ``over`` says that it takes more than the budget.

    ``plain`` is the graph without variants, ``evaluated`` how many have been tried.
    """

    evaluation: Evaluation
    plain: Draft
    over: bool
    evaluated: int


def decision_of(found: SearchResult) -> dict[str, Any]:
    """What a search has ended with, as JSON data: `Search.taken` makes the same of it."""
    candidate = found.evaluation.candidate
    return {
        "variants": [one.name for one in candidate.draft.taken],
        "order": candidate.order,
        "held": None if candidate.held is None else sorted(candidate.held),
        "plan": to_data(candidate.plan),
    }


@dataclass
class Search:
    """One search over a graph in its variants, and what has been evaluated so far."""

    planning: Planning
    evaluator: Evaluator
    graphs: GraphInVariants
    under: list[Evaluation] = field(default_factory=list)
    """What plans for the aim take."""
    lowest: list[Evaluation] = field(default_factory=list)
    """What plans of least peak, and torch's partition, take."""

    def run(self) -> SearchResult:
        """The best candidate found."""
        request, plain = self.planning.request, self.graphs.plain
        aim, budget = request.budget.target, request.budget.own
        if aim is None or budget is None:
            plan = self.planning.solve(plain.problem, None)
            only = self.evaluator.evaluate(Candidate(plain, plan, "inductor"))
            return self._found(only, over=False)
        is_part = request.budget.soft_limit is not None
        enough = min(int(aim * (1 + MEASURABLE)), budget) if is_part else aim
        for attempt in self._attempts(aim):
            best = fastest_under(enough, self._follow(attempt, aim, enough if is_part else None))
            if best is not None:
                return self._found(self._or_torch(best, enough), over=False)
            if any(each.peak_bytes <= budget for each in self.lowest):
                break
        near = self.under if is_part else []
        best = min([*self.lowest, *near], key=lambda one: one.peak_bytes)
        if best.peak_bytes > budget:
            best = self._not_above_torch(best)
        return self._found(best, over=best.peak_bytes > budget)

    def taken(self, decision: Mapping[str, Any]) -> SearchResult:
        """What another search for the same has ended with (`decision_of`), made here and evaluated.

        Raises `VerificationFailed` where it does not go with this graph.
        """
        order, names = decision["order"], tuple(decision["variants"])
        budget = self.planning.request.budget.own
        candidate: Candidate | None
        if order in ("torch", "torch, donated"):
            candidate = self._torch(donated=order == "torch, donated")
        else:
            draft = self.graphs.draft(names)
            plan = claimed_plan(draft.problem, decision["plan"], budget)
            held = None if decision["held"] is None else frozenset(decision["held"])
            candidate = None if plan is None else Candidate(draft, plan, order, held)
        if candidate is None:
            raise VerificationFailed("the plan of another rank", "it is none for this graph")
        evaluated = self.evaluator.evaluate(candidate)
        return self._found(evaluated, over=budget is not None and evaluated.peak_bytes > budget)

    def _found(self, evaluation: Evaluation, *, over: bool) -> SearchResult:
        return SearchResult(evaluation, self.graphs.plain, over, len(self.evaluator.seen))

    def _follow(self, attempt: Attempt, aim: int, enough: int | None = None) -> list[Evaluation]:
        """The candidates of an attempt, evaluated as far as dry runs are left.

        The first that takes no more than ``enough`` is the last.
        """
        before = self.lowest if attempt.for_least else self.under
        left = DRY_RUNS - len(before)
        left = left if attempt.for_least else min(left, DRY_RUNS // 3)
        evaluated: list[Evaluation] = []
        for each in islice(followed(attempt.proposals, self.evaluator.evaluate), max(0, left)):
            evaluated.append(each)
            end = aim if attempt.for_least else enough
            if end is not None and each.peak_bytes <= end:
                break
        before += evaluated
        return evaluated

    def _or_torch(self, best: Evaluation, aim: int) -> Evaluation:
        """Torch's own partition, where that is faster and under the aim, too."""
        if best.plan.time_us <= self.graphs.plain.problem.base_time_us or best.dry_run is None:
            return best
        own = self._torch(donated=False)
        if own is None or own.plan.time_us >= best.plan.time_us:
            return best
        if own.plan.peak_bytes > OUT_OF_REACH * aim:
            return best
        evaluation = self.evaluator.evaluate(own)
        return evaluation if evaluation.peak_bytes <= aim else best

    def _not_above_torch(self, least: Evaluation) -> Evaluation:
        """Torch's own partition, where code takes so much more than plans say that it takes less.

        By its plan it was out of reach, so that it was not tried (`_torch_alone`).
        """
        own = self._torch(donated=True)
        if own is None or own.plan.peak_bytes >= least.peak_bytes:
            return least
        return min(least, self.evaluator.evaluate(own), key=lambda one: one.peak_bytes)

    def _torch(self, *, donated: bool) -> Candidate | None:
        """Torch's own partition; None where it does not do what the graph does.

        With ``donated`` buffers the backward writes over what was saved, as in a plain
        ``torch.compile``, and like there it can run only once.
        """
        plain = self.graphs.plain
        special = plain.problem.host or self.planning.request.inputs.accumulated
        if special or not self.planning.request.compiled:
            return None
        try:
            cut = self.graphs.runner.run("apply", AS_TORCH, plain)
        except Exception as error:  # not our work: where anything refuses, it is left out
            log.info("torch's own partition is no candidate: %s", error)
            return None
        plan = plan_of_torch(cut)
        if donated:
            cut = self.graphs.runner.run("apply", DONATE, cut)
        return Candidate(cut, plan, "torch, donated" if donated else "torch")

    def _attempts(self, aim: int) -> Iterator[Attempt]:
        """What to try, the best first.

        Where the variants that are chosen for the aim do not fit, after all, the graph as it is
        comes next if a plan for it does.
        """
        plain, planning = self.graphs.plain, self.planning
        if (taken := planning.request.policy.taken) is not None:
            yield self._under(self.graphs.draft(taken), aim)
        is_tried = planning.fits_as_it_is(plain.problem, aim)
        if is_tried:
            yield self._under(plain, aim)
        variants = self.graphs.offered
        chosen = None if variants is None else self._chosen(variants.problem, aim)
        if chosen is not None:
            yield self._under(chosen, aim)
        if not is_tried and planning.fits(plain.problem, aim):
            is_tried = True
            yield self._under(plain, aim)
        yield Attempt(self._torch_alone(), for_least=True)
        if variants is not None:
            yield from self._of_least_peak(variants, aim)
        if not is_tried:
            yield self._under(plain, aim)
        yield self._least(plain)

    def _of_least_peak(self, variants: VariantSet, aim: int) -> Iterator[Attempt]:
        """The variants of least peak, chosen before and after what dry runs have shown.

        Where these show about what was planned, there is nothing to choose anew. Exact ones are
        tried without the lossy ones too: more to choose from is never to end in more bytes.
        """
        first = self._chosen(variants.problem, 0)
        yield from self._under_and_least(first, aim)
        shown = [one for one in self.lowest if one.candidate.draft is first]
        planned = self.planning.local_search(variants.problem, 0).peak_bytes
        real = min((one.peak_bytes for one in shown), default=0)
        done = [first]
        if real > (1 + CLOSE_ENOUGH) * planned:
            problem = corrections_of(shown).apply_to(variants.problem)
            done.append(self._chosen(problem, 0))
            if done[1] is not first:
                yield from self._under_and_least(done[1], aim)
        exact = self.graphs.exact
        if exact is not None:
            last = self._chosen(exact.problem, 0)
            if not any(last is one for one in done):
                yield from self._under_and_least(last, aim)

    def _under_and_least(self, draft: Draft | None, aim: int) -> Iterator[Attempt]:
        """Plans under the aim, then those of least peak."""
        if draft is not None:
            yield self._under(draft, aim)
            yield self._least(draft)

    def _least(self, draft: Draft) -> Attempt:
        return Attempt(least(draft, self.planning, self.lowest), for_least=True)

    def _under(self, draft: Draft, aim: int) -> Attempt:
        return Attempt(UnderAim(draft, aim, self.planning).proposals(), for_least=False)

    def _torch_alone(self) -> Proposals:
        """Torch's own partition, unless by its plan it takes far more than others would."""
        candidate = self._torch(donated=True)
        if candidate is None:
            return
        lowest = self.planning.local_search(self.graphs.plain.problem, 0).peak_bytes
        if candidate.plan.peak_bytes <= OUT_OF_REACH * lowest:
            yield candidate

    def _chosen(self, problem: Problem, budget: int) -> Draft | None:
        """The graph with the variants that the planner takes for a budget; None where none fit.

        With a budget of 0, those of least peak. The choice is that of the local search; once it is
        made, the graph with these variants is planned with the solver that was asked for.
        """
        names = self.planning.variants(problem, budget)
        return self.graphs.draft(names) if names else None

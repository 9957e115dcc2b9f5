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
* Buffers are donated where nothing else fits: then a backward can no longer run twice.
* All dry runs have one budget, `DRY_RUNS`; those for the least peak have their own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fxremat.compile.constants import (
    CLOSE_ENOUGH,
    DRY_RUNS,
    OUT_OF_REACH,
)
from fxremat.compile.draft import Draft
from fxremat.compile.pipeline import AS_TORCH, DONATE, PLAN, Runner
from fxremat.compile.search.candidates import Candidate, Evaluation, Evaluator
from fxremat.compile.search.planning import Planning
from fxremat.compile.search.proposals import (
    Proposals,
    all_fits,
    corrections_of,
    fastest,
    least,
    may_fit,
    plan_of_torch,
    under,
)
from fxremat.compile.search.variant_sets import VariantSet, variant_set
from fxremat.core.plan import plan_to_json
from fxremat.core.problem import Problem
from fxremat.errors import VerificationFailed
from fxremat.passes.variants.table import rules_named
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
        "plan": plan_to_json(candidate.plan),
    }


@dataclass
class Search:
    """One search: which attempts there are, and what has been tried so far."""

    runner: Runner
    planning: Planning
    evaluator: Evaluator
    prepared: Draft
    drafts: dict[tuple[str, ...], Draft] = field(default_factory=dict)
    tried: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    lowest: list[Evaluation] = field(default_factory=list)
    """What plans of least peak, and torch's partition, take."""
    looked: list[VariantSet | None] = field(default_factory=list)

    def run(self) -> SearchResult:
        """The best candidate found."""
        request, plain = self.planning.request, self.draft(())
        aim, budget = request.budget.target, request.budget.own
        if aim is None or budget is None:
            plan = self.planning.solve(plain.estimate.problem, None)
            only = self.evaluator.evaluate(Candidate(plain, plan, "inductor"))
            return self._found(only, over=False)
        for attempt in self._attempts(aim):
            evaluated = self._follow(attempt, aim)
            best = fastest(each for each in evaluated if each.peak_bytes <= aim)
            if best is not None:
                return self._found(self._or_torch(best, aim), over=False)
            self.lowest += evaluated if attempt.for_least else []
            if any(each.peak_bytes <= budget for each in self.lowest):
                break
        best = min(self.lowest, key=lambda one: one.peak_bytes)
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
            draft = self.draft(names, self.offered() if names else None)
            plan = claimed_plan(draft.estimate.problem, decision["plan"], budget)
            held = None if decision["held"] is None else frozenset(decision["held"])
            candidate = None if plan is None else Candidate(draft, plan, order, held)
        if candidate is None:
            raise VerificationFailed("the plan of another rank", "it is none for this graph")
        evaluated = self.evaluator.evaluate(candidate)
        return self._found(evaluated, over=budget is not None and evaluated.peak_bytes > budget)

    def _found(self, evaluation: Evaluation, *, over: bool) -> SearchResult:
        return SearchResult(evaluation, self.draft(()), over, len(self.evaluator.seen))

    def _follow(self, attempt: Attempt, aim: int) -> list[Evaluation]:
        """The candidates of an attempt, evaluated as far as dry runs are left."""
        left = DRY_RUNS - self.tried[attempt.for_least]
        left = left if attempt.for_least else min(left, DRY_RUNS // 3)
        evaluated: list[Evaluation] = []
        candidate = next(attempt.proposals, None)
        while candidate is not None and len(evaluated) < left:
            evaluated.append(self.evaluator.evaluate(candidate))
            if attempt.for_least and evaluated[-1].peak_bytes <= aim:
                break
            try:
                candidate = attempt.proposals.send(evaluated[-1])
            except StopIteration:
                break
        self.tried[attempt.for_least] += len(evaluated)
        return evaluated

    def _or_torch(self, best: Evaluation, aim: int) -> Evaluation:
        """Torch's own partition, where that is faster and under the aim, too."""
        plain = self.draft(()).estimate.problem
        if best.plan.time_us <= plain.base_time_us or best.dry_run is None:
            return best
        own = self._torch(donated=False)
        if own is None or own.plan.time_us >= best.plan.time_us:
            return best
        if own.plan.peak_bytes > OUT_OF_REACH * aim:
            return best
        evaluation = self.evaluator.evaluate(own)
        return evaluation if evaluation.peak_bytes <= aim else best

    def _torch(self, *, donated: bool) -> Candidate | None:
        """Torch's own partition; None where it does not do what the graph does.

        With ``donated`` buffers the backward writes over what was saved, as in a plain
        ``torch.compile``, and like there it can run only once.
        """
        plain = self.draft(())
        special = plain.estimate.problem.host or self.planning.request.inputs.accumulated
        if special or not self.planning.request.compiled:
            return None
        try:
            cut = self.runner.run("apply", AS_TORCH, plain)
        except Exception as error:  # not our work: where anything refuses, it is left out
            log.info("torch's own partition is no candidate: %s", error)
            return None
        plan = plan_of_torch(cut)
        if donated:
            cut = self.runner.run("apply", DONATE, cut)
        return Candidate(cut, plan, "torch, donated" if donated else "torch")

    def _attempts(self, aim: int) -> Iterator[Attempt]:
        """What to try, the best first.

        Where the variants that are chosen for the aim do not fit, after all, the graph as it is
        comes next if a plan for it does.
        """
        plain = self.draft(())
        problem = plain.estimate.problem
        is_tried = self._is_free(problem, aim)
        if is_tried:
            yield self._under(plain, aim)
        variants = self.offered()
        if variants is not None:
            chosen = self._chosen(variants.problem, aim, variants)
            if chosen is not None:
                yield self._under(chosen, aim)
        if not is_tried and self._plan_fits(problem, aim):
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
        first = self._chosen(variants.problem, 0, variants)
        yield from self._under_and_least(first, aim)
        shown = [one for one in self.lowest if one.candidate.draft is first]
        planned = self.planning.local_search(variants.problem, 0).peak_bytes
        real = min((one.peak_bytes for one in shown), default=0)
        done = [first]
        if real > (1 + CLOSE_ENOUGH) * planned:
            problem = corrections_of(shown).apply_to(variants.problem)
            done.append(self._chosen(problem, 0, variants))
            if done[1] is not first:
                yield from self._under_and_least(done[1], aim)
        exact = self._exact()
        if exact is not None:
            last = self._chosen(exact.problem, 0, exact)
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
        return Attempt(under(draft, aim, self.planning), for_least=False)

    def _torch_alone(self) -> Proposals:
        """Torch's own partition, unless by its plan it takes far more than others would."""
        candidate = self._torch(donated=True)
        if candidate is None:
            return
        lowest = self.planning.local_search(self.draft(()).estimate.problem, 0).peak_bytes
        if candidate.plan.peak_bytes <= OUT_OF_REACH * lowest:
            yield candidate

    def draft(self, names: tuple[str, ...], variants: VariantSet | None = None) -> Draft:
        """The graph with these variants taken, and its problem."""
        if names not in self.drafts:
            sites = variants.asked(names) if variants is not None else ()
            asked = replace(self.prepared, sites=sites)
            self.drafts[names] = self.runner.run("estimate", PLAN, asked)
        return self.drafts[names]

    def _variants(self, *, allow_lossy: bool) -> VariantSet | None:
        """What the graph could take."""
        rules = rules_named(self.planning.request.policy.variants, allow_lossy=allow_lossy)
        with self.runner.times.stage("estimate"):
            return variant_set(self.prepared, rules, self.runner.costs)

    def offered(self) -> VariantSet | None:
        """What the graph could take, as the request allows; looked for once."""
        if not self.looked:
            self.looked.append(self._variants(allow_lossy=self.planning.request.policy.allow_lossy))
        return self.looked[0]

    def _exact(self) -> VariantSet | None:
        lossy = self.planning.request.policy.allow_lossy
        return self._variants(allow_lossy=False) if lossy else None

    def _chosen(self, problem: Problem, budget: int, variants: VariantSet) -> Draft | None:
        """The graph with the variants that the planner takes for a budget; None where none fit.

        With a budget of 0, those of least peak. The choice is that of the local search; once it is
        made, the graph with these variants is planned with the solver that was asked for.
        """
        names = self.planning.variants(problem, budget)
        return self.draft(names, variants) if names else None

    def _plan_fits(self, problem: Problem, aim: int) -> bool:
        planning = self.planning
        return may_fit(problem, aim, planning) and planning.solve(problem, aim).peak_bytes <= aim

    def _is_free(self, problem: Problem, aim: int) -> bool:
        """Whether nothing has to run again, and nothing to move but what lives on the host."""
        if problem.host:
            plan = self.planning.solve(problem, aim)
            return plan.peak_bytes <= aim and not plan.repeats() and not plan.moves
        return all_fits(problem, aim)

"""The search over candidates: what is tried, in which order, and which one is taken.

Attempts come one after the other, the cheapest first. Each proposes candidates for the graph in
some variants (`fxremat.compile.search.proposals`), and the judge says what they take. The
first attempt that gets under the aim ends the search; of its candidates and torch's own partition,
the one of least planned time is taken. Where none gets there, the lowest is what the error names.

* Same question, same answer: candidates depend on the graph, the request, what rehearsals of the
  same attempt have shown, and the times of ops, which are kept on disk once they are measured.
* The least that is named does not depend on the budget: it is the minimum over torch's partition
  and plans of least peak, which are looked for in the same way whatever the budget is. So it is
  found again, and obeyed, when it is asked for.
* Buffers are donated where nothing else fits: then a backward can no longer run twice.
* All rehearsals have one budget, `REHEARSALS`, of which a part is kept for the least peak.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fxremat.compile.draft import Draft
from fxremat.compile.pipeline import AS_TORCH, DONATE, PLAN, Runner
from fxremat.compile.search.candidates import Candidate, Judge, Judged
from fxremat.compile.search.planning import QUICKEST_SOLVER, Planning
from fxremat.compile.search.proposals import (
    Proposals,
    all_fits,
    fastest,
    learnt_of,
    least,
    may_fit,
    under,
)
from fxremat.compile.search.torch_plan import plan_of_torch
from fxremat.compile.search.tuning import (
    CHOICES,
    CHOSEN_ANEW,
    EXPECTED_WRONG,
    FAR_ABOVE,
    REHEARSALS,
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


Attempts = Generator[Attempt, list[Judged], None]


@dataclass(frozen=True)
class Found:
    """What the search ended with. ``over`` says that it takes more than the budget.

    ``plain`` is the graph without variants, ``judged_candidates`` how many have been tried.
    """

    judged: Judged
    plain: Draft
    over: bool
    judged_candidates: int


def decision_of(found: Found) -> dict[str, Any]:
    """What a search has ended with, as JSON data: `Search.taken` makes the same of it."""
    candidate = found.judged.candidate
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
    judge: Judge
    prepared: Draft
    drafts: dict[tuple[str, ...], Draft] = field(default_factory=dict)
    tried: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    lowest: list[Judged] = field(default_factory=list)
    """What plans of least peak, and torch's partition, take."""
    looked: list[VariantSet | None] = field(default_factory=list)

    def run(self) -> Found:
        """The best candidate found."""
        request, plain = self.planning.request, self.draft(())
        aim, budget = request.budget.target, request.budget.own
        if aim is None or budget is None:
            plan = self.planning.solve(plain.estimate.problem, None)
            return self._found(self.judge.judge(Candidate(plain, plan, "inductor")), over=False)
        attempts = self._attempts(aim)
        attempt = next(attempts)
        while True:
            judged = self._follow(attempt, aim)
            best = fastest(each for each in judged if each.peak_bytes <= aim)
            if best is not None:
                return self._found(self._or_torch(best, aim), over=False)
            self.lowest += judged if attempt.for_least else []
            if any(each.peak_bytes <= budget for each in self.lowest):
                break
            try:
                attempt = attempts.send(judged)
            except StopIteration:
                break
        best = min(self.lowest, key=lambda one: one.peak_bytes)
        return self._found(best, over=best.peak_bytes > budget)

    def taken(self, decision: Mapping[str, Any]) -> Found:
        """What another search for the same has ended with (`decision_of`), made here and judged.

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
        judged = self.judge.judge(candidate)
        return self._found(judged, over=budget is not None and judged.peak_bytes > budget)

    def quickest(self, budget_bytes: int) -> Candidate:
        """A plan of the quickest solver, with its order held everywhere; nothing is rehearsed.

        It is expected to be within the budget; where none is, it is the one expected to take least.
        Variants are chosen by what is allocated. Where what the allocator leaves unused then counts
        too much, the plan aims lower with the same variants, which takes a moment; only where that
        does not do are they chosen anew.
        """
        planning, found = self.planning, list[Candidate]()
        target = int((1 - EXPECTED_WRONG) * budget_bytes)
        for _ in range(CHOICES):
            drafts = self._quickest_drafts(target)
            first = [
                Candidate.planned(
                    one, planning.solve(one.estimate.problem, target, QUICKEST_SOLVER)
                )
                for one in drafts
            ]
            found += first
            for one in drafts:
                lower = planning.expected_under(
                    one.estimate.problem, budget_bytes, target, solver=QUICKEST_SOLVER
                )
                found.append(Candidate.planned(one, lower))
            within = [one for one in found if self.expected_bytes(one) <= budget_bytes]
            if within:
                return min(within, key=lambda one: one.plan.time_us)
            nearest = min(first, key=self.expected_bytes)
            if nearest.plan.peak_bytes > target:  # no plan gets there
                break
            target = min(target - 1, target * budget_bytes // self.expected_bytes(nearest))
        return min(found, key=self.expected_bytes)

    def _quickest_drafts(self, target: int) -> list[Draft]:
        """Without variants, and with those that are chosen for the target."""
        variants, drafts = self.offered(), [self.draft(())]
        if variants is not None:
            names = self.planning.solve(variants.problem, target, QUICKEST_SOLVER).variants
            drafts += [self.draft(names, variants)] if names else []
        return drafts

    def expected_bytes(self, candidate: Candidate) -> int:
        """The peak of a candidate in the bytes that the budget counts, beside what is held."""
        return self.planning.expected_bytes(candidate.draft.estimate.problem, candidate.plan)

    def _found(self, judged: Judged, *, over: bool) -> Found:
        return Found(judged, self.draft(()), over, len(self.judge.seen))

    def _follow(self, attempt: Attempt, aim: int) -> list[Judged]:
        """What the judge says of the candidates of an attempt, as far as rehearsals go."""
        most = REHEARSALS.least if attempt.for_least else REHEARSALS.under
        left = most - self.tried[attempt.for_least]
        left = left if attempt.for_least else min(left, REHEARSALS.one_attempt)
        judged: list[Judged] = []
        candidate = next(attempt.proposals, None)
        while candidate is not None and len(judged) < left:
            judged.append(self.judge.judge(candidate))
            if attempt.for_least and judged[-1].peak_bytes <= aim:
                break
            try:
                candidate = attempt.proposals.send(judged[-1])
            except StopIteration:
                break
        self.tried[attempt.for_least] += len(judged)
        return judged

    def _or_torch(self, best: Judged, aim: int) -> Judged:
        """Torch's own partition, where that is faster and under the aim, too."""
        plain = self.draft(()).estimate.problem
        if best.plan.time_us <= plain.base_time_us or best.rehearsal is None:
            return best
        own = self._torch(donated=False)
        if own is None or own.plan.time_us >= best.plan.time_us:
            return best
        if own.plan.peak_bytes > FAR_ABOVE * aim:
            return best
        judged = self.judge.judge(own)
        return judged if judged.peak_bytes <= aim else best

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
        except Exception as error:  # not our work: it is left out where it, or the judge, refuses
            log.info("torch's own partition is no candidate: %s", error)
            return None
        plan = plan_of_torch(cut)
        if donated:
            cut = self.runner.run("apply", DONATE, cut)
        return Candidate(cut, plan, "torch, donated" if donated else "torch")

    def _attempts(self, aim: int) -> Attempts:
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

    def _of_least_peak(self, variants: VariantSet, aim: int) -> Attempts:
        """The variants of least peak, chosen before and after what rehearsals taught.

        Where these show about what was planned, there is nothing to choose anew. Exact ones are
        tried without the lossy ones too: more to choose from is never to end in more bytes.
        """
        done: list[Draft] = []
        judged = yield from self._both(self._chosen(variants.problem, 0, variants), aim, done)
        planned = self.planning.quick(variants.problem, 0).peak_bytes
        real = min((one.peak_bytes for one in judged), default=0)
        if real > (1 + CHOSEN_ANEW) * planned:
            problem = learnt_of(judged).told(variants.problem)
            yield from self._both(self._chosen(problem, 0, variants), aim, done)
        exact = self._exact()
        if exact is not None:
            yield from self._both(self._chosen(exact.problem, 0, exact), aim, done)

    def _both(
        self, draft: Draft | None, aim: int, done: list[Draft]
    ) -> Generator[Attempt, list[Judged], list[Judged]]:
        """Under the aim, then of least peak; once for each graph."""
        if draft is None or any(draft is one for one in done):
            return []
        done.append(draft)
        yield self._under(draft, aim)
        return (yield self._least(draft))

    def _least(self, draft: Draft) -> Attempt:
        return Attempt(least(draft, self.planning, self.lowest), for_least=True)

    def _under(self, draft: Draft, aim: int) -> Attempt:
        return Attempt(under(draft, aim, self.planning), for_least=False)

    def _torch_alone(self) -> Proposals:
        """Torch's own partition, unless by its plan it takes far more than others would."""
        candidate = self._torch(donated=True)
        if candidate is None:
            return
        lowest = self.planning.quick(self.draft(()).estimate.problem, 0).peak_bytes
        if candidate.plan.peak_bytes <= FAR_ABOVE * lowest:
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

        With a budget of 0, those of least peak. The choice is that of a quick solver; once it is
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

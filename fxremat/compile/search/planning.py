"""Asking the planner: each question once, answers kept on disk, every plan checked."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from fxremat.compat.configuration import cache_directory, caches_disabled
from fxremat.compile.request import Request
from fxremat.compile.stage_times import StageTimes
from fxremat.core.check import check
from fxremat.core.constants import OUT_OF_REACH
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.timeline import store_all_peak
from fxremat.errors import SolverRefused, VerificationFailed
from fxremat.planner import ProblemRefused, SolverOptions
from fxremat.planner.plan_cache import PlanQuestion

log = logging.getLogger(__name__)

LOCAL_SEARCH, ONE_PASS = "greedy", "quick"
"""Their limits count work, never time: what they find does not depend on the machine's speed."""


@dataclass(frozen=True)
class Planning:
    """The planner, asked as the request says."""

    request: Request
    times: StageTimes
    answers: dict[PlanQuestion, Plan] = field(default_factory=dict)

    def local_search(self, problem: Problem, budget: int) -> Plan:
        """The plan of the local search, whichever solver is asked for."""
        return self.solve(problem, budget, LOCAL_SEARCH)

    def variants(self, problem: Problem, budget: int) -> tuple[str, ...]:
        """The variants to take for a budget, or for the least peak where it is 0; none: ().

        Those that one pass finds, if they fit by its plan; else, if it comes near, those of the
        whole local search.
        """
        if not budget:
            return self.local_search(problem, 0).variants
        for solver in (ONE_PASS, LOCAL_SEARCH):
            plan = self.solve(problem, budget, solver)
            if plan.peak_bytes <= budget:
                return plan.variants
            if plan.peak_bytes > OUT_OF_REACH * budget:
                break
        return ()

    def may_fit(self, problem: Problem, aim: int) -> bool:
        """Whether it is worth asking the planner for the aim: the local search comes near it."""
        return (
            store_all_peak(problem) <= aim
            or self.solve(problem, aim, ONE_PASS).peak_bytes <= aim
            or self.local_search(problem, 0).peak_bytes <= OUT_OF_REACH * aim
        )

    def fits(self, problem: Problem, aim: int) -> bool:
        """Whether a plan gets under the aim."""
        return self.may_fit(problem, aim) and self.solve(problem, aim).peak_bytes <= aim

    def fits_as_it_is(self, problem: Problem, aim: int) -> bool:
        """Whether nothing has to run again, and nothing to move but what lives on the host."""
        if not problem.host:
            return store_all_peak(problem) <= aim
        plan = self.solve(problem, aim)
        return plan.peak_bytes <= aim and not plan.repeats() and not plan.moves

    def solve(
        self,
        problem: Problem,
        budget: int | None,
        solver: str | None = None,
        *,
        improved: bool = True,
    ) -> Plan:
        """The plan of a solver, by default of the one asked for.

        A choice of variants is ``improved`` one by one.

        Raises `SolverRefused` where it cannot take the problem, and `VerificationFailed` where
        the plan is not what it claims to be. A plan that takes variants is not checked: its
        schedule belongs to the problem that is left, which is made anew from the graph.
        """
        policy = self.request.policy
        options = SolverOptions(time_limit_s=policy.solver_time_limit, improved=improved)
        question = PlanQuestion(problem, budget, solver or policy.solver, options)
        if question not in self.answers:
            self.answers[question] = self._answer(question)
        return self.answers[question]

    def _answer(self, question: PlanQuestion) -> Plan:
        """The plan of the planner, or that of a file, and checked."""
        with self.times.stage("plan"):
            try:
                if caches_disabled():
                    plan, known = question.solved(), False
                else:
                    plan, known = question.answer(cache_directory() / "plans")
            except ProblemRefused as refused:
                raise SolverRefused(question.solver, str(refused)) from refused
        if known:
            log.debug("plan from the cache: %s, %d bytes", plan.solver, plan.peak_bytes)
        if self.request.policy.verify and not question.problem.variants:
            with self.times.stage("verify"):
                _check(question.problem, plan)
        return plan


def _check(problem: Problem, plan: Plan) -> None:
    """Raise `VerificationFailed` where the plan is not what it claims to be."""
    verdict = check(problem, plan.steps)
    if not verdict.ok:
        raise VerificationFailed("plan", str(verdict.failures[0]))
    if verdict.peak_bytes != plan.peak_bytes:
        detail = f"{plan.solver} claims {plan.peak_bytes} bytes, the checker {verdict.peak_bytes}"
        raise VerificationFailed("peak", detail)

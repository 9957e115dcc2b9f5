"""Asking the planner: each question once, answers kept on disk, every plan checked."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from fxremat import planner
from fxremat.compat.configuration import cache_directory, caches_disabled
from fxremat.compile.constants import OUT_OF_REACH
from fxremat.compile.request import Request
from fxremat.compile.stage_times import StageTimes
from fxremat.core.check import check
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.errors import SolverRefused, VerificationFailed
from fxremat.planner.plan_cache import PlanCache

log = logging.getLogger(__name__)

LOCAL_SEARCH, ONE_PASS = "greedy", "quick"
"""Their limits count work, never time: what they find does not depend on the machine's speed."""


@dataclass(frozen=True)
class Planning:
    """The planner, asked as the request says."""

    request: Request
    times: StageTimes
    answers: dict[tuple[Problem, int | None, str], Plan] = field(default_factory=dict)

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

    def solve(self, problem: Problem, budget: int | None, solver: str | None = None) -> Plan:
        """The plan of a solver, by default of the one asked for.

        Raises `SolverRefused` where it cannot take the problem, and `VerificationFailed` where
        the plan is not what it claims to be. A plan that takes variants is not checked: its
        schedule belongs to the problem that is left, which is made anew from the graph.
        """
        asked = problem, budget, solver or self.request.policy.solver
        if asked not in self.answers:
            plan = self._ask(*asked)
            if self.request.policy.verify and not problem.variants:
                with self.times.stage("verify"):
                    _check(problem, plan)
            self.answers[asked] = plan
        return self.answers[asked]

    def _ask(self, problem: Problem, budget: int | None, solver: str) -> Plan:
        options = planner.SolverOptions(time_limit_s=self.request.policy.solver_time_limit)
        with self.times.stage("plan"):
            try:
                if caches_disabled():
                    return planner.solve(problem, budget, solver, options)
                cache = PlanCache(Path(cache_directory()) / "fxremat" / "plans")
                plan, known = cache.solve(problem, budget, solver, options)
            except planner.ProblemRefused as refused:
                raise SolverRefused(solver, str(refused)) from refused
        if known:
            log.debug("plan from the cache: %s, %d bytes", plan.solver, plan.peak_bytes)
        return plan


def _check(problem: Problem, plan: Plan) -> None:
    """Raise `VerificationFailed` where the plan is not what it claims to be."""
    verdict = check(problem, plan.steps)
    if not verdict.ok:
        raise VerificationFailed("plan", str(verdict.failures[0]))
    if verdict.peak_bytes != plan.peak_bytes:
        detail = f"{plan.solver} claims {plan.peak_bytes} bytes, the checker {verdict.peak_bytes}"
        raise VerificationFailed("peak", detail)

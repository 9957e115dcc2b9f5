"""Plans kept on disk, so that no question is answered twice.

A question is the problem without its name, the budget, the solver with its options, and the
version of highspy. An answer on disk is only a claim. Its steps are replayed, and if the figures
differ it is ignored and replaced by the next answer. A plan that a time limit or Ctrl-C cut short
is not kept.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

from fxremat.core.json_data import to_data
from fxremat.core.plan import Plan, claim_from_json
from fxremat.core.problem import Problem, problem_to_json
from fxremat.core.variants import take
from fxremat.disk_cache import Answers, Question
from fxremat.planner import solve
from fxremat.planner.deadline import Deadline
from fxremat.planner.plans import claimed_plan
from fxremat.planner.solvers import SolverOptions


@dataclass(frozen=True)
class PlanQuestion:
    """What the planner is asked."""

    problem: Problem
    budget_bytes: int | None
    solver: str
    options: SolverOptions

    def written(self) -> Question:
        """Everything that an answer depends on, as JSON data."""
        options = self.options
        return {
            "problem": digest(self.problem),
            "budget_bytes": self.budget_bytes,
            "solver": self.solver,
            "time_limit_s": options.time_limit_s,
            "improved": options.improved,
            "start": None if options.start is None else list(options.start),
            "highspy": _highspy_version(),
        }

    def answer(self, directory: Path) -> tuple[Plan, bool]:
        """The planner's answer, and whether it was read from the files of this directory."""
        answers, written = Answers(directory), self.written()
        known = self.claimed(answers.read(written))
        if known is not None:
            return known, True
        started = time.perf_counter()
        plan = self.solved()
        if _is_complete(plan, time.perf_counter() - started, self.options):
            answers.keep(written, to_data(plan))
        return plan, False

    def solved(self) -> Plan:
        """The planner's answer."""
        return solve(self.problem, self.budget_bytes, self.solver, self.options)

    def claimed(self, claims: Any) -> Plan | None:
        """The plan that an answer on disk stands for; None where it is none."""
        with suppress(ValueError, KeyError, TypeError):
            variants = claim_from_json(claims).variants
            plan = claimed_plan(take(self.problem, variants), claims, self.budget_bytes)
            if plan is not None and _agrees(plan, claims):
                return replace(plan, variants=variants)
        return None


@lru_cache(maxsize=8)
def digest(problem: Problem) -> str:
    """Equal for problems that differ in name only; remembered for the last few problems."""
    data = {**problem_to_json(problem), "name": ""}
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


_highspy_version = cache(partial(importlib.metadata.version, "highspy"))


def _is_complete(plan: Plan, seconds: float, options: SolverOptions) -> bool:
    """Whether the solver came to its own end; ``plan.seconds`` may be those of an earlier call."""
    limit = options.time_limit_s
    in_time = limit is None or max(plan.seconds, seconds) < limit
    return in_time and Deadline(None).running()


def _agrees(plan: Plan, claims: Mapping[str, Any]) -> bool:
    """Whether the replay gives the figures claimed, and they contradict no bound."""
    if (plan.peak_bytes, plan.time_us) != (claims["peak_bytes"], claims["time_us"]):
        return False
    fits = plan.budget_bytes is None or plan.peak_bytes <= plan.budget_bytes
    bound = plan.time_bound_us
    return (plan.peak_bound_bytes or 0) <= plan.peak_bytes and (
        not fits or bound is None or bound <= plan.time_us * (1 + 1e-9)
    )

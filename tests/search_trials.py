"""Searches on problems alone: an evaluator whose peaks are made up of the planned ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, cast

from torch import fx

from fxremat.compile.draft import Draft
from fxremat.compile.dry_run.dry_run import DryRun
from fxremat.compile.request import Policy, Request
from fxremat.compile.search.candidates import Candidate, Evaluation, Order
from fxremat.compile.search.planning import Planning
from fxremat.compile.search.proposals import Proposals, followed
from fxremat.compile.stage_times import StageTimes
from fxremat.core.problem import Problem
from fxremat.passes.memory_estimation import Estimate
from tests.chains import blocks

PROBLEM = blocks(4)
NEAR_PEAK: Final[Order] = "planned near the peak"
NOTHING = fx.GraphModule({}, fx.Graph())


def draft_of(problem: Problem) -> Draft:
    """A graph of which only the problem is known."""
    estimate = Estimate(problem, cast(Any, None), {}, {}, fused=True)
    return Draft(NOTHING, 0, estimate=estimate)


@cache
def planning(solver: str = "greedy") -> Planning:
    """The planner itself; it answers each question once."""
    return Planning(Request(policy=Policy(solver=solver)), StageTimes())


@dataclass
class Trial:
    """An evaluator whose peaks are made up of the planned ones, and what it was asked."""

    real: Callable[[int, str], int]
    scratch: dict[str, int] = field(default_factory=dict)
    asked: list[Candidate] = field(default_factory=list)
    seen: list[Evaluation] = field(default_factory=list)

    def evaluate(self, candidate: Candidate) -> Evaluation:
        """What the made-up compiler takes."""
        peak = self.real(candidate.plan.peak_bytes, candidate.order)
        self.asked.append(candidate)
        self.seen.append(
            Evaluation(candidate, candidate.draft, peak, DryRun(peak, (), (), self.scratch))
        )
        return self.seen[-1]

    def follow(self, proposals: Proposals) -> list[Evaluation]:
        """Evaluate all that is proposed."""
        return list(followed(proposals, self.evaluate))

    @property
    def orders(self) -> list[str]:
        """Who ordered the candidates."""
        return [one.order for one in self.asked]

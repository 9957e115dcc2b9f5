"""Searches on problems alone: a judge whose real peaks are made up, and what it was asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, cast

from torch import fx

from fxremat.compile.draft import Draft
from fxremat.compile.dry_run.dry_run import Rehearsal
from fxremat.compile.request import Policy, Request
from fxremat.compile.search.candidates import Candidate, Judged, Order
from fxremat.compile.search.planning import Planning
from fxremat.compile.search.proposals import Proposals
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
    """A judge whose real peaks are made up of the planned ones, and what it was asked."""

    real: Callable[[int, str], int]
    scratch: dict[str, int] = field(default_factory=dict)
    asked: list[Candidate] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)

    def judge(self, candidate: Candidate) -> Judged:
        """What the made-up compiler takes."""
        peak = self.real(candidate.plan.peak_bytes, candidate.order)
        self.asked.append(candidate)
        self.judged.append(
            Judged(candidate, candidate.draft, peak, Rehearsal(peak, (), (), self.scratch))
        )
        return self.judged[-1]

    def follow(self, proposals: Proposals) -> list[Judged]:
        """Judge all that is proposed."""
        candidate = next(proposals, None)
        while candidate is not None:
            try:
                candidate = proposals.send(self.judge(candidate))
            except StopIteration:
                break
        return self.judged

    @property
    def orders(self) -> list[str]:
        """Who ordered the candidates."""
        return [one.order for one in self.asked]

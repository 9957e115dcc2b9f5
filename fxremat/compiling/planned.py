"""One joint graph, planned: prepared, searched, judged, reported, and handed over."""

from __future__ import annotations

import logging
import time
from dataclasses import astuple
from typing import Any

from fxremat import compat
from fxremat.compiling import session
from fxremat.compiling.costs import cost_model
from fxremat.compiling.draft import Draft
from fxremat.compiling.pipeline import EXPLAIN, FINISH, PREPARE, Runner
from fxremat.compiling.ranks import graph_digest, shared_answer
from fxremat.compiling.reporting import large_output, refusal_of, report_of
from fxremat.compiling.request import Request
from fxremat.compiling.searching.candidates import Judge
from fxremat.compiling.searching.planning import Planning
from fxremat.compiling.searching.search import Found, Search, decision_of
from fxremat.compiling.session import Session
from fxremat.compiling.stage_times import StageTimes
from fxremat.cost.peak import uncollected
from fxremat.errors import output_advice
from fxremat.passes.halves import Halves
from fxremat.report.telling import tell_halves
from fxremat.version import build

log = logging.getLogger(__name__)


@uncollected()  # a graph that is compiled lives on: there is little to collect
def planned(draft: Draft, request: Request, current: Session) -> Halves:
    """The halves of the best candidate; its report goes to the session.

    Where only the plan is asked for, they are made ready to run uncompiled. Raises
    `InfeasibleBudget` where not even the candidate of least peak fits the budget, and
    `VerificationFailed` where the judge finds a mistake of ours.
    """
    times = StageTimes({"trace": time.perf_counter() - current.started})
    if request.budget_bytes is not None:
        compat.plan_for_sizes_seen(draft.module.graph)
    costs = cost_model(request, draft.module.graph, f"graph {current.graph}")
    runner = Runner(costs, times)
    prepared = runner.run("prepare", PREPARE, draft)
    judge = Judge(runner, draft.plan_only)
    found = _searched(Search(runner, Planning(request, times), judge, prepared))
    refusal = refusal_of(found, request)
    if refusal is None and not draft.plan_only:
        found.judged.hand_over()
        runner.run("kernels", FINISH, found.judged.draft)
    current.report = report_of(found, request, current.graph, times.seconds)
    if refusal is not None:
        raise refusal
    output = large_output(found)
    if output is not None and request.budget_bytes is not None:
        log.warning("fxremat: graph %d: %s", current.graph, output_advice(*output))
    if current.study is not None:
        current.study(found, runner)
    halves = found.judged.draft.halves
    if draft.plan_only:
        runner.run("apply", EXPLAIN, found.judged.draft)
    else:
        tell_halves(current.graph, halves)
    return halves


def _searched(search: Search) -> Found:
    """What this rank's search ends with, or that of a rank that has looked for the same."""
    request = search.planning.request
    if request.budget_bytes is None or not compat.is_a_rank():
        return search.run()
    own: list[Found] = []

    def decide() -> Any:
        own.append(search.run())
        return decision_of(own[0])

    graph = graph_digest(search.prepared.module)
    question = session.digest("plan", build(), graph, astuple(request))
    decision = shared_answer("plan", question, decide)
    return own[0] if own else search.taken(decision)

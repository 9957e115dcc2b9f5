"""One joint graph, planned: prepared, searched, judged, reported, and handed over."""

from __future__ import annotations

import logging
import time
from dataclasses import astuple
from typing import Any

from fxremat.compat.distributed.ranks import is_a_rank
from fxremat.compat.sizes import plan_for_sizes_seen
from fxremat.compile import session
from fxremat.compile.cost_model import cost_model
from fxremat.compile.draft import Draft
from fxremat.compile.pipeline import EXPLAIN, FINISH, PREPARE, Runner
from fxremat.compile.ranks import graph_digest, shared_answer
from fxremat.compile.report_builder import large_output, refusal_of, report_of
from fxremat.compile.request import Request
from fxremat.compile.search.candidates import Judge
from fxremat.compile.search.planning import Planning
from fxremat.compile.search.search import Found, Search, decision_of
from fxremat.compile.session import Session
from fxremat.compile.stage_times import StageTimes
from fxremat.errors import output_advice
from fxremat.memory.measured_peak import uncollected
from fxremat.passes.halves import Halves
from fxremat.report.log_lines import tell_halves
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
    if request.budget.limit is not None:
        plan_for_sizes_seen(draft.module.graph)
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
    if output is not None and request.budget.limit is not None:
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
    if request.budget.limit is None or not is_a_rank():
        return search.run()
    own: list[Found] = []

    def decide() -> Any:
        own.append(search.run())
        return decision_of(own[0])

    graph = graph_digest(search.prepared.module)
    question = session.digest("plan", build(), graph, astuple(request))
    decision = shared_answer("plan", question, decide)
    return own[0] if own else search.taken(decision)

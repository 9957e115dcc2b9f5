"""The least that any plan of a graph took is remembered with that plan.

Which plans of low peak are found depends on the times of ops. Some are measured only when their
turn comes, so that a search that is asked for the least of an earlier one may miss it by a little.
Where a search ends above its budget, what took less before is made again; so the number that an
error names is obeyed when it is asked for, no later error names a larger one, and none names more
than what the graph has been trained in.
"""

from __future__ import annotations

import logging
from dataclasses import astuple
from math import inf
from typing import Any

from fxremat.compat.configuration import cache_directory, caches_disabled
from fxremat.compat.joint_graph import REPEATABLE
from fxremat.compile import session
from fxremat.compile.ranks import graph_digest
from fxremat.compile.search.search import Search, SearchResult, decision_of
from fxremat.core.constants import MEASURABLE
from fxremat.disk_cache import Answers, Question
from fxremat.errors import VerificationFailed

log = logging.getLogger(__name__)


def search_with_known_least(search: Search) -> SearchResult:
    """What a search ends with; where that is over the budget, no more than what was found before.

    Within `MEASURABLE` of the least there is nothing to choose from, and below that, where a search
    for the least has ended, nothing to find: the plan of before is made again without a search. The
    request must have a budget.
    """
    budget = search.planning.request.budget
    if budget.own is None or budget.soft_limit is not None:
        return search.run()
    question = _question(search)
    least, decision, ended = _read(question)
    in_vain = ended and budget.own < (1 - MEASURABLE) * least
    if in_vain or least <= budget.own <= (1 + MEASURABLE) * least:
        before = _made_again(search, decision)
        if before is not None and (in_vain or not before.over):
            return before
    found = search.run()
    if found.over and least < found.evaluation.peak_bytes:
        before = _made_again(search, decision)
        if before is not None and before.evaluation.peak_bytes < found.evaluation.peak_bytes:
            found = before
    if found.over or found.evaluation.peak_bytes < least:
        known = {"peak_bytes": found.evaluation.peak_bytes, "decision": decision_of(found)}
        _keep(question, {**known, "search_ended": found.over})
    return found


_UNCACHED: dict[str, Any] = {}
"""Where nothing is to be kept on disk: what is known in this process, by the question."""


def _keep(question: Question, lowest: Any) -> None:
    if caches_disabled():
        _UNCACHED[question["least of"]] = lowest
    else:
        Answers(cache_directory() / "least").keep(question, lowest)


def _read(question: Question) -> tuple[float, Any, bool]:
    """The least that is known, how it was made, and whether a search has ended there.

    What is wrong with a file costs a look.
    """
    kept = Answers(cache_directory() / "least")
    uncached = caches_disabled()
    known: Any = _UNCACHED.get(question["least of"]) if uncached else kept.read(question)
    try:
        return int(known["peak_bytes"]), known["decision"], known["search_ended"] is True
    except (LookupError, TypeError, ValueError):
        return inf, None, False


def _made_again(search: Search, decision: Any) -> SearchResult | None:
    """None for a decision that does not go with this graph."""
    try:
        return search.taken(decision)
    except (VerificationFailed, LookupError, TypeError, ValueError) as failed:
        log.info("the least of before is not made again: %r", failed)
        return None


def _question(search: Search) -> Question:
    """The graph, whose kernels may run again, and what is asked for but the bytes it may take."""
    request = search.planning.request
    asked = request.with_budget(limit=0, held=0, coming=0, optimizer_step=0)
    module = search.graphs.prepared.module
    again = [node.name for node in module.graph.nodes if node.meta.get(REPEATABLE)]
    return {"least of": session.digest("least", graph_digest(module), again, astuple(asked))}

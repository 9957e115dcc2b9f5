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
from pathlib import Path

from fxremat.compat.configuration import cache_directory, caches_disabled
from fxremat.compile import session
from fxremat.compile.ranks import graph_digest
from fxremat.compile.search.search import Search, SearchResult, decision_of
from fxremat.disk_cache import Answers, Question
from fxremat.errors import VerificationFailed

log = logging.getLogger(__name__)


def search_with_known_least(search: Search) -> SearchResult:
    """What a search ends with; where that is over the budget, no more than what was found before.

    The request must have a budget.
    """
    found = search.run()
    budget = search.planning.request.budget
    if budget.soft_limit is not None or caches_disabled():
        return found
    answers, question = Answers(Path(cache_directory()) / "fxremat" / "least"), _question(search)
    known = answers.read(question)
    try:  # what is wrong with a file, or does not go with this graph, costs a look and no run
        if known is not None and known["peak_bytes"] < found.evaluation.peak_bytes:
            if not found.over:
                return found
            before = search.taken(known["decision"])
            if before.evaluation.peak_bytes < found.evaluation.peak_bytes:
                return before
    except (VerificationFailed, LookupError, TypeError, ValueError) as failed:
        log.info("the least of before is not made again: %r", failed)
    lowest = {"peak_bytes": found.evaluation.peak_bytes, "decision": decision_of(found)}
    answers.keep(question, lowest)
    return found


def _question(search: Search) -> Question:
    """The graph, and all that is asked for but the bytes that it may take."""
    request = search.planning.request
    asked = request.with_budget(limit=0, held=0, coming=0, optimizer_step=0)
    graph = graph_digest(search.graphs.prepared.module)
    return {"least of": session.digest("least", graph, astuple(asked))}

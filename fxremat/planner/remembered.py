"""A cache of search results in memory, for the last few problems; equal problems share one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TypeVar

from fxremat.core.problem import Problem
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.options import SolverOptions

Answer = TypeVar("Answer")
Search = Callable[[Problem, SolverOptions], Answer]


def remembered(search: Search[Answer]) -> Search[Answer]:
    """The search, done once for equal problems and options. What Ctrl-C cut short is not kept.

    A search that had time left is the answer whatever the time limit is: it looks at the clock only
    to see whether it has to stop.
    """
    known: dict[tuple[Problem, SolverOptions], Answer] = {}

    @wraps(search)
    def answer(problem: Problem, options: SolverOptions) -> Answer:
        unlimited = replace(options, time_limit_s=None)
        for key in ((problem, unlimited), (problem, options)):
            if key in known:
                return known[key]
        deadline = Deadline(options.time_limit_s)
        found = search(problem, options)
        if Deadline(None).running():
            key = problem, unlimited if deadline.running() else options
            while len(known) >= constants.REMEMBERED:
                del known[next(iter(known))]
            known[key] = found
        return found

    return answer

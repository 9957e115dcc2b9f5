"""From steps to a `Plan`: every figure of it comes from a replay, never from a solver."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from fxremat.core.json_data import from_data
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.schedule import Step, ops_of
from fxremat.core.timeline import Timeline, replay
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.solvers import SolverOptions

Answer = TypeVar("Answer")
Search = Callable[[Problem, SolverOptions], Answer]


def limit_s(problem: Problem, options: SolverOptions) -> float:
    """The time limit, or one for problems of this size where the caller gives none."""
    if options.time_limit_s is not None:
        return options.time_limit_s
    return constants.SECONDS * math.sqrt(len(problem.ops))


def make_plan(
    problem: Problem,
    steps: Sequence[Step],
    solver: str,
    *,
    budget_bytes: int | None = None,
    seconds: float = 0.0,
    time_bound_us: float | None = None,
    peak_bound_bytes: int | None = None,
) -> Plan:
    """The plan of these steps. No schedule is faster than running every op once."""
    line = replay(problem, steps)
    base = problem.base_time_us
    return Plan(
        steps=line.steps,
        solver=solver,
        budget_bytes=budget_bytes,
        peak_bytes=line.peak_bytes,
        time_us=line.time_us,
        seconds=seconds,
        time_bound_us=base if time_bound_us is None else max(base, time_bound_us),
        peak_bound_bytes=peak_bound_bytes,
    )


def claimed_plan(
    problem: Problem, claims: Mapping[str, Any], budget_bytes: int | None = None
) -> Plan | None:
    """The plan of steps in JSON data from elsewhere; None where they are none of this problem.

    Solver, seconds and bounds are as claimed, all other figures are computed anew. Raises
    `InvalidData` where the data are no plan.
    """
    claim = from_data(Plan, claims)
    if not _may_run(problem, claim.steps):
        return None
    return make_plan(
        problem,
        claim.steps,
        claim.solver,
        budget_bytes=budget_bytes,
        seconds=claim.seconds,
        time_bound_us=claim.time_bound_us,
        peak_bound_bytes=claim.peak_bound_bytes,
    )


def _may_run(problem: Problem, steps: Sequence[Step]) -> bool:
    """Whether first runs are in base order, and what is not repeatable runs once."""
    ops = ops_of(steps)
    counts = Counter(ops)
    return tuple(dict.fromkeys(ops)) == problem.base_steps() and all(
        op.repeatable or counts[op.name] == 1 for op in problem.ops
    )


def rank(plan: Plan | Timeline, budget_bytes: int | None) -> tuple[int, float]:
    """Less is better: plans that fit first, by time; the others by peak."""
    over = budget_bytes is not None and plan.peak_bytes > budget_bytes
    return plan.peak_bytes if over else 0, plan.time_us


def not_beaten(figures: Sequence[Sequence[float]], most: int = sys.maxsize) -> list[int]:
    """The places of the rows that no other beats in all figures, by the first figure.

    Of equal rows it is the first. Where they are more than ``most``, they are thinned evenly.
    """
    rows, kept = np.array(figures, dtype=np.float64), list[int]()
    for at in map(int, np.lexsort(rows.T[::-1])) if len(rows) else ():
        if not (rows[kept] <= rows[at]).all(axis=1).any():
            kept.append(at)
    return kept[:: max(1, -(-len(kept) // most))]


def remembered(search: Search[Answer]) -> Search[Answer]:
    """The search, done once for equal ones of the last few problems, with equal options.

    What Ctrl-C cut short is not kept. A search that had time left is the answer whatever the time
    limit is: it looks at the clock only to see whether it has to stop.
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

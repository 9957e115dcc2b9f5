"""From steps to a `Plan`: every figure of it comes from a replay, never from a solver."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fxremat.core.json_data import from_data
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.schedule import Step, ops_of
from fxremat.core.timeline import replay
from fxremat.planner import constants
from fxremat.planner.options import SolverOptions


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

"""From steps to a `Plan`: every figure of it comes from a replay, never from a solver."""

from __future__ import annotations

from collections.abc import Sequence

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.schedule import Step
from fxremat.core.timeline import replay


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
        energy_uj=line.energy_uj,
    )

"""Least energy within a budget and a time: when to compute again, when to page.

POET's problem (Patil et al., ICML 2022, section 4): each op takes energy, each byte paged out or
in takes energy, and the schedule may take so much time. Its programme lets all paging overlap;
here transfers queue on their engines, and the time is that of the schedule with them.

To a solver energy is what time was before: an op's repeat costs its energy, and a fetch that of
its bytes, out and back. Which values may move is told by how their two costs compare, at several
ratios, because solvers take one of both for each op; the best schedule counts.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.timeline import Timeline
from fxremat.planner.deadline import Deadline
from fxremat.planner.moves.offload import (
    Solver,
    items_of,
    least_bytes,
    movable,
    priced,
    rerun_costs,
)
from fxremat.planner.moves.transfers import place
from fxremat.planner.options import SolverOptions
from fxremat.planner.plans import make_plan
from fxremat.planner.published import tuning

NAME = "energy"


def solve(
    problem: Problem, budget_bytes: int | None, options: SolverOptions, inner: Solver
) -> Plan:
    """The plan of least energy found that keeps to budget and time; else the one nearest to it."""
    deadline = Deadline(options.time_limit_s)
    own = replace(options, objective="time", most_time_us=None)
    limit = math.inf if options.most_time_us is None else options.most_time_us
    best: tuple[tuple[float, float, float], Timeline, str] | None = None
    for ratio in tuning.ENERGY_RATIOS if problem.copies is not None else tuning.ENERGY_RATIOS[:1]:
        line, solver = _schedule(problem, budget_bytes, own, inner, ratio)
        excess = 0 if budget_bytes is None else max(0, line.peak_bytes - budget_bytes)
        late = max(0.0, line.time_us - limit)
        rank = (float(excess), late, line.energy_uj)
        if _fits_the_host(line) and (best is None or rank < best[0]):
            best = rank, line, solver
    assert best is not None  # without moves every schedule fits the host
    return make_plan(
        problem,
        best[1].steps,
        f"{best[2]}+{NAME}",
        budget_bytes=budget_bytes,
        seconds=deadline.seconds(),
        peak_bound_bytes=least_bytes(problem),
    )


def _schedule(
    problem: Problem, budget: int | None, options: SolverOptions, inner: Solver, ratio: float
) -> tuple[Timeline, str]:
    """The schedule for one choice of what may move, and the solver that made it."""
    question = _in_energy(problem)
    price = 0.0 if problem.copies is None else 2 * problem.copies.energy_uj
    can, again = movable(problem), rerun_costs(question)
    moved = {name for name, size in can.items() if again[name] >= ratio * price * size}
    moved = set() if ratio == math.inf else moved
    answer = inner(priced(question, moved, price, recompute=True), budget, options)
    return place(problem, items_of(problem, answer.ops), budget), answer.solver


def _in_energy(problem: Problem) -> Problem:
    """The problem whose ops take their energy in place of their time."""
    ops = tuple(replace(op, time_us=op.energy_uj) for op in problem.ops)
    return replace(problem, ops=ops)


def _fits_the_host(line: Timeline) -> bool:
    copies = line.problem.copies
    cap = None if copies is None else copies.host_bytes
    return cap is None or line.host_peak_bytes <= cap

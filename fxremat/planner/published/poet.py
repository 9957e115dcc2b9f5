"""POET: the plan of least energy within a budget and a time, by computing again or by paging.

Patil et al., "POET: training neural networks on tiny devices with integrated rematerialization and
paging" (ICML 2022), section 4: each op takes energy, each byte paged out or in takes energy, and
the schedule may take so much time. Its programme lets all paging overlap; here transfers queue on
their engines, and the time is that of the schedule with them.

An op takes the watts of the device for as long as it runs. To a solver energy is what time was
before: an op's repeat costs its energy, and a fetch that of its bytes, out and back. Which values
may move follows from the ratio of the two costs, at several thresholds, because the solver takes
one of both for each op; the best schedule counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.timeline import Timeline, replay
from fxremat.planner.deadline import Deadline
from fxremat.planner.local import greedy
from fxremat.planner.moves.offload import items_of, movable, priced, rerun_costs
from fxremat.planner.moves.transfers import place
from fxremat.planner.plans import make_plan
from fxremat.planner.solvers import SolverOptions

NAME = "poet"
RATIOS = (math.inf, 4.0, 1.5, 1.0, 0.5, 0.0)
"""A value may move if computing it again costs so many times what moving it does: from "nothing
moves" to "everything may"."""


@dataclass(frozen=True)
class Energy:
    """What a device takes, and how long a plan may take.

    An op takes ``watts`` while it runs, a moved byte ``nj_per_byte`` nanojoules; the defaults are
    of the order of a GPU, and only their ratio matters. A plan may take ``most_time`` times what
    running every op once takes; None: any time.
    """

    watts: float = 300.0
    nj_per_byte: float = 10.0
    most_time: float | None = None

    def of(self, line: Timeline) -> float:
        """Microjoules of a schedule."""
        problem = line.problem
        ops = sum(problem.op_of[step].time_us for step in line.steps if isinstance(step, str))
        moved = sum(problem.bytes_of[transfer.value] for transfer in line.timing.transfers)
        return self.watts * ops + self.nj_per_byte / 1000 * moved


def solve(
    problem: Problem,
    budget_bytes: int | None,
    options: SolverOptions,
    energy: Energy | None = None,
) -> Plan:
    """The plan of least energy found that keeps to budget and time; else the one nearest to it."""
    deadline, energy = Deadline(options.time_limit_s), energy or Energy()
    limit = math.inf if energy.most_time is None else energy.most_time * problem.base_time_us
    best: tuple[tuple[float, float, float], Timeline] | None = None
    for ratio in RATIOS if problem.copies is not None else RATIOS[:1]:
        line = _schedule(problem, budget_bytes, options, energy, ratio)
        excess = 0 if budget_bytes is None else max(0, line.peak_bytes - budget_bytes)
        rank = (float(excess), max(0.0, line.time_us - limit), energy.of(line))
        cap = None if problem.copies is None else problem.copies.host_bytes
        fits_the_host = cap is None or line.host_peak_bytes <= cap
        if fits_the_host and (best is None or rank < best[0]):
            best = rank, line
    assert best is not None  # without moves every schedule fits the host
    steps, seconds = best[1].steps, deadline.seconds()
    return make_plan(problem, steps, NAME, budget_bytes=budget_bytes, seconds=seconds)


def _schedule(
    problem: Problem, budget: int | None, options: SolverOptions, energy: Energy, ratio: float
) -> Timeline:
    """The schedule for one choice of what may move."""
    if problem.copies is None:
        return replay(problem, greedy.solve(problem, budget, options).steps)
    ops = tuple(replace(op, time_us=op.time_us * energy.watts) for op in problem.ops)
    question = replace(problem, ops=ops)
    price = 2 * energy.nj_per_byte / 1000
    can, again = movable(problem), rerun_costs(question)
    moved = {name for name, size in can.items() if again[name] >= ratio * price * size}
    moved = set() if ratio == math.inf else moved
    answer = greedy.solve(priced(question, moved, price, recompute=True), budget, options)
    return place(problem, items_of(problem, answer.ops), budget)

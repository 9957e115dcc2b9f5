"""What the programmes of several papers share: a known schedule, and what may run again in a stage.

A programme is started from the best schedule that is known, because finding a first one is what
solvers do worst.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.local import greedy
from fxremat.planner.local.stage_schedule import ExtraRun, StageSchedule
from fxremat.planner.options import SolverOptions
from fxremat.planner.plans import make_plan


def start_plan(problem: Problem, budget_bytes: int, options: SolverOptions) -> Plan:
    """The plan in ``options.start`` if it fits, else it or the greedy solver's: the better one."""
    plans = []
    if options.start is not None:
        plans.append(make_plan(problem, options.start, "start"))
    if not plans or plans[0].peak_bytes > budget_bytes:
        fresh = replace(options, start=None, progress=None)
        plans.append(greedy.solve(problem, budget_bytes, fresh))
    return min(plans, key=lambda plan: (max(plan.peak_bytes, budget_bytes), plan.time_us))


def without_unread(model: IndexedProblem, runs: Iterable[ExtraRun]) -> list[ExtraRun]:
    """The runs without those whose copies nobody reads."""
    state = StageSchedule(model, runs)
    while idle := tuple(run for run in state.all_extra() if not state.is_read(run)):
        state.change((), idle)
    return state.all_extra()


def all_runs(model: IndexedProblem) -> list[list[int]]:
    """Every repeat that some schedule may need: nothing is lost without the others.

    An op is of use in a stage if a value of it may still be read then or later, by a first run
    or by an op that is of use itself.
    """
    until = [-1] * model.n
    for op in reversed(range(model.n)):
        last = max(op, until[op]) if model.repeatable[op] else op
        for value in model.reads[op]:
            if model.evictable(value):
                writer = model.writer[value]
                until[writer] = max(until[writer], last)
    return [[op for op in range(stage) if until[op] >= stage] for stage in range(model.n)]


def near_runs(model: IndexedProblem, hops: int) -> list[list[int]]:
    """In each stage the ops at most so many reads before the op of the stage."""
    return [_ancestors(model, stage, hops) for stage in range(model.n)]


def _ancestors(model: IndexedProblem, op: int, hops: int) -> list[int]:
    found: set[int] = set()
    front = {op}
    for _ in range(hops):
        reads = {value for reader in front for value in model.reads[reader]}
        front = {model.writer[value] for value in reads if model.evictable(value)} - found
        found |= front
    return sorted(found)


def with_runs(allowed: list[list[int]], runs: Iterable[ExtraRun]) -> list[list[int]]:
    """The allowed repeats and these."""
    more = [set(ops) for ops in allowed]
    for op, stage in runs:
        more[stage].add(op)
    return [sorted(ops) for ops in more]

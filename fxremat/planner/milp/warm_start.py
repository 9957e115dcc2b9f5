"""What a solver begins with: a known plan, its stage form, and its columns in the programme.

A programme is started from the best schedule that is known, because finding a first one is what
HiGHS does worst.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.planner.indexed_problem import IndexedProblem
from fxremat.planner.local import greedy
from fxremat.planner.local.stage_schedule import ExtraRun, StageSchedule
from fxremat.planner.milp.checkmate_columns import CheckmateMilp
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


def extra_runs_of(model: IndexedProblem, steps: Sequence[str]) -> list[ExtraRun]:
    """The extra runs of a schedule by stage, each op once and in base order.

    So it is a schedule in stage form with the same runs, not always with the same peak.
    """
    index = {op.name: k for k, op in enumerate(model.problem.ops)}
    done, found = 0, set()
    for name in steps:
        if index[name] == done:
            done += 1
        elif done < model.n:  # what runs after the last first run is for nothing
            found.add((done, index[name]))
    return [(op, stage) for stage, op in sorted(found)]


def without_unread(model: IndexedProblem, runs: Iterable[ExtraRun]) -> list[ExtraRun]:
    """The runs without those whose copies nobody reads."""
    state = StageSchedule(model, runs)
    while idle := tuple(run for run in state.all_extra() if not state.is_read(run)):
        state.change((), idle)
    return state.all_extra()


def start_values(programme: CheckmateMilp, runs: Collection[ExtraRun]) -> list[float] | None:
    """The value of every column for a schedule; None where the programme does not allow it."""
    if any(op not in programme.run[stage] for op, stage in runs):
        return None
    state = StageSchedule(programme.model, runs)
    values = [0.0] * len(programme.milp.cost)
    values[programme.one] = 1.0
    for op, stage in runs:
        values[programme.run[stage][op]] = 1.0
    for stage, row in enumerate(programme.stay):
        for value, column in row.items():
            values[column] = float(column == programme.one or state.live_in(value, stage))
    for stage in range(programme.model.n):
        _set_frees(programme, stage, values)
        _set_held(programme, stage, values)
    for column, terms in programme.sums:
        values[column] = sum(values[other] * factor for other, factor in terms)
    return values


def _set_frees(programme: CheckmateMilp, stage: int, values: list[float]) -> None:
    """A value that does not stay goes after the last op that runs and touches it."""
    last: dict[int, int] = {}
    for value, op in programme.free[stage]:
        stays = values[programme.stays(stage + 1, value)]
        if values[programme.run[stage][op]] and not stays:
            last[value] = max(op, last.get(value, op))
    for value, op in last.items():
        values[programme.free[stage][value, op]] = 1.0


def _set_held(programme: CheckmateMilp, stage: int, values: list[float]) -> None:
    """The least that the row of the column allows."""
    reads = programme.model.reads[stage]
    for value, column in programme.held_throughout[stage].items():
        needed = value in reads or values[programme.stays(stage + 1, value)]
        ran = programme.run[stage].get(programme.model.writer[value], programme.zero)
        available = values[programme.stays(stage, value)]
        values[column] = max(0.0, available + needed - 1.0 - values[ran])

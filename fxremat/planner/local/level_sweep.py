"""The whole pool: eviction paths, then improvement level by level from above.

The levels are fixed peaks between keep-all and the least peak found, evenly apart in the
logarithm; they do not depend on the budget. What is won at one level is carried to the next
by evicting further.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from fxremat.planner.deadline import Deadline
from fxremat.planner.local import tuning
from fxremat.planner.local.editable_schedule import EditableSchedule, Taste
from fxremat.planner.local.eviction_paths import descend
from fxremat.planner.local.least_peak import optima, search_lower
from fxremat.planner.local.pareto_pool import ParetoPool
from fxremat.planner.local.repeated_changes import RepeatedChanges
from fxremat.planner.local.ruin_and_repair import Improver
from fxremat.planner.local.segment_starts import counts_for, offer_segments
from fxremat.planner.local.stage_schedule import StageSchedule
from fxremat.planner.options import SolverOptions
from fxremat.planner.peak_bound import peak_bound


@dataclass(frozen=True)
class Effort:
    """Work allowed, in the units of `StageSchedule.work` (about a microsecond each)."""

    path: int
    level: int
    rounds: int = 200
    levels: int = 16


def effort_for(ops: int) -> Effort:
    """Less per op for larger problems, so that the whole grows less than linearly."""
    improve = min(10_000 * ops, 900_000 + 300 * ops)
    return Effort(path=min(6_000 * ops, 1_000_000 + 600 * ops), level=improve // 16)


def fill(pool: ParetoPool, options: SolverOptions) -> None:
    """Offer the pool everything found; the keep-all schedule is always in it."""
    model = pool.model
    effort = effort_for(model.n)
    deadline = Deadline(options.time_limit_s)
    pool.offer(StageSchedule(model))
    if not model.n:
        return
    for k, length in enumerate(tuning.SWEEP_LENGTHS):
        if deadline.running():
            work = effort.path if k == 0 else effort.path // 3
            descend(EditableSchedule(StageSchedule(model), Taste(length)), pool, 0, work)
    if deadline.running():
        counts = counts_for(model.n)
        offer_segments(pool, counts, effort.path // len(counts))
    analogues = RepeatedChanges(model)
    _lower(_improver(pool, 0, options.seed * 1000 + 999, analogues), effort, deadline)
    targets = _levels(pool, effort.levels)
    for k, target in enumerate(targets):
        below = targets[k + 1] if k + 1 < len(targets) else 0
        if deadline.running():
            improver = _improver(pool, target, options.seed * 1000 + k, analogues)
            _improve(improver, target, below, effort)
    _ascend(pool, targets, deadline)
    _solve_exactly(pool)


def reach(pool: ParetoPool, budget_bytes: int, options: SolverOptions) -> None:
    """Offer the pool what leads to one budget, and little else: a tenth of the work of `fill`."""
    model = pool.model
    effort = effort_for(model.n)
    deadline = Deadline(options.time_limit_s)
    pool.offer(StageSchedule(model))
    for length in tuning.SWEEP_LENGTHS:
        if deadline.running() and model.n:
            descend(
                EditableSchedule(StageSchedule(model), Taste(length)),
                pool,
                budget_bytes,
                effort.path // 3,
            )
    if deadline.running() and pool.best(budget_bytes) is not None:
        improver = _improver(pool, budget_bytes, options.seed, RepeatedChanges(model))
        improver.rounds(budget_bytes, effort.rounds, improver.search.state.work + effort.level)


def _ascend(pool: ParetoPool, targets: list[int], deadline: Deadline) -> None:
    """From each level up to the one above: leave out the runs that fit there."""
    for below, target in pairwise(reversed(targets)):
        entry = pool.best(below)
        if entry is not None and deadline.running():
            search = EditableSchedule(pool.state(entry))
            search.keep_all(target)
            pool.offer(search.state)


def _improver(pool: ParetoPool, target: int, seed: int, analogues: RepeatedChanges) -> Improver:
    """For the best schedule within the target, or the lowest one."""
    search = EditableSchedule(pool.state(pool.best(target) or pool.least()))
    return Improver(search, pool, seed, analogues)


def _lower(improver: Improver, effort: Effort, deadline: Deadline) -> None:
    """Look for lower peaks, unless the lowest is proven to be the least."""
    pool = improver.pool
    if deadline.running() and pool.least().peak > peak_bound(pool.model):
        search_lower(improver, effort.rounds, 5 * effort.level)


def _solve_exactly(pool: ParetoPool) -> None:
    """Add the optimal schedules of a small problem."""
    found, proven = optima(pool.model)
    for peak, runs in found:
        time = sum(pool.model.time) + sum(pool.model.time[op] for op, _ in runs)
        pool.add(peak, time, runs)
    if found and proven:
        pool.exact_peak = found[-1][0]


def _improve(improver: Improver, target: int, below: int, effort: Effort) -> None:
    """Improve a schedule within the target, then evict on to the target below."""
    search = improver.search
    improver.rounds(target, effort.rounds, effort.level)
    search.taste, search.noise = Taste(), None
    search.gaps.unblock()
    descend(search, improver.pool, below, search.state.work + 2 * effort.level)


def _levels(pool: ParetoPool, count: int) -> list[int]:
    """Peaks from just under keep-all down to the least found."""
    low, high = pool.least().peak, StageSchedule(pool.model).max_peak()
    if low <= 0 or high <= low:
        return []
    ratio = math.log(low / high) / count
    return [int(high * math.exp(ratio * k)) for k in range(1, count)] + [low]

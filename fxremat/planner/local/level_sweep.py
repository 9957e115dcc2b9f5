"""The whole front: of a small problem the optima; else eviction paths, then improvement by levels.

The levels are fixed peaks between store-all and the least peak found, evenly apart in the
logarithm. They do not depend on the budget. What is won at one level is carried to the next
by evicting further.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from fxremat.core.constants import MEASURABLE
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.local.editable_schedule import (
    EditableSchedule,
    GapRanking,
    descend,
    level_work,
    path_work,
)
from fxremat.planner.local.least_peak import optima, search_lower
from fxremat.planner.local.pareto_front import ParetoFront
from fxremat.planner.local.ruin_and_repair import Improver, RepeatedChanges
from fxremat.planner.local.segment_starts import counts_for, offer_segments
from fxremat.planner.local.stage_schedule import ExtraRun, StageSchedule
from fxremat.planner.options import SolverOptions
from fxremat.planner.peak_bound import peak_bound


def fill(front: ParetoFront, options: SolverOptions) -> None:
    """Offer the front everything found; the store-all schedule is always in it."""
    model = front.model
    work = path_work(model.n)
    deadline = Deadline(options.time_limit_s)
    store_all = StageSchedule(model)
    front.offer(store_all)
    if not model.n or _solve_exactly(front):
        return
    for k, length in enumerate(constants.HALVES):
        if deadline.running():
            part = work if k == 0 else work // 3
            descend(EditableSchedule(store_all.copy(), GapRanking(length)), front, 0, part)
    if deadline.running():
        counts = counts_for(model.n)
        offer_segments(front, counts, work // len(counts))
    repeated_changes = RepeatedChanges(model)
    _lower(
        _improver(front, 0, options.seed * 1000 + 999, repeated_changes),
        5 * level_work(model.n),
        deadline,
    )
    targets = _levels(front, constants.LEVELS)
    for k, target in enumerate(targets):
        below = targets[k + 1] if k + 1 < len(targets) else 0
        if deadline.running():
            improver = _improver(front, target, options.seed * 1000 + k, repeated_changes)
            _improve(improver, target, below, level_work(model.n))
    _climb(front, targets, deadline)


def fill_for_budget(front: ParetoFront, budget_bytes: int, options: SolverOptions) -> None:
    """Offer the front what leads to one budget, with about a tenth of the work of `fill`."""
    model = front.model
    work = path_work(model.n)
    deadline = Deadline(options.time_limit_s)
    store_all = StageSchedule(model)
    front.offer(store_all)
    for length in constants.HALVES:
        if deadline.running() and model.n:
            descend(
                EditableSchedule(store_all.copy(), GapRanking(length)),
                front,
                budget_bytes,
                work // 3,
            )
    if deadline.running() and front.best(budget_bytes) is not None:
        improver = _improver(front, budget_bytes, options.seed, RepeatedChanges(model))
        improver.rounds(budget_bytes, improver.search.state.work + level_work(model.n))


def fill_from(
    front: ParetoFront,
    runs: Sequence[ExtraRun],
    budget_bytes: int,
    hoped_us: float,
    options: SolverOptions,
) -> None:
    """Offer the front what leads from the schedule with these runs to one budget.

    It is improved only where it comes near the time that is hoped for.
    """
    model = front.model
    work = path_work(model.n)
    front.offer(StageSchedule(model))
    search = EditableSchedule(StageSchedule(model, runs))
    search.keep_what_fits(budget_bytes)
    descend(search, front, budget_bytes, work // 3)
    state = search.state
    fits = state.max_peak() <= budget_bytes
    if fits and state.time <= hoped_us * (1 + MEASURABLE):
        improver = Improver(search, front, options.seed, RepeatedChanges(model))
        improver.rounds(budget_bytes, state.work + level_work(model.n))


def _climb(front: ParetoFront, targets: list[int], deadline: Deadline) -> None:
    """Leave out the runs of each level's schedule that fit one level higher."""
    for below, target in pairwise(reversed(targets)):
        entry = front.best(below)
        if entry is not None and deadline.running():
            search = EditableSchedule(front.state(entry))
            search.keep_what_fits(target)
            front.offer(search.state)


def _improver(
    front: ParetoFront, target: int, seed: int, repeated_changes: RepeatedChanges
) -> Improver:
    """An improver of the best schedule within the target, or of the lowest one."""
    search = EditableSchedule(front.state(front.best(target) or front.least()))
    return Improver(search, front, seed, repeated_changes)


def _lower(improver: Improver, work: int, deadline: Deadline) -> None:
    """Look for lower peaks, unless the lowest is proven to be the least."""
    front = improver.front
    if deadline.running() and front.least().peak > peak_bound(front.model):
        search_lower(improver, work)


def _solve_exactly(front: ParetoFront) -> bool:
    """Add the optimal schedules of a small problem; whether these are all, so that none is left."""
    found, proven = optima(front.model)
    for peak, runs in found:
        time = sum(front.model.time) + sum(front.model.time[op] for op, _ in runs)
        front.add(peak, time, runs)
    if found and proven:
        front.exact_peak = found[-1][0]
    return proven


def _improve(improver: Improver, target: int, below: int, work: int) -> None:
    """Improve a schedule within the target, then evict on to the target below."""
    search = improver.search
    improver.rounds(target, work)
    search.ranking, search.noise = GapRanking(), None
    search.gaps.unblock()
    descend(search, improver.front, below, search.state.work + 2 * work)


def _levels(front: ParetoFront, count: int) -> list[int]:
    """Peaks from just under store-all down to the least found."""
    low, high = front.least().peak, StageSchedule(front.model).max_peak()
    if low <= 0 or high <= low:
        return []
    ratio = math.log(low / high) / count
    return [int(high * math.exp(ratio * k)) for k in range(1, count)] + [low]

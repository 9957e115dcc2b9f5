"""The whole pool: eviction paths, then improvement level by level from above.

The levels are fixed peaks between keep-all and the least peak found, evenly apart in the
logarithm; they do not depend on the budget. What is won at one level is carried to the next
by evicting further.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from fxremat.planner.analogues import Analogues
from fxremat.planner.bound import peak_bound
from fxremat.planner.improve import Improver
from fxremat.planner.least_peak import exact, search_lower
from fxremat.planner.options import SolverOptions
from fxremat.planner.paths import descend
from fxremat.planner.pool import Pool
from fxremat.planner.search import Search, Taste
from fxremat.planner.state import State

LENGTHS = (0.0, 0.5, 1.0)


class Clock:
    """Says when the time limit is over; without one it never looks at the time."""

    def __init__(self, limit_s: float | None) -> None:
        self.end = None if limit_s is None else time.perf_counter() + limit_s

    def running(self) -> bool:
        """Whether there is time left."""
        return self.end is None or time.perf_counter() < self.end


@dataclass(frozen=True)
class Effort:
    """Work allowed, in the units of `State.work` (about a microsecond each)."""

    path: int
    level: int
    rounds: int = 200
    levels: int = 16


def effort_for(ops: int) -> Effort:
    """Less per op for larger problems, so that the whole grows less than linearly."""
    improve = min(5_000 * ops, 1_200_000 + 300 * ops)
    return Effort(path=1_000_000 + 600 * ops, level=improve // 16)


def fill(pool: Pool, options: SolverOptions) -> None:
    """Offer the pool everything found; the keep-all schedule is always in it."""
    model = pool.model
    effort = effort_for(model.n)
    clock = Clock(options.time_limit_s)
    pool.offer(State(model))
    if not model.n:
        return
    for length in LENGTHS:
        if clock.running():
            descend(Search(State(model), Taste(length)), pool, 0, effort.path)
    analogues = Analogues(model)
    targets = _levels(pool, effort.levels)
    for k, target in enumerate(targets):
        below = targets[k + 1] if k + 1 < len(targets) else 0
        if clock.running():
            improver = _improver(pool, target, options.seed * 1000 + k, analogues)
            _improve(improver, target, below, effort)
    if clock.running():
        _lower(_improver(pool, 0, options.seed * 1000 + 999, analogues), effort)


def _improver(pool: Pool, target: int, seed: int, analogues: Analogues) -> Improver:
    """For the best schedule within the target, or the lowest one."""
    search = Search(pool.state(pool.best(target) or pool.least()))
    return Improver(search, pool, seed, analogues)


def _lower(improver: Improver, effort: Effort) -> None:
    """Look for lower peaks, unless the lowest is proven to be the least."""
    pool = improver.pool
    if pool.least().peak > peak_bound(pool.model):
        search_lower(improver, effort.rounds, 4 * effort.level)
    found = exact(pool.model)
    if found is not None:
        pool.exact_peak, runs = found
        time = sum(pool.model.time) + sum(pool.model.time[op] for op, _ in runs)
        pool.add(pool.exact_peak, time, runs)


def _improve(improver: Improver, target: int, below: int, effort: Effort) -> None:
    """Improve a schedule within the target, then evict on to the target below."""
    search = improver.search
    improver.rounds(target, effort.rounds, effort.level)
    search.taste, search.noise = Taste(), None
    search.gaps.unblock()
    descend(search, improver.pool, below, search.state.work + effort.path)


def _levels(pool: Pool, count: int) -> list[int]:
    """Peaks from just under keep-all down to the least found."""
    low, high = pool.least().peak, State(pool.model).max_peak()
    if low <= 0 or high <= low:
        return []
    ratio = math.log(low / high) / count
    return [int(high * math.exp(ratio * k)) for k in range(1, count)] + [low]

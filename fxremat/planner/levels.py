"""The whole pool: eviction paths, then improvement level by level from above.

The levels are fixed peaks between keep-all and the least peak found, evenly apart in the
logarithm; they do not depend on the budget. What is won at one level is carried to the next
by evicting further.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fxremat.planner.analogues import Analogues
from fxremat.planner.improve import Improver
from fxremat.planner.paths import descend
from fxremat.planner.pool import Pool
from fxremat.planner.search import Search, Taste
from fxremat.planner.state import State

LENGTHS = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class Effort:
    """How much to do."""

    levels: int = 16
    rounds: int = 25


def effort_for(ops: int) -> Effort:
    """Less per level for larger problems, so that time grows about linearly with size."""
    return Effort(rounds=max(2, min(40, 15_000 // max(1, ops))))


def fill(pool: Pool, seed: int, effort: Effort) -> None:
    """Offer the pool everything found."""
    model = pool.model
    for length in LENGTHS:
        descend(Search(State(model), Taste(length)), pool)
    analogues = Analogues(model)
    targets = _levels(pool, effort.levels)
    for k, target in enumerate(targets):
        below = targets[k + 1] if k + 1 < len(targets) else 0
        _improve(pool, target, below, seed * 1000 + k, effort.rounds, analogues)


def _improve(
    pool: Pool, target: int, below: int, seed: int, rounds: int, analogues: Analogues
) -> None:
    """Improve the best schedule within the target, then evict on to the target below."""
    entry = pool.best(target)
    if entry is None:
        return
    search = Search(pool.state(entry))
    if entry.extra:
        Improver(search, pool, seed, analogues).rounds(target, rounds)
    search.taste, search.noise = Taste(), None
    search.gaps.unblock()
    descend(search, pool, below)


def _levels(pool: Pool, count: int) -> list[int]:
    """Peaks from just under keep-all down to the least found."""
    low, high = pool.least().peak, State(pool.model).max_peak()
    if low <= 0 or high <= low:
        return []
    ratio = math.log(low / high) / count
    return [int(high * math.exp(ratio * k)) for k in range(1, count)] + [low]

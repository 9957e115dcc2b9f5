"""Eviction paths: from a state down to the least peak that drops can reach.

Each step lowers the highest stage by the drop that costs least time per byte, as DTR does
online (arXiv 2006.09616, h_DTR without staleness, for the whole schedule is known), and every
state on the way is a plan of its own: one path is a whole front. Now and then the runs that
later steps made needless are left out again.
"""

from __future__ import annotations

from fxremat.planner.pool import Pool
from fxremat.planner.search import Search

KEEP_EVERY = 8
"""Steps from one look at needless runs to the next."""


def descend(search: Search, pool: Pool, target: int = 0) -> None:
    """Evict until the peak is within target or no drop helps, offering every state."""
    pool.offer(search.state)
    steps = 0
    while search.state.max_peak() > target and _step(search):
        steps += 1
        if steps % KEEP_EVERY == 0:
            search.keep_all(search.state.max_peak())
        search.settle()
        pool.offer(search.state)
    search.keep_all(search.state.max_peak())
    search.settle()
    pool.offer(search.state)


def _step(search: Search) -> bool:
    return search.evict() or (search.gaps.unblock() and search.evict())

"""Eviction paths: from a state down to the least peak that drops can reach.

Each step lowers the highest stage by the drop that costs least time per byte, as DTR does
online (arXiv 2006.09616, h_DTR without staleness, for the whole schedule is known), and every
state on the way is a plan of its own: one path is a whole front. Now and then the runs that
later steps made needless are left out again.
"""

from __future__ import annotations

from fxremat.planner.local import tuning
from fxremat.planner.local.editable_schedule import EditableSchedule
from fxremat.planner.local.pareto_pool import ParetoPool


def descend(search: EditableSchedule, pool: ParetoPool, target: int, work: int) -> None:
    """Evict until the peak is within target, no drop helps or the state's work is that much.

    States on the way are offered to the pool.
    """
    state = search.state
    grain = state.max_peak() // tuning.PATH_GRAIN
    offered = state.max_peak() + grain + 1
    steps, look = 0, tuning.PATH_KEEP_EVERY
    while state.max_peak() > target and state.work < work:
        if state.max_peak() < offered - grain:
            offered = state.max_peak()
            pool.offer(state)
        if not _step(search):
            break
        steps += 1
        if steps >= look:
            search.keep_all(state.max_peak())
            look = steps + max(
                tuning.PATH_KEEP_EVERY, len(state.all_extra()) // tuning.PATH_KEEP_EVERY_RUNS
            )
        search.settle()
    search.keep_all(state.max_peak())
    search.settle()
    pool.offer(state)


def _step(search: EditableSchedule) -> bool:
    return search.evict() or (search.gaps.unblock() and search.evict())


def evict_all(search: EditableSchedule, work: int) -> None:
    """Evict until no drop helps or the work is done; every change can be taken back."""
    while search.state.work < work and search.evict():
        pass

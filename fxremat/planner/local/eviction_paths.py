"""Eviction paths: from a state down to the least peak that evictions can reach.

Each step lowers the highest stage by the eviction that costs least time per byte. DTR does the
same at run time (arXiv 2006.09616, its heuristic without staleness, since here the whole schedule
is known). Every state on the way is a plan of its own, so that one path is a whole front. Now and
then the runs that later steps made needless are left out again.
"""

from __future__ import annotations

from fxremat.planner.local import tuning
from fxremat.planner.local.editable_schedule import EditableSchedule
from fxremat.planner.local.pareto_front import ParetoFront


def descend(search: EditableSchedule, front: ParetoFront, target: int, work: int) -> None:
    """Evict until the peak is at most ``target`` bytes, no eviction helps or ``work`` is done.

    States on the way are offered to the front.
    """
    state = search.state
    grain = state.max_peak() // tuning.PATH_GRAIN
    offered = state.max_peak() + grain + 1
    steps, next_keep = 0, tuning.PATH_KEEP_EVERY
    while state.max_peak() > target and state.work < work:
        if state.max_peak() < offered - grain:
            offered = state.max_peak()
            front.offer(state)
        if not _step(search):
            break
        steps += 1
        if steps >= next_keep:
            search.keep_what_fits(state.max_peak())
            next_keep = steps + max(
                tuning.PATH_KEEP_EVERY, len(state.all_extra()) // tuning.PATH_KEEP_EVERY_RUNS
            )
        search.commit()
    search.keep_what_fits(state.max_peak())
    search.commit()
    front.offer(state)


def _step(search: EditableSchedule) -> bool:
    return search.evict() or (search.gaps.unblock() and search.evict())


def evict_all(search: EditableSchedule, work: int) -> None:
    """Evict until no eviction helps or the work is done; every change can be rolled back."""
    while search.state.work < work and search.evict():
        pass

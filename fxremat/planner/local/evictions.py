"""Evictions: what must run again so that an op's values need not be held, and the reverse.

``plan_eviction`` finds what must run again in a stage. That is the op and, recursively, the ops
whose values it reads and which are not there. A read that cannot be computed again is held longer
instead. So is one that costs more time per byte than ``rate``. This is Checkmate's closed form for
R given S (arXiv 1910.02653, section 4.7); S is chosen on the way.

``fits_without`` and ``unread_after`` serve the reverse: leave out an extra run, hold its values.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from fxremat.planner.indexed_problem import INPUT
from fxremat.planner.local.stage_schedule import ExtraRun, StageSchedule


class Eviction(NamedTuple):
    """Extra runs to add and to remove so that an op's values need not be held up to a stage.

    ``added_time`` is in microseconds; ``held_longer`` are reads that are held, not computed again.
    """

    add: tuple[ExtraRun, ...]
    remove: tuple[ExtraRun, ...]
    added_time: float
    held_longer: tuple[int, ...]


def plan_eviction(
    state: StageSchedule,
    op: int,
    stage: int,
    rate: float,
    limit: int,
    relief: int,
) -> Eviction:
    """What running ``op`` again in ``stage`` takes.

    ``relief`` are the bytes that the eviction frees. A read that could be computed again is held
    longer only while it takes less than that, and while the profile so relieved stays below
    ``limit``.
    """
    model = state.model
    add: dict[int, None] = {}
    held: dict[int, None] = {}
    stack = [op]
    state.work += 20
    while stack:
        top = stack.pop()
        if top in add:
            continue
        add[top] = None
        state.work += 5
        for read in model.reads[top]:
            if read in held or model.writer[read] in add or state.available(read, stage):
                continue
            if not model.evictable(read):
                held[read] = None
            elif relief > model.bytes[read] and _may_hold(state, read, stage, rate, limit + relief):
                held[read] = None
                relief -= model.bytes[read]
            else:
                stack.append(model.writer[read])
    remove = _spared(state, add, op, stage, limit)
    time = model.time
    added = sum(time[run] for run in add) - sum(time[run] for run, _ in remove)
    kept = tuple(read for read in held if model.writer[read] not in add)
    return Eviction(tuple((run, stage) for run in add), remove, added, kept)


def _may_hold(state: StageSchedule, value: int, stage: int, rate: float, limit: int) -> bool:
    model = state.model
    size = model.bytes[value]
    if model.time[model.writer[value]] <= rate * size:
        return False
    return state.peak_between(state.held_until(value, stage), stage) + size < limit


def _spared(
    state: StageSchedule, add: dict[int, None], first: int, stage: int, limit: int
) -> tuple[ExtraRun, ...]:
    """Later runs of the added ops that are not needed any more: the new copies fit until then."""
    out = []
    for op in add:
        runs = state.runs[op]
        k = bisect_right(runs, stage)
        if op != first and k < len(runs) and fits_without(state, op, k, stage, limit):
            out.append((op, runs[k]))
    return tuple(out)


def fits_without(state: StageSchedule, op: int, k: int, since: int, limit: int) -> bool:
    """Whether run ``k`` can be left out, if the copies of the run before are held from ``since``.

    An estimate: only the stages between are looked at, and not those that use the copies.
    """
    model = state.model
    state.work += 10
    runs = state.runs[op]
    stage = runs[k]
    end = runs[k + 1] if k + 1 < len(runs) else model.n
    highest = state.peak_between(since, stage)
    for value in model.writes[op]:
        uses = state.uses[value]
        j = bisect_left(uses, stage)
        if not model.is_output[value] and j < len(uses) and uses[j] < end:
            highest += model.bytes[value]
    return highest < limit


def unread_after(state: StageSchedule, removed: tuple[ExtraRun, ...]) -> tuple[ExtraRun, ...]:
    """Extra runs that nothing reads any more now that ``removed`` are gone."""
    model = state.model
    out: dict[ExtraRun, None] = {}
    for op, stage in removed:
        for value in model.reads[op]:
            writer = model.writer[value]
            if writer == INPUT or model.is_output[value]:
                continue
            runs = state.runs[writer]
            k = bisect_right(runs, stage) - 1
            if k > 0 and not state.is_read((writer, runs[k])):
                out[(writer, runs[k])] = None
    return tuple(out)

"""The two moves: run an op again so that its values need not stay, and the reverse.

``plan_drop`` finds what must run again in a stage: the op and, recursively, the ops of reads
that are not there. A read that cannot be computed again, or that costs more time per byte
than ``rate``, is held longer instead (Checkmate's closed form for R given S, arXiv 1910.02653
section 4.7, with the choice of S made on the way).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from fxremat.planner.indexed_problem import INPUT
from fxremat.planner.local.stage_schedule import ExtraRun, StageSchedule


@dataclass(frozen=True)
class Drop:
    """Runs to add and to remove so that an op's values need not stay up to a stage."""

    add: tuple[ExtraRun, ...]
    remove: tuple[ExtraRun, ...]
    added_time: float
    held: tuple[int, ...]


def plan_drop(
    state: StageSchedule,
    op: int,
    stage: int,
    rate: float,
    limit: int,
    room: int,
    most_time: float = math.inf,
) -> Drop | None:
    """What running ``op`` again in ``stage`` takes; None where it adds more than ``most_time``.

    Reads are held longer only while their bytes stay under ``room``, what the drop relieves,
    and the profile so relieved below ``limit``, unless there is no other way.
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
        most_time -= model.time[top]
        if most_time < 0:
            return None
        add[top] = None
        state.work += 5
        for read in model.reads[top]:
            if read in held or model.writer[read] in add or state.available(read, stage):
                continue
            if not model.droppable(read):
                held[read] = None
            elif room > model.bytes[read] and _hold(state, read, stage, rate, limit + room):
                held[read] = None
                room -= model.bytes[read]
            else:
                stack.append(model.writer[read])
    remove = _spared(state, add, op, stage, limit)
    time = model.time
    added = sum(time[run] for run in add) - sum(time[run] for run, _ in remove)
    kept = tuple(read for read in held if model.writer[read] not in add)
    return Drop(tuple((run, stage) for run in add), remove, added, kept)


def _hold(state: StageSchedule, value: int, stage: int, rate: float, limit: int) -> bool:
    model = state.model
    size = model.bytes[value]
    if model.time[model.writer[value]] <= rate * size:
        return False
    return state.room(state.last_hold(value, stage), stage) + size < limit


def _spared(
    state: StageSchedule, add: dict[int, None], first: int, stage: int, limit: int
) -> tuple[ExtraRun, ...]:
    """Later runs of the added ops that the new copies can serve, where they fit."""
    out = []
    for op in add:
        runs = state.runs[op]
        k = bisect_right(runs, stage)
        if op != first and k < len(runs) and fits_without(state, op, k, stage, limit):
            out.append((op, runs[k]))
    return tuple(out)


def fits_without(state: StageSchedule, op: int, k: int, since: int, limit: int) -> bool:
    """Whether run ``k`` can be left out by holding an earlier run's copies from ``since``.

    An estimate: stages of use are not simulated, only the stages between.
    """
    model = state.model
    state.work += 10
    runs = state.runs[op]
    stage = runs[k]
    end = runs[k + 1] if k + 1 < len(runs) else model.n
    highest = state.room(since, stage)
    for value in model.writes[op]:
        uses = state.uses[value]
        j = bisect_left(uses, stage)
        if not model.kept[value] and j < len(uses) and uses[j] < end:
            highest += model.bytes[value]
    return highest < limit


def useless_after(state: StageSchedule, removed: tuple[ExtraRun, ...]) -> tuple[ExtraRun, ...]:
    """Extra runs that nothing reads any more now that ``removed`` are gone."""
    model = state.model
    out: dict[ExtraRun, None] = {}
    for op, stage in removed:
        for value in model.reads[op]:
            writer = model.writer[value]
            if writer == INPUT or model.kept[value]:
                continue
            runs = state.runs[writer]
            k = bisect_right(runs, stage) - 1
            if k > 0 and not state.useful((writer, runs[k])):
                out[(writer, runs[k])] = None
    return tuple(out)

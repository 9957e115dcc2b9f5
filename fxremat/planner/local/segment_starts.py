"""Structured starts: keep little between segments, compute a whole segment again at once.

The classic good plan for chains of blocks (Chen et al., arXiv 1604.06174, section 4.1, on any
graph): the stages up to the highest one of keep-all are cut into segments where few bytes
cross; values that later segments read stay; the others are freed and computed again, all of
a segment together, in the first later stage that needs one of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from fxremat.planner.indexed_problem import INPUT, IndexedProblem
from fxremat.planner.local import tuning
from fxremat.planner.local.editable_schedule import EditableSchedule, Taste
from fxremat.planner.local.eviction_paths import descend
from fxremat.planner.local.pareto_pool import ParetoPool
from fxremat.planner.local.stage_schedule import ExtraRun, StageSchedule


def offer_segments(pool: ParetoPool, counts: list[int], work: int) -> None:
    """Schedules of so many segments each, and what evicting from them gives."""
    base = StageSchedule(pool.model)
    for count in counts:
        runs = segment_runs(base, count)
        if runs:
            search = EditableSchedule(StageSchedule(pool.model, runs), Taste())
            search.sweep(tuple(runs))
            search.keep_all(search.state.max_peak())
            search.settle()
            descend(search, pool, 0, work)


def counts_for(ops: int) -> list[int]:
    """Numbers of segments worth trying."""
    out, count = [], 2
    while count <= max(2, ops // 6):
        out.append(count)
        count = max(count + 1, count * 3 // 2)
    most = max(2, 3_000 // max(1, ops))
    step = max(1, -(-len(out) // most))
    return out[::-step]


def segment_runs(base: StageSchedule, count: int) -> list[ExtraRun]:
    """The runs that compute each segment again where it is first needed."""
    turn = int(base.peak.argmax())
    cuts = _cuts(base, turn, count)
    out: list[ExtraRun] = []
    for start, stop in zip([0, *cuts], [*cuts, turn + 1], strict=True):
        out.extend(_segment(base, start, stop, turn))
    return out


def _cuts(base: StageSchedule, turn: int, count: int) -> list[int]:
    """Stages at which segments begin: evenly apart, moved to where few bytes cross."""
    crossing = _crossing(base.model, turn)
    width = (turn + 1) / count
    cuts = []
    for k in range(1, count):
        low = int(k * width - tuning.SEGMENT_WINDOW * width / 2)
        near = range(max(1, low), min(turn, int(low + tuning.SEGMENT_WINDOW * width)) + 1)
        if near:
            cuts.append(min(near, key=lambda stage: (crossing[stage], stage)))
    return sorted(set(cuts))


def _crossing(model: IndexedProblem, turn: int) -> list[int]:
    """Bytes written before each stage and read from it on, up to the turn."""
    change = [0] * (turn + 3)
    last = [-1] * len(model.bytes)
    for op in range(turn + 1):
        for value in model.reads[op]:
            last[value] = op
    for value, op in enumerate(model.writer):
        if op != INPUT and op < last[value]:
            change[op + 1] += model.bytes[value]
            change[last[value] + 1] -= model.bytes[value]
    total, out = 0, []
    for step in change:
        total += step
        out.append(total)
    return out


def _segment(base: StageSchedule, start: int, stop: int, turn: int) -> list[ExtraRun]:
    dropped = list(_dropped(base, start, stop, turn))
    if not dropped:
        return []
    stage = min(base.uses[v][bisect_right(base.uses[v], turn)] for v in dropped)
    model, found = base.model, set()
    stack = [model.writer[value] for value in dropped]
    while stack:
        op = stack.pop()
        if op in found:
            continue
        found.add(op)
        for read in model.reads[op]:
            if model.writer[read] >= start and _local(base, read, stop, turn):
                stack.append(model.writer[read])
    return [(op, stage) for op in sorted(found)]


def _dropped(base: StageSchedule, start: int, stop: int, turn: int) -> Iterator[int]:
    """Values of the segment that only it and the stages after the turn read."""
    for op in range(start, stop):
        for value in base.model.writes[op]:
            uses = base.uses[value]
            if uses and uses[-1] > turn and _local(base, value, stop, turn):
                yield value


def _local(base: StageSchedule, value: int, stop: int, turn: int) -> bool:
    """Whether the value can be computed again and no later segment reads it."""
    uses = base.uses[value]
    k = bisect_right(uses, turn)
    return base.model.droppable(value) and (k == 0 or uses[k - 1] < stop)

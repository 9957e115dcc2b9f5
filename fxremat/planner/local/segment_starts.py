"""Structured starts: keep little between segments, compute a whole segment again at once.

This is the classic plan for chains of blocks (Chen et al., arXiv 1604.06174, section 4.1), here
on any graph. The stages up to the highest one of store-all are cut into segments where few bytes
cross. Values that later segments read stay. The others are freed, and are computed again, all of a
segment together, in the first later stage that needs one of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from fxremat.planner.indexed_problem import INPUT, IndexedProblem
from fxremat.planner.local.editable_schedule import EditableSchedule, GapRanking, descend
from fxremat.planner.local.pareto_front import ParetoFront
from fxremat.planner.local.stage_schedule import ExtraRun, StageSchedule


def offer_segments(front: ParetoFront, counts: list[int], work: int) -> None:
    """Schedules of so many segments each, and what evicting from them gives."""
    store_all = StageSchedule(front.model)
    for count in counts:
        runs = segment_runs(store_all, count)
        if runs:
            search = EditableSchedule(StageSchedule(front.model, runs), GapRanking())
            search.remove_unread(tuple(runs))
            search.keep_what_fits(search.state.max_peak())
            search.commit()
            descend(search, front, 0, work)


def counts_for(ops: int) -> list[int]:
    """Numbers of segments worth trying."""
    out, count = [], 2
    while count <= max(2, ops // 6):
        out.append(count)
        count = max(count + 1, count * 3 // 2)
    most = max(2, 3_000 // max(1, ops))
    step = max(1, -(-len(out) // most))
    return out[::-step]


def segment_runs(store_all: StageSchedule, count: int) -> list[ExtraRun]:
    """The runs that compute each segment again where it is first needed."""
    peak_stage = int(store_all.peak.argmax())
    cuts = _cuts(store_all, peak_stage, count)
    out: list[ExtraRun] = []
    for start, stop in zip([0, *cuts], [*cuts, peak_stage + 1], strict=True):
        out.extend(_segment(store_all, start, stop, peak_stage))
    return out


def _cuts(store_all: StageSchedule, peak_stage: int, count: int) -> list[int]:
    """Stages at which segments begin: evenly apart, but where few bytes cross near by.

    Each is moved by up to a quarter of a segment.
    """
    crossing = _crossing(store_all.model, peak_stage)
    width = (peak_stage + 1) / count
    cuts = []
    for k in range(1, count):
        low = int((k - 0.25) * width)
        near = range(max(1, low), min(peak_stage, int(low + width / 2)) + 1)
        if near:
            cuts.append(min(near, key=lambda stage: (crossing[stage], stage)))
    return sorted(set(cuts))


def _crossing(model: IndexedProblem, peak_stage: int) -> list[int]:
    """Bytes written before each stage and read from it on, up to the peak stage."""
    change = [0] * (peak_stage + 3)
    last = [-1] * len(model.bytes)
    for op in range(peak_stage + 1):
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


def _segment(store_all: StageSchedule, start: int, stop: int, peak_stage: int) -> list[ExtraRun]:
    dropped = list(_dropped(store_all, start, stop, peak_stage))
    if not dropped:
        return []
    stage = min(store_all.uses[v][bisect_right(store_all.uses[v], peak_stage)] for v in dropped)
    model, found = store_all.model, set()
    stack = [model.writer[value] for value in dropped]
    while stack:
        op = stack.pop()
        if op in found:
            continue
        found.add(op)
        for read in model.reads[op]:
            if model.writer[read] >= start and _local(store_all, read, stop, peak_stage):
                stack.append(model.writer[read])
    return [(op, stage) for op in sorted(found)]


def _dropped(store_all: StageSchedule, start: int, stop: int, peak_stage: int) -> Iterator[int]:
    """Values of the segment that only it and the stages after the peak stage read."""
    for op in range(start, stop):
        for value in store_all.model.writes[op]:
            uses = store_all.uses[value]
            if uses and uses[-1] > peak_stage and _local(store_all, value, stop, peak_stage):
                yield value


def _local(store_all: StageSchedule, value: int, stop: int, peak_stage: int) -> bool:
    """Whether the value can be computed again and no later segment reads it."""
    uses = store_all.uses[value]
    k = bisect_right(uses, peak_stage)
    return store_all.model.evictable(value) and (k == 0 or uses[k - 1] < stop)

"""The whole front: of a small problem the optima; else eviction paths, then improvement by levels.

The levels are fixed peaks between store-all and the least peak found, evenly apart in the
logarithm. They do not depend on the budget. What is won at one level is carried to the next
by evicting further.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat

from fxremat.core.constants import MEASURABLE
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import INPUT, IndexedProblem, live_bytes, peak_bound
from fxremat.planner.local.editable_schedule import (
    EditableSchedule,
    descend,
    descend_from_store_all,
    level_work,
    path_work,
)
from fxremat.planner.local.least_peak import optima, search_lower
from fxremat.planner.local.ruin_and_repair import Improver, RepeatedChanges
from fxremat.planner.local.stage_schedule import ExtraRun, ParetoFront, StageSchedule
from fxremat.planner.solvers import SolverOptions


def fill(front: ParetoFront, options: SolverOptions) -> None:
    """Offer the front everything found; the store-all schedule is always in it."""
    model = front.model
    work, deadline = path_work(model.n), Deadline(options.time_limit_s)
    front.offer(StageSchedule(model))
    if not model.n or _solve_exactly(front):
        return
    descend_from_store_all(front, 0, (work, work // 3, work // 3), deadline)
    if deadline.running():
        offer_segments(front, work)
    repeated_changes = RepeatedChanges(model)
    if deadline.running() and front.least().peak > peak_bound(model):
        lowest = _improver(front, 0, options.seed * 1000 + 999, repeated_changes)
        search_lower(lowest, 5 * level_work(model.n))
    targets = _levels(front)
    for k, target in enumerate(targets):
        below = targets[k + 1] if k + 1 < len(targets) else 0
        if deadline.running():
            improver = _improver(front, target, options.seed * 1000 + k, repeated_changes)
            _improve(improver, target, below, level_work(model.n))
    _climb(front, targets, deadline)


def fill_for_budget(front: ParetoFront, budget_bytes: int, options: SolverOptions) -> None:
    """Offer the front what leads to one budget, with about a tenth of the work of `fill`."""
    model, deadline = front.model, Deadline(options.time_limit_s)
    descend_from_store_all(front, budget_bytes, repeat(path_work(model.n) // 3), deadline)
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
    search = EditableSchedule(front.state(front.choose(target)))
    return Improver(search, front, seed, repeated_changes)


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
    search.length_exponent, search.noise = 0.0, None
    search.gaps.unblock()
    descend(search, improver.front, below, search.state.work + 2 * work)


def _levels(front: ParetoFront) -> list[int]:
    """Peaks from just under store-all down to the least found."""
    low, high = front.least().peak, StageSchedule(front.model).max_peak()
    if low <= 0 or high <= low:
        return []
    ratio = math.log(low / high) / constants.LEVELS
    return [int(high * math.exp(ratio * k)) for k in range(1, constants.LEVELS)] + [low]


# -- segments --------------------------------------------------------------------------------


def offer_segments(front: ParetoFront, work: int) -> None:
    """Structured starts: keep little between segments, compute a whole segment again at once.

    This is the classic plan for chains of blocks (Chen et al., arXiv 1604.06174, section 4.1), here
    on any graph. The stages up to the highest one of store-all are cut into segments where few
    bytes cross. Values that later segments read stay. The others are freed, and are computed again,
    all of a segment together, in the first later stage that needs one of them. What evicting from
    these schedules gives is offered, too.
    """
    store_all, counts = StageSchedule(front.model), counts_for(front.model.n)
    for count in counts:
        runs = segment_runs(store_all, count)
        if runs:
            search = EditableSchedule(StageSchedule(front.model, runs))
            search.remove_unread(tuple(runs))
            search.keep_what_fits(search.state.max_peak())
            search.commit()
            descend(search, front, 0, work // len(counts))


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
    cuts = set()
    for low in (int((k - 0.25) * width) for k in range(1, count)):
        near = range(max(1, low), min(peak_stage, int(low + width / 2)) + 1)
        if near:
            cuts.add(min(near, key=lambda stage: (crossing[stage], stage)))
    return sorted(cuts)


def _crossing(model: IndexedProblem, peak_stage: int) -> list[int]:
    """Bytes written before each stage and read from it on, up to the peak stage."""
    last = {value: op for op in range(peak_stage + 1) for value in model.reads[op]}
    writers = ((value, model.writer[value], until) for value, until in last.items())
    spans = ((op + 1, until + 1, model.bytes[v]) for v, op, until in writers if op != INPUT)
    return live_bytes(spans, peak_stage + 1)


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

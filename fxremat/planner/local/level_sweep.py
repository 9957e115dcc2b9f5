"""The whole front: of a small problem the optima; else eviction paths, then improvement by levels.

The levels are fixed peaks between store-all and the least peak found, evenly apart in the
logarithm. They do not depend on the budget. What is won at one level is carried to the next
by evicting further.
"""

from __future__ import annotations

import math
from itertools import pairwise

from fxremat.core.timeline import replay
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
from fxremat.planner.local.least_peak import optima
from fxremat.planner.local.ruin_and_repair import Improver
from fxremat.planner.local.stage_schedule import (
    ExtraRun,
    ParetoFront,
    StageSchedule,
    steps_of,
)
from fxremat.planner.solvers import SolverOptions


def fill(front: ParetoFront, options: SolverOptions) -> int:
    """Offer the front everything found; the store-all schedule is always in it.

    Gives the least peak of any schedule where that is proven, else 0.
    """
    model = front.model
    work, deadline = path_work(model.n), Deadline(options.time_limit_s)
    front.offer(StageSchedule(model))
    found, proven = optima(model)
    for peak, runs in found:
        real = replay(model.problem, model.names(steps_of(model.n, runs))).peak_bytes
        front.add(real, runs)
        proven &= real == peak  # not where a value is in two in-place pairs of an op
    if proven or not model.n:
        return found[-1][0] if found else 0
    descend_from_store_all(front, 0, (work, work // 3, work // 3), deadline)
    if deadline.running():
        offer_segments(front, work)
    if deadline.running() and front.least().peak > peak_bound(model):
        Improver.at(front, 0, seed=999).lower(5 * level_work(model.n))
    for k, (target, below) in enumerate(pairwise([*_levels(front), 0])):
        if deadline.running():
            improver = Improver.at(front, target, seed=k)
            search, work = improver.search, level_work(model.n)
            improver.rounds(target, work)
            search.length_exponent, search.noise = 0.0, None
            search.gaps.unblock()
            descend(search, front, below, search.state.work + 2 * work)
    return 0


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
            search.remove_runs(tuple(run for run in runs if not search.state.is_read(run)))
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
    model, uses, out = store_all.model, store_all.uses, list[ExtraRun]()
    peak_stage = int(store_all.peak.argmax())
    cuts = narrow_cuts(model, peak_stage, count)
    for start, stop in pairwise([0, *cuts, peak_stage + 1]):
        # Values of the segment that no later one reads, and of these what is read after the peak.
        own = (value for op in range(start, stop) for value in model.writes[op])
        later = range(stop, peak_stage + 1)
        local = {v for v in own if model.evictable(v) and not any(u in later for u in uses[v])}
        dropped = [v for v in local if uses[v] and uses[v][-1] > peak_stage]
        if dropped:
            stage = min(use for v in dropped for use in uses[v] if use > peak_stage)
            out += [(op, stage) for op in model.makers(range(start, stop), dropped, local)]
    return out


def narrow_cuts(model: IndexedProblem, last: int, count: int) -> list[int]:
    """Where so many stretches of the ops up to ``last`` begin, but for the first.

    They are evenly apart, each moved by up to a quarter of a stretch to where few bytes cross.
    """
    crossing, width, cuts = _crossing(model, last), (last + 1) / count, set[int]()
    for low in (int((k - 0.25) * width) for k in range(1, count)):
        near = range(max(1, low), min(last, int(low + width / 2)) + 1)
        if near:
            cuts.add(min(near, key=lambda stage: (crossing[stage], stage)))
    return sorted(cuts)


def _crossing(model: IndexedProblem, stop: int) -> list[int]:
    """Bytes written before each op and read from it on, up to the op ``stop``."""
    last = {value: op for op in range(stop + 1) for value in model.reads[op]}
    writers = ((value, model.writer[value], until) for value, until in last.items())
    spans = ((op + 1, until + 1, model.bytes[v]) for v, op, until in writers if op != INPUT)
    return live_bytes(spans, stop + 1)

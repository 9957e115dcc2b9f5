"""A stage schedule with its gap table and a journal: what every local search works on.

``EditableSchedule`` offers three changes and knows no strategy: evict, keep, and roll back.
``descend`` is the strategy that all searches share, an eviction path. Each step lowers the highest
stage by the eviction that costs least time per byte. DTR does the same at run time (arXiv
2006.09616, its heuristic without staleness, since here the whole schedule is known). Every state on
the way is a plan of its own, so that one path is a whole front.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxremat.planner import constants
from fxremat.planner.deadline import Deadline
from fxremat.planner.indexed_problem import INPUT
from fxremat.planner.local.gap_table import GapTable
from fxremat.planner.local.stage_schedule import ExtraRun, ParetoFront, StageSchedule, Undo


class Eviction(NamedTuple):
    """Extra runs to add and to remove so that an op's values need not be held up to a stage.

    ``added_time`` is in microseconds; ``held_longer`` are reads that are held, not computed again.
    """

    add: tuple[ExtraRun, ...]
    remove: tuple[ExtraRun, ...]
    added_time: float
    held_longer: tuple[int, ...]


def plan_eviction(
    state: StageSchedule, op: int, stage: int, hold: bool, limit: int, relief: int
) -> Eviction:
    """What running ``op`` again in ``stage`` takes: the op and, recursively, those that it needs.

    These are the ops whose values it reads and which are not there. A read that cannot be computed
    again is held longer instead. So are, with ``hold``, all that take time. This is Checkmate's
    closed form for R given S (arXiv 1910.02653, section 4.7); S is chosen on the way.

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
            elif relief > model.bytes[read] and _may_hold(state, read, stage, hold, limit + relief):
                held[read] = None
                relief -= model.bytes[read]
            else:
                stack.append(model.writer[read])
    remove = _spared(state, add, op, stage, limit)
    time = model.time
    added = sum(time[run] for run in add) - sum(time[run] for run, _ in remove)
    kept = tuple(read for read in held if model.writer[read] not in add)
    return Eviction(tuple((run, stage) for run in add), remove, added, kept)


def _may_hold(state: StageSchedule, value: int, stage: int, hold: bool, limit: int) -> bool:
    size, time = state.model.bytes[value], state.model.time[state.model.writer[value]]
    wanted = time > 0 if hold else not size
    return wanted and state.peak_between(state.held_until(value, stage), stage) + size < limit


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
        for writer in (model.writer[v] for v in model.reads[op] if not model.is_output[v]):
            runs = () if writer == INPUT else state.runs[writer]
            k = bisect_right(runs, stage) - 1
            if k > 0 and not state.is_read((writer, runs[k])):
                out[(writer, runs[k])] = None
    return tuple(out)


class EditableSchedule:
    """A stage schedule under local search.

    Gaps are ranked by added time per byte, divided by the power ``length_exponent`` of their
    length. ``noise`` has a factor for each op, by which its gaps are ranked lower or higher.
    """

    def __init__(self, state: StageSchedule, length_exponent: float = 0.0) -> None:
        self.state, self.length_exponent, self.gaps = state, length_exponent, GapTable(state)
        self.noise: npt.NDArray[np.float64] | None = None
        self.journal = list[Undo]()

    # -- journal ---------------------------------------------------------------------------

    def change(self, add: tuple[ExtraRun, ...], remove: tuple[ExtraRun, ...]) -> None:
        """Change the state; the change can be taken back."""
        self.journal.append(self.state.change(add, remove))
        self.gaps.refresh(self._touched((*add, *remove)))

    def roll_back(self, length: int = 0) -> None:
        """Take back every change since the journal was of this length."""
        touched = set[int]()
        while len(self.journal) > length:
            undo = self.journal.pop()
            self.state.revert(undo)
            touched |= self._touched((*undo.added, *undo.removed))
        self.gaps.refresh(touched)

    def commit(self) -> None:
        """Make every change so far final."""
        self.journal.clear()

    def _touched(self, runs: Iterable[ExtraRun]) -> set[int]:
        """The ops whose gaps differ once these runs have come or gone."""
        model, out = self.state.model, set[int]()
        for op, _ in runs:
            out.add(op)
            out.update(model.writer[value] for value in model.reads[op])
        out.discard(INPUT)
        return out

    # -- evict -----------------------------------------------------------------------------

    def evict(self) -> bool:
        """Lower the highest stage by the best eviction; False if none does."""
        worst = int(self.state.peak.argmax())
        limit = int(self.state.peak[worst])
        for _ in range(constants.TRIES):
            found = self._best(worst, limit)
            if found is None:
                return False
            op, stage, eviction = found
            if self._lowers(eviction, worst, limit):
                self.gaps.invalidate(stage)
                return True
            self.gaps.block(op, stage)
        return False

    def _best(self, worst: int, limit: int) -> tuple[int, int, Eviction] | None:
        """The (op, stage) of the best gap over the stage, and its eviction.

        Scores in the table may be stale: the best gap is scored again until a fresh score is best.
        """
        gaps = self.gaps
        slots = gaps.covering(worst)
        factors = self._factors(slots)
        scores = gaps.score[slots] * factors
        fresh: dict[int, Eviction] = {}
        while len(slots):
            k = int(scores.argmin())
            slot = int(slots[k])
            if scores[k] == np.inf:
                return None
            found = fresh.get(k)
            if found is None:
                found, gaps.score[slot] = self._score(slot, worst, limit)
                before, scores[k] = scores[k], gaps.score[slot] * factors[k]
                if found is None:
                    continue
                fresh[k] = found
                if scores[k] > max(before, scores.min()):
                    continue
            return int(gaps.op[slot]), int(gaps.next_use[slot]), found
        return None

    def _factors(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
        """What the ranking multiplies each gap's score by."""
        gaps, out = self.gaps, np.ones(len(slots))
        if self.length_exponent:
            out /= (gaps.next_use[slots] - gaps.last_use[slots]) ** self.length_exponent
        if self.noise is not None:
            out *= self.noise[gaps.op[slots]]
        return out

    def _score(self, slot: int, worst: int, limit: int) -> tuple[Eviction | None, float]:
        """The cheaper way to evict a gap's values: run reads again as well, or hold them."""
        gaps = self.gaps
        op, stage = int(gaps.op[slot]), int(gaps.next_use[slot])
        relief = int(gaps.bytes[slot])
        best, least = None, math.inf
        if not relief:
            return None, math.inf
        for hold in (False, True):
            eviction = plan_eviction(self.state, op, stage, hold, limit, relief)
            score = self._price(eviction, stage, worst, relief)
            if score < least:
                best, least = eviction, score
            if len(eviction.add) == 1:
                break
        return best, least

    def _price(self, eviction: Eviction, stage: int, worst: int, relief: int) -> float:
        """Added time per byte relieved at the highest stage."""
        state = self.state
        for value in eviction.held_longer:
            if state.held_until(value, stage) < worst:
                relief -= state.model.bytes[value]
        return max(eviction.added_time, 1e-9) / relief if relief > 0 else math.inf

    def _lowers(self, eviction: Eviction, worst: int, limit: int) -> bool:
        self.change(eviction.add, eviction.remove)
        before, after = self.journal[-1].peak, self.state.peak
        if after[worst] < limit and not ((after >= limit) & (after > before)).any():
            return True
        self.roll_back(len(self.journal) - 1)
        return False

    # -- keep ------------------------------------------------------------------------------

    def keep(self, run: ExtraRun, limit: int) -> bool:
        """Leave out an extra run, and what only it needed, if the peak stays within limit."""
        state, done, (op, stage) = self.state, list[Undo](), run
        # Whether the values fit between the stages; those that use them are not looked at.
        since = max(state.held_until(value, stage) for value in self.gaps.values[op])
        if not fits_without(state, op, bisect_left(state.runs[op], stage), since, limit + 1):
            return False
        runs: tuple[ExtraRun, ...] = (run,)
        while runs:
            done.append(state.change((), runs))
            runs = unread_after(state, runs)
        if state.max_peak() > limit:
            # The gap table does not know of the change yet, so only the state is reverted.
            for undo in reversed(done):
                state.revert(undo)
            return False
        self.journal += done
        self.gaps.refresh(self._touched(gone for undo in done for gone in undo.removed))
        return True

    def remove_runs(self, runs: tuple[ExtraRun, ...]) -> None:
        """Leave out extra runs and all that nothing reads any more."""
        while runs:
            self.change((), runs)
            runs = unread_after(self.state, runs)

    def keep_what_fits(self, limit: int, runs: Iterable[ExtraRun] | None = None) -> None:
        """Leave out every extra run without which the peak stays within the limit.

        The runs of most time per byte come first.
        """
        state, time_per_byte = self.state, self.state.model.time_per_byte
        todo = list(state.all_extra() if runs is None else runs)
        todo.sort(key=lambda run: -time_per_byte[run[0]])
        for op, stage in todo:
            if op in state.extra[stage]:
                self.keep((op, stage), limit)


def path_work(ops: int) -> int:
    """Work of one eviction path: less per op for larger problems."""
    per_op = constants.WORK_PER_OP
    return min(per_op * ops, constants.WORK + per_op // 10 * ops)


def level_work(ops: int) -> int:
    """Work of the repairs at one peak: a sixteenth of nearly that of a path."""
    most = 9 * constants.WORK // 10 + constants.WORK_PER_OP // 20 * ops
    return min(constants.WORK // 100 * ops, most) // constants.LEVELS


def descend(search: EditableSchedule, front: ParetoFront, target: int, work: int) -> None:
    """Evict until the peak is at most ``target`` bytes, no eviction helps or ``work`` is done.

    States on the way are offered to the front.
    """
    state = search.state
    grain = state.max_peak() // 512  # what lies closer together makes no other plan
    offered = state.max_peak() + grain + 1
    steps, next_keep = 0, constants.KEEP_EVERY
    while state.max_peak() > target and state.work < work:
        if state.max_peak() < offered - grain:
            offered = state.max_peak()
            front.offer(state)
        if not (search.evict() or (search.gaps.unblock() and search.evict())):
            break
        steps += 1
        if steps >= next_keep:
            search.keep_what_fits(state.max_peak())
            next_keep = steps + max(
                constants.KEEP_EVERY, len(state.all_extra()) // (3 * constants.KEEP_EVERY + 1)
            )
        search.commit()
    search.keep_what_fits(state.max_peak())
    search.commit()
    front.offer(state)


def descend_from_store_all(
    front: ParetoFront, target: int, works: Iterable[int], deadline: Deadline
) -> None:
    """Paths from store-all, one with each weight of a gap's length in its rank."""
    front.offer(StageSchedule(front.model))
    for length, work in zip(constants.HALVES, works, strict=False):
        if deadline.running() and front.model.n:
            descend(EditableSchedule(StageSchedule(front.model), length), front, target, work)

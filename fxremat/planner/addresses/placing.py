"""Offsets for all buffers: greedy orders first, then searches for less.

Parts of time across which nothing is alive are placed alone, all from offset 0. A part that fits
the goal is not worked on any more; nor is one that fits what another part needs anyhow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from fxremat.core.addresses import Buffer, Placement
from fxremat.planner.addresses import exact, tuning
from fxremat.planner.addresses.greedy import orders, place_in_order
from fxremat.planner.addresses.restarts import search_within
from fxremat.planner.addresses.search import Outcome
from fxremat.planner.addresses.sections import Sections, split_into_sections
from fxremat.planner.deadline import Deadline


def place(
    buffers: Sequence[Buffer],
    *,
    capacity_bytes: int | None = None,
    effort: int = tuning.EFFORT,
    time_limit_s: float | None = None,
) -> Placement:
    """Offsets in an arena that is as small as was found; small enough if it fits the capacity.

    ``effort`` bounds the search for each part of time (`fxremat.planner.addresses.tuning`); 0
    leaves what the greedy orders give. The same buffers, capacity and effort give the same
    placement, unless the time limit in seconds cuts the search off. Where nothing found fits the
    capacity, the smallest arena is returned: the caller compares. Raises `ValueError` where two
    buffers have one name.
    """
    if len({buffer.name for buffer in buffers}) < len(buffers):
        raise ValueError("two buffers have one name; an offset is found by name")
    deadline = Deadline(time_limit_s)
    drafts = [_Draft.begin(part) for part in split_into_sections(buffers)]
    goal = max([capacity_bytes or 0, *(draft.sections.least_bytes for draft in drafts)])
    drafts = [draft.by_greedy(goal, deadline) for draft in drafts]
    offset_bytes = {buffer.name: 0 for buffer in buffers}
    arena_bytes = 0
    for draft in sorted(drafts, key=lambda draft: -draft.arena_bytes):
        better = draft.by_search(goal, effort, deadline)
        goal = max(goal, better.arena_bytes)
        arena_bytes = max(arena_bytes, better.arena_bytes)
        offset_bytes.update(zip(better.sections.names, better.offsets, strict=True))
    return Placement(offset_bytes, arena_bytes)


@dataclass(frozen=True)
class _Draft:
    """The best offsets of a part so far, in bytes; at first, one buffer above the other."""

    sections: Sections
    offsets: tuple[int, ...]
    arena_bytes: int

    @staticmethod
    def begin(sections: Sections) -> _Draft:
        offsets, top = [], 0
        for size, alignment in zip(sections.size, sections.alignment, strict=True):
            offsets.append(top + -top % alignment)
            top = offsets[-1] + size
        return _Draft(sections, tuple(offsets), top)

    def or_better(self, offsets: Sequence[int]) -> _Draft:
        """This, or these offsets if their arena is smaller."""
        tops = map(sum, zip(offsets, self.sections.size, strict=True))
        arena_bytes = max(tops, default=0)
        if arena_bytes >= self.arena_bytes:
            return self
        return _Draft(self.sections, tuple(offsets), arena_bytes)

    def by_greedy(self, goal: int, deadline: Deadline) -> _Draft:
        """The best of the greedy orders; the first that reaches the goal is enough."""
        best, count = self, len(self.offsets)
        rounds = max(1, tuning.GREEDY_BUFFERS // count)
        for order, best_fit in list(product(orders(self.sections).values(), (False, True)))[
            :rounds
        ]:
            if best.arena_bytes <= goal or not deadline.running():
                break
            best = best.or_better(place_in_order(self.sections, order, best_fit))
        return best

    def by_search(self, goal: int, effort: int, deadline: Deadline) -> _Draft:
        """Search for the goal; where it is out of reach, for an arena as near to it as can be."""
        spans = zip(self.sections.begin, self.sections.end, strict=True)
        if self.arena_bytes <= goal or effort <= 0:
            return self
        if sum(end - begin for begin, end in spans) > tuning.SEARCH_SECTIONS:
            return self
        best, is_proven = _Descent(self, goal, effort, deadline).run()
        if is_proven or len(self.offsets) > tuning.EXACT_BUFFERS:
            return best
        unit = _unit(best.sections)
        found = exact.place_exactly(
            best.sections, best.arena_bytes, unit, tuning.EXACT_NODES, deadline
        )
        return best if found is None else best.or_better(found.offsets)


class _Descent:
    """Arenas between one that is too small, as far as known, and one that was found."""

    def __init__(self, draft: _Draft, goal: int, effort: int, deadline: Deadline) -> None:
        self.best = draft
        self.unit = _unit(draft.sections)
        self.low = goal // self.unit * self.unit
        self.effort, self.left = effort, effort
        self.deadline = deadline
        self.is_proven = len(set(draft.sections.alignment)) == 1

    def run(self) -> tuple[_Draft, bool]:
        """The best offsets, and whether it is proven that nothing between them and the goal is."""
        if self._reaches(self.low, int(self.effort * tuning.GOAL_PART)):
            return self.best, True
        while self.left > 0 and self.deadline.running():
            steps = (self.best.arena_bytes - self.low) // self.unit
            if steps <= 1:
                return self.best, self.is_proven
            middle = self.low + steps // 2 * self.unit
            part = int(self.effort * (1 - tuning.GOAL_PART)) // tuning.BETWEEN_PARTS
            if not self._reaches(middle, min(self.left, part + 1)):
                self.low = middle
        return self.best, False

    def _reaches(self, capacity: int, effort: int) -> bool:
        """Whether the search finds offsets within the capacity."""
        found = search_within(self.best.sections, capacity, effort, self.deadline)
        self.left -= found.effort
        if found.outcome is Outcome.FOUND:
            self.best = self.best.or_better(found.offsets)
            return True
        self.is_proven = self.is_proven and found.outcome is Outcome.IMPOSSIBLE
        return False


def _unit(sections: Sections) -> int:
    """The offsets of a placement that is pressed down are multiples of it."""
    return math.gcd(*sections.size, *sections.alignment)

"""Offsets for all buffers: greedy orders first, then searches for less.

Parts of time across which nothing is alive are placed alone, all from offset 0. A part that fits
the goal is not worked on any more; nor is one that fits what another part needs anyhow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.placing import exact, limits
from benchmarks.placing.restarts import search_within
from benchmarks.placing.search import Outcome
from fxremat.core.layout import Buffer, Placement
from fxremat.planner.addresses import Draft, Sections, drafts_of, placement
from fxremat.planner.deadline import Deadline


def place(
    buffers: Sequence[Buffer],
    *,
    capacity_bytes: int | None = None,
    effort: int = limits.EFFORT,
    time_limit_s: float | None = None,
) -> Placement:
    """Offsets in an arena that is as small as was found; small enough if it fits the capacity.

    ``effort`` bounds the search for each part of time (`benchmarks.placing.limits`); 0
    leaves what the greedy orders give. The same buffers, capacity and effort give the same
    placement, unless the time limit in seconds cuts the search off. Where nothing found fits the
    capacity, the smallest arena is returned: the caller compares. Raises `ValueError` where two
    buffers have one name.
    """
    deadline, drafts = Deadline(time_limit_s), drafts_of(buffers)
    goal = max([capacity_bytes or 0, *(draft.sections.least_bytes for draft in drafts)])
    drafts = [draft.by_greedy(goal) for draft in drafts]
    found = []
    for draft in sorted(drafts, key=lambda draft: -draft.arena_bytes):
        better = _by_search(draft, goal, effort, deadline)
        goal = max(goal, better.arena_bytes)
        found.append(better)
    return placement(buffers, found)


def _by_search(draft: Draft, goal: int, effort: int, deadline: Deadline) -> Draft:
    """Search for the goal; where it is out of reach, for an arena as near to it as can be."""
    spans = zip(draft.sections.begin, draft.sections.end, strict=True)
    if draft.arena_bytes <= goal or effort <= 0:
        return draft
    if sum(end - begin for begin, end in spans) > limits.SEARCH_SECTIONS:
        return draft
    best, is_proven = _Descent(draft, goal, effort, deadline).run()
    if is_proven or len(draft.offsets) > limits.EXACT_BUFFERS:
        return best
    unit = _unit(best.sections)
    found = exact.place_exactly(best.sections, best.arena_bytes, unit, limits.EXACT_NODES, deadline)
    return best if found is None else best.or_better(found.offsets)


class _Descent:
    """Arenas between one that is too small, as far as known, and one that was found."""

    def __init__(self, draft: Draft, goal: int, effort: int, deadline: Deadline) -> None:
        self.best = draft
        self.unit = _unit(draft.sections)
        self.low = goal // self.unit * self.unit
        self.effort, self.left = effort, effort
        self.deadline = deadline
        self.is_proven = len(set(draft.sections.alignment)) == 1

    def run(self) -> tuple[Draft, bool]:
        """The best offsets, and whether it is proven that nothing between them and the goal is."""
        if self._reaches(self.low, int(self.effort * limits.GOAL_PART)):
            return self.best, True
        while self.left > 0 and self.deadline.running():
            steps = (self.best.arena_bytes - self.low) // self.unit
            if steps <= 1:
                return self.best, self.is_proven
            middle = self.low + steps // 2 * self.unit
            part = int(self.effort * (1 - limits.GOAL_PART)) // limits.BETWEEN_PARTS
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

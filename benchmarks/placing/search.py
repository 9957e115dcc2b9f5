"""Whether the buffers of a part fit a capacity, by branch and bound over valleys.

Every placement can be pressed down until no buffer can go lower. One that is pressed down is a
series of choices at valleys (`fxremat.planner.addresses.valleys`). The search takes the valley that
leaves the fewest choices; any valley will do, as the others are not touched by it.

What lies between two walls does not depend on the rest. So the regions that a choice leaves are
solved one after the other, and where one has no solution the search goes back to the choice that
made it, past all choices in regions that have been solved. Sections, canonical placements and the
decomposition on the way are ideas of Moffitt's "MiniMalloc" (ASPLOS 2023); there, buffers are
placed in the order of their offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from benchmarks.placing import limits
from benchmarks.placing.skyline import NOTHING, Choices, Region, Segment, Skyline
from benchmarks.placing.valleys import Valleys
from fxremat.planner.addresses import Sections
from fxremat.planner.deadline import Deadline

LOOK = 256
"""Tries between two looks at the clock."""


class Outcome(Enum):
    """Of a search."""

    FOUND = "found"
    IMPOSSIBLE = "impossible"
    """All alignments equal, it is proven that the buffers do not fit."""
    STOPPED = "stopped"


@dataclass(slots=True, eq=False)
class _Task:
    """A region to solve at its valley ``at``, made by a choice of frame ``parent``."""

    region: Region
    at: int
    choices: Choices
    parent: int
    rest: _Task | None


@dataclass(slots=True, eq=False)
class _Frame:
    """A task under way: how many of its choices were tried, and the trail before it."""

    task: _Task
    mark: int
    tried: int = 0


class Search:
    """One search; ``tries`` counts the places that it tried, ``effort`` adds the looks for them."""

    def __init__(
        self, sections: Sections, capacity: int, valleys: Valleys, rank: Sequence[int]
    ) -> None:
        self.skyline = Skyline(sections, capacity)
        self.valleys = valleys
        self.rank = rank
        self.tries = 0
        self.looks = 0
        self._looks_before = valleys.looks

    @property
    def effort(self) -> int:
        """Of this search, in tries."""
        looks = self.valleys.looks - self._looks_before + self.looks
        return self.tries + looks // limits.LOOKS_PER_EFFORT

    def run(self, most_tries: int, most_effort: int, deadline: Deadline) -> Outcome:
        """Search until the outcome is known, or a limit is reached."""
        skyline = self.skyline
        if min(skyline.slack) < 0:
            return Outcome.IMPOSSIBLE
        task = self._tasks([[Segment(0, len(skyline.slack), 0)]], -1, None)
        frames: list[_Frame] = []
        while task is not None:
            frames.append(_Frame(task, len(skyline.trail)))
            task = None
            while frames:
                if self.tries >= most_tries or self.effort >= most_effort:
                    return Outcome.STOPPED
                if self.tries % LOOK == 0 and not deadline.running():
                    return Outcome.STOPPED
                frame = frames[-1]
                if self._is_exhausted(frame):
                    del frames[frame.task.parent + 1 :]
                    continue
                regions = self._try_next(frame)
                if not regions and frame.task.rest is None:
                    return Outcome.FOUND
                task = self._tasks(regions, len(frames) - 1, frame.task.rest)
                if task is not None:
                    break
        return Outcome.IMPOSSIBLE

    def _is_exhausted(self, frame: _Frame) -> bool:
        return frame.tried == len(frame.task.choices.buffers)

    def _try_next(self, frame: _Frame) -> list[Region]:
        """Make the frame's next choice."""
        task = frame.task
        self.skyline.undo(frame.mark)
        self.tries += 1
        frame.tried += 1
        buffer = task.choices.buffers[frame.tried - 1]
        if buffer != NOTHING:
            sections = self.skyline.sections
            self.looks += sections.end[buffer] - sections.begin[buffer]
        return self.skyline.put(task.region, task.at, buffer, task.choices.from_right)

    def _tasks(self, regions: list[Region], parent: int, rest: _Task | None) -> _Task | None:
        """The regions before the rest, those with few choices first; None where one has none."""
        picked = []
        for region in regions:
            found = self._tightest_valley(region)
            if found is None:
                return None
            picked.append((region, *found))
        picked.sort(key=lambda pick: -len(pick[2].buffers))
        for region, at, choices in picked:
            rest = _Task(region, at, choices, parent, rest)
        return rest

    def _tightest_valley(self, region: Region) -> tuple[int, Choices] | None:
        """The valley with the fewest choices, the lowest of these; None where one has no choice."""
        skyline = self.skyline
        best: tuple[int, Choices] | None = None
        best_key = (0, 0)
        self.looks += len(region)
        for at, segment in enumerate(region):
            left, right = skyline.ends_of(region, at)
            if left < segment.height or right < segment.height:
                continue
            choices = segment.choices
            if choices is None or segment.left != left or segment.right != right:
                segment.left, segment.right = left, right
                choices = segment.choices = self.valleys.choices(skyline, segment, self.rank)
            count = len(choices.buffers)
            if not count:
                return None
            if best is None or (count, segment.height) < best_key:
                best, best_key = (at, choices), (count, segment.height)
            if count == 1:
                break
        return best

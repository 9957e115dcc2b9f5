"""The state of the search: how high each section is filled, and how much of it may stay empty.

Sections next to each other that are filled to one height are a segment. What is put on a segment
makes new segments. Segments are never changed, so that a step back forgets the new ones only.

``slack`` of a section is the capacity less its height and less the sizes still to come there. It
falls only where bytes are given up for good. A section in which nothing is to come is a wall. Walls
part the rest into regions, and no buffer lies in two regions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fxremat.planner.addresses import Sections

NOTHING = -1
"""Instead of a buffer: none starts at the height of the valley."""


class Choices(NamedTuple):
    """What may be the first thing at the height of a valley, seen from its left or right end."""

    from_right: bool
    buffers: list[int]


@dataclass(slots=True, eq=False)
class Segment:
    """Sections ``begin <= section < end`` that are filled to ``height`` bytes.

    ``choices`` are those of a valley between the heights ``left`` and ``right``. Nothing else that
    they depend on changes while the segment exists: only a valley is acted upon.
    """

    begin: int
    end: int
    height: int
    left: int = -1
    right: int = -1
    choices: Choices | None = None


Region = list[Segment]
"""Segments from wall to wall."""


class Skyline:
    """Which buffers are placed, where, and what that leaves."""

    def __init__(self, sections: Sections, capacity: int) -> None:
        self.sections = sections
        self.capacity = capacity
        self.slack = [capacity - live for live in sections.live_bytes]
        self.to_come = _counts(sections)
        self.free = [True] * len(sections.size)
        self.offset = [0] * len(sections.size)
        self.trail: list[tuple[int, int, int, int]] = []

    def ends_of(self, region: Region, at: int) -> tuple[int, int]:
        """The heights on the left and the right of a segment; walls reach up to the capacity."""
        left = region[at - 1].height if at else self.capacity
        right = region[at + 1].height if at + 1 < len(region) else self.capacity
        return left, right

    def put(self, region: Region, at: int, buffer: int, from_right: bool) -> list[Region]:
        """Put a buffer, or nothing, on the valley; the regions that its region becomes.

        The sections between the buffer and the end from which it was chosen are given up, up to
        where the buffer or the neighbour ends.
        """
        valley = region[at]
        left, right = self.ends_of(region, at)
        if buffer == NOTHING:
            height = min(left, right)
            self._give_up(valley.begin, valley.end, height - valley.height)
            pieces = [(valley.begin, valley.end, height)]
        else:
            end = right if from_right else left
            pieces = self._put_buffer(valley, buffer, from_right, end)
        return self._rebuild(region, at, pieces)

    def undo(self, mark: int) -> None:
        """Take back what was done since the trail had ``mark`` entries."""
        trail, slack, to_come = self.trail, self.slack, self.to_come
        while len(trail) > mark:
            buffer, begin, end, nbytes = trail.pop()
            if buffer == NOTHING:
                for section in range(begin, end):
                    slack[section] += nbytes
            else:
                self.free[buffer] = True
                for section in range(begin, end):
                    to_come[section] += 1

    def _give_up(self, begin: int, end: int, nbytes: int) -> None:
        """Bytes of these sections stay empty."""
        slack = self.slack
        for section in range(begin, end):
            slack[section] -= nbytes
        self.trail.append((NOTHING, begin, end, nbytes))

    def _put_buffer(
        self, valley: Segment, buffer: int, from_right: bool, neighbour: int
    ) -> list[tuple[int, int, int]]:
        """Begin, end and height of what the valley becomes, from left to right."""
        sections, height = self.sections, valley.height
        begin, end = sections.begin[buffer], sections.end[buffer]
        padding = -height % sections.alignment[buffer]
        if padding:
            self._give_up(begin, end, padding)
        top = height + padding + sections.size[buffer]
        self.free[buffer] = False
        self.offset[buffer] = height + padding
        self.trail.append((buffer, begin, end, 0))
        raised = min(neighbour, top)
        pieces = self._covered(begin, end, top)
        if valley.begin < begin:
            if not from_right:
                self._give_up(valley.begin, begin, raised - height)
            pieces.insert(0, (valley.begin, begin, height if from_right else raised))
        if end < valley.end:
            if from_right:
                self._give_up(end, valley.end, raised - height)
            pieces.append((end, valley.end, raised if from_right else height))
        return pieces

    def _covered(self, begin: int, end: int, top: int) -> list[tuple[int, int, int]]:
        """The sections of a buffer that was put: those where nothing is to come become walls."""
        to_come, pieces, first = self.to_come, [], begin
        for section in range(begin, end):
            to_come[section] -= 1
            if not to_come[section]:
                if first < section:
                    pieces.append((first, section, top))
                pieces.append((section, section + 1, self.capacity))
                first = section + 1
        if first < end:
            pieces.append((first, end, top))
        return pieces

    def _rebuild(self, region: Region, at: int, pieces: list[tuple[int, int, int]]) -> list[Region]:
        """The pieces instead of a valley: walls part the region, equal heights are joined."""
        regions: list[Region] = []
        current = region[:at]
        for begin, end, height in pieces:
            if height == self.capacity:
                if current:
                    regions.append(current)
                current = []
            elif current and current[-1].height == height:
                current[-1] = Segment(current[-1].begin, end, height)
            else:
                current.append(Segment(begin, end, height))
        rest = region[at + 1 :]
        if rest and current and current[-1].height == rest[0].height:
            joined = Segment(current.pop().begin, rest[0].end, rest[0].height)
            rest = [joined, *rest[1:]]
        current += rest
        return [*regions, current] if current else regions


def _counts(sections: Sections) -> list[int]:
    """How many buffers are alive in each section."""
    counts = [0] * (sections.count + 1)
    for begin, end in zip(sections.begin, sections.end, strict=True):
        counts[begin] += 1
        counts[end] -= 1
    for section in range(1, len(counts)):
        counts[section] += counts[section - 1]
    return counts[:-1]

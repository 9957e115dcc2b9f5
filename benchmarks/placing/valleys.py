"""What may happen at a valley: a segment that is lower than both of its neighbours.

Only buffers that lie within a valley can start at its height. So the first buffer at that height,
seen from one end of the valley, is one of these, or there is none. What is left out on the way
stays empty, up to where the buffer or the neighbour ends: a buffer that reaches beyond the valley
lies above the neighbour. Bytes that stay empty come off the slack of their sections, which never
falls below zero. Where sections have no slack, this leaves very few choices.

A choice is left out where a buffer would fit into the bytes that it gives up. That loses nothing:
moved there, the buffer lies lower, and of all placements one has the least sum of offsets. This
is the dominance rule of Moffitt's "MiniMalloc" (ASPLOS 2023), for one valley at a time. Of buffers
that are alike only the first one left is a choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.placing.skyline import NOTHING, Choices, Segment, Skyline
from fxremat.planner.addresses import Sections

_Key = tuple[int, int, int, int]


class Valleys:
    """The choices at valleys; ``looks`` counts the sections looked at for them."""

    def __init__(self, sections: Sections) -> None:
        self.sections = sections
        self.starting: list[list[int]] = [[] for _ in range(sections.count)]
        self.ending: list[list[int]] = [[] for _ in range(sections.count)]
        for buffer, (begin, end) in enumerate(zip(sections.begin, sections.end, strict=True)):
            self.starting[begin].append(buffer)
            self.ending[end - 1].append(buffer)
        self.least_size = min(sections.size)
        self.twin = _twins(sections)
        self.looks = 0

    def choices(self, skyline: Skyline, valley: Segment, rank: Sequence[int]) -> Choices:
        """From the end that has fewer of them; the most promising first, nothing last.

        Of two buffers that promise as much, the one of lower ``rank`` is tried first.
        """
        from_left = self._first_buffers(skyline, valley, rank, False)
        from_right = self._first_buffers(skyline, valley, rank, True) if from_left else []
        turned = len(from_right) < len(from_left)
        buffers = [key[-1] for key in sorted(from_right if turned else from_left)]
        if self._may_stay_empty(skyline, valley):
            buffers.append(NOTHING)
        return Choices(turned, buffers)

    def _may_stay_empty(self, skyline: Skyline, valley: Segment) -> bool:
        """Whether the slack allows it, and no buffer fits in."""
        rise = min(valley.left, valley.right) - valley.height
        if min(skyline.slack[valley.begin : valley.end]) < rise:
            return False
        self.looks += valley.end - valley.begin
        sections, height = self.sections, valley.height
        return not any(
            sections.size[buffer] + -height % sections.alignment[buffer] <= rise
            for section in range(valley.begin, valley.end)
            for buffer in self.starting[section]
            if skyline.free[buffer] and sections.end[buffer] <= valley.end
        )

    def _within(
        self, skyline: Skyline, valley: Segment, section: int, from_right: bool
    ) -> Iterator[int]:
        """The buffers that lie in the valley and, seen from its end, begin in the section."""
        free, begin, end = skyline.free, self.sections.begin, self.sections.end
        if from_right:
            for buffer in self.ending[section]:
                if free[buffer] and begin[buffer] >= valley.begin:
                    yield buffer
        else:
            for buffer in self.starting[section]:
                if free[buffer] and end[buffer] <= valley.end:
                    yield buffer

    def _first_buffers(
        self, skyline: Skyline, valley: Segment, rank: Sequence[int], from_right: bool
    ) -> list[_Key]:
        """Buffers that may be the first seen from one end, with a key to sort them by.

        A buffer that ends as high as a neighbour of the valley comes first, then one that gives
        up fewer bytes.
        """
        sections, slack, height = self.sections, skyline.slack, valley.height
        room = (valley.right if from_right else valley.left) - height
        least_rise = min(room, self.least_size)
        limit = skyline.capacity  # the least slack of the sections that are given up
        width = valley.end - valley.begin
        least_until = [room + 1] * (width + 1)  # the smallest buffer that ends there
        least_passed = room + 1  # the smallest that fits in the sections that are given up
        found: list[_Key] = []
        for skipped in range(width):
            least_passed = min(least_passed, least_until[skipped])
            section = valley.end - 1 - skipped if from_right else valley.begin + skipped
            for buffer in self._within(skyline, valley, section, from_right):
                begin, end = sections.begin[buffer], sections.end[buffer]
                padding = -height % sections.alignment[buffer]
                tall = padding + sections.size[buffer]
                rise = min(room, tall) if skipped else 0
                far = valley.end - begin if from_right else end - valley.begin
                twin = self.twin[buffer]
                if (
                    rise <= limit
                    and not (twin >= 0 and skyline.free[twin])
                    and rise < least_passed
                    and not (padding and min(slack[begin:end]) < padding)
                ):
                    top = height + tall
                    flush = (begin == valley.begin and top == valley.left) + (
                        end == valley.end and top == valley.right
                    )
                    found.append((-flush, rise * skipped, rank[buffer], buffer))
                least_until[far] = min(least_until[far], tall)
            limit = min(limit, slack[section])
            if limit < least_rise:
                break
        self.looks += skipped + 1
        return found


def _twins(sections: Sections) -> list[int]:
    """For each buffer, the one before it that is alike in all respects; -1 where there is none."""
    last: dict[tuple[int, int, int, int], int] = {}
    twins = []
    columns = (sections.begin, sections.end, sections.size, sections.alignment)
    for buffer, kind in enumerate(zip(*columns, strict=True)):
        twins.append(last.get(kind, -1))
        last[kind] = buffer
    return twins

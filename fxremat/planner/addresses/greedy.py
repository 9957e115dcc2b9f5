"""One buffer after the other, each into a gap that the buffers placed before leave.

The buffers placed so far are kept by offset in arrays. For the next one those are looked at that
are alive with it; a gap is what lies between the highest end so far and the next offset. One
buffer takes a few array operations, so that 20,000 buffers take seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fxremat.planner.addresses.sections import Sections

Ints = npt.NDArray[np.int64]


def place_in_order(sections: Sections, order: Sequence[int], best_fit: bool) -> list[int]:
    """The offset of every buffer, in bytes; the gap is the smallest that fits, or the lowest."""
    placed = _Placed(len(order))
    offsets = [0] * len(order)
    for index in order:
        begin, end = sections.begin[index], sections.end[index]
        size, alignment = sections.size[index], sections.alignment[index]
        offsets[index] = placed.gap_for(begin, end, size, alignment, best_fit)
        placed.insert(begin, end, offsets[index], offsets[index] + size)
    return offsets


def orders(sections: Sections) -> dict[str, list[int]]:
    """Ways to put the buffers in order, by name: what is hard to place comes first.

    ``contention`` is the most bytes alive in a section of the buffer.
    """
    begin, end, size = sections.begin, sections.end, sections.size
    span = [last - first for first, last in zip(begin, end, strict=True)]
    crowd = _contention(sections)
    indices = range(len(size))
    return {
        "size": sorted(indices, key=lambda i: (-size[i], -span[i], i)),
        "area": sorted(indices, key=lambda i: (-size[i] * span[i], i)),
        "lifetime": sorted(indices, key=lambda i: (-span[i], -size[i], i)),
        "contention": sorted(indices, key=lambda i: (-crowd[i], -span[i], -size[i], i)),
        "contention and size": sorted(indices, key=lambda i: (-crowd[i], -size[i], i)),
    }


def _contention(sections: Sections) -> list[int]:
    """The most bytes alive in any section of each buffer, by a table of doubled widths."""
    table = [np.array(sections.live_bytes, dtype=np.int64)]
    width = 1
    while 2 * width <= sections.count:
        last = table[-1]
        table.append(np.maximum(last[:-width], last[width:]))
        width *= 2
    most = []
    for begin, end in zip(sections.begin, sections.end, strict=True):
        level = (end - begin).bit_length() - 1
        row = table[level]
        most.append(int(max(row[begin], row[end - (1 << level)])))
    return most


class _Placed:
    """Buffers that have an offset, in the order of their offsets."""

    def __init__(self, most: int) -> None:
        self.count = 0
        self.rows = np.zeros((4, most), dtype=np.int64)

    def gap_for(self, begin: int, end: int, size: int, alignment: int, best_fit: bool) -> int:
        """The offset of a gap that takes ``size`` bytes in the sections from begin to end."""
        begins, ends, offsets, tops = self.rows[:, : self.count]
        beside = np.flatnonzero((begins < end) & (ends > begin))
        if not len(beside):
            return 0
        reached = np.maximum.accumulate(tops[beside])
        highest = int(reached[-1])
        starts = np.empty_like(reached)
        starts[0], starts[1:] = 0, reached[:-1]
        if alignment > 1:
            starts += -starts % alignment
        room = offsets[beside] - starts
        fits = np.flatnonzero(room >= size)
        if not len(fits):
            return highest + -highest % alignment
        chosen = fits[np.argmin(room[fits])] if best_fit else fits[0]
        return int(starts[chosen])

    def insert(self, begin: int, end: int, offset: int, top: int) -> None:
        """Remember a buffer at its offset."""
        rows, count = self.rows, self.count
        at = int(np.searchsorted(rows[2, :count], offset, side="right"))
        rows[:, at + 1 : count + 1] = rows[:, at:count]
        rows[:, at] = (begin, end, offset, top)
        self.count += 1

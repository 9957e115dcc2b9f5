"""An arena for a part of the buffers, where the allocator that takes the rest leaves no gaps.

An arena is held all the time, so what lies outside of it adds its own peak, and each gap in it at
the peak adds bytes. On a CPU, where what is freed is gone, total bytes are to stay within the peak
of what is alive. Then the buffers that are alive at the peak have to fill the arena, and what is
outside of it may at no step be more than at that one. Both hold if nothing is placed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from fxremat.core.addresses import Buffer, Placement, live_peak
from fxremat.planner import constants
from fxremat.planner.addresses import Placed, in_sections, orders, place


def place_within_peak(buffers: Sequence[Buffer], others: Sequence[Buffer]) -> Placement:
    """Offsets of as many of the buffers as may lie in an arena that is held all the time.

    The arena and, at each step, what is not placed and the ``others`` are together at most the
    peak of all that is alive. Where not everything can be placed, larger and larger parts of what
    is alive at the peak are left out. The placement does not name what is left out. Sizes outside
    of the arena are not padded.
    """
    fixed = [replace(one, alignment_bytes=1) for one in others]
    everything = sorted([*buffers, *fixed], key=lambda one: (one.begin, one.end, one.name))
    solid = [one for one in everything if one.size_bytes]
    peak = live_peak(replace(one, alignment_bytes=1) for one in solid)
    all_placed = place(buffers)
    if all_placed.arena_bytes + live_peak(fixed) <= peak:
        return all_placed
    arena = _WithinPeak(solid, {one.name for one in fixed}, peak)
    for part in constants.PARTS_OUTSIDE:
        found = arena.with_outside(part)
        if found is not None:
            return found
    return Placement({}, 0)


class _WithinPeak:
    """Buffers in an arena or beside it; ``fixed`` are the names of those that cannot lie in it."""

    def __init__(self, buffers: Sequence[Buffer], fixed: Collection[str], peak: int) -> None:
        self.sections, self.peak = in_sections(buffers), peak
        self.bytes = [one.size_bytes for one in buffers]
        self.is_fixed = [one.name in fixed for one in buffers]
        self.outside = np.zeros(self.sections.count, dtype=np.int64)
        live = np.zeros(self.sections.count, dtype=np.int64)
        for index, size in enumerate(self.bytes):
            live[self._span(index)] += size
            self.outside[self._span(index)] += size * self.is_fixed[index]
        self.at_peak = int(np.argmax(live))

    def with_outside(self, part: float) -> Placement | None:
        """With more than this part of the peak outside: of what is alive then.

        First come sizes that are no multiples of the alignment, then what is not there when much
        is outside anyhow. That others need their own peak is no part of it.
        """
        sections, at, outside = self.sections, self.at_peak, self.outside.copy()
        there = [k for k in self._movable() if sections.begin[k] <= at < sections.end[k]]
        most = {k: int(self.outside[self._span(k)].max()) for k in there}
        there.sort(key=lambda k: (self.bytes[k] == sections.size[k], most[k], -sections.begin[k]))
        least, out = int(part * self.peak), dict[int, None]()
        for k in there:
            beyond = int(outside.max()) - int(outside[at])
            enough = outside[at] - self.outside[at] >= least and not beyond
            if enough and self.bytes[k] == sections.size[k]:
                break
            out[k] = None
            outside[self._span(k)] += self.bytes[k]
        room = int(outside[at])
        if room < int(outside.max()):
            return None
        for order, best_fit in product(orders(sections).values(), (False, True)):
            found = self._placed(order, best_fit, room, out)
            if found is not None:
                return Placement(found, self.peak - room)
        return None

    def _placed(
        self, order: Sequence[int], best_fit: bool, room: int, out: Collection[int]
    ) -> dict[str, int] | None:
        """Offsets by name; None where something fits neither the arena nor the room beside it."""
        sections, capacity, offsets = self.sections, self.peak - room, dict[str, int]()
        outside, placed = self.outside.copy(), Placed(len(order))
        for k in (*out, *(k for k in order if k not in out and not self.is_fixed[k])):
            begin, end, size = sections.begin[k], sections.end[k], sections.size[k]
            at = placed.gap_for(begin, end, size, sections.alignment[k], best_fit)
            if k not in out and at + size <= capacity:
                placed.insert(begin, end, at, at + size)
                offsets[sections.names[k]] = at
                continue
            outside[begin:end] += self.bytes[k]
            if int(outside[begin:end].max()) > room:
                return None
        return offsets

    def _movable(self) -> Iterator[int]:
        return (k for k, fixed in enumerate(self.is_fixed) if not fixed)

    def _span(self, index: int) -> slice:
        return slice(self.sections.begin[index], self.sections.end[index])

"""An arena for a part of the buffers; the rest lies with what others allocate outside of it.

An arena is held all the time, so what lies outside adds its own peak, wherever that is. Where much
is outside at other times than at the peak of all, some of what is alive at the peak is better kept
outside, too: then the arena is smaller by as much, and the memory outside is used at both times.

    arena    ▁▃▅▇██▅▃▁▁▁      arena    ▁▃▅▆▆▆▅▃▁▁▁
    outside  ▁▁▁▁▁▁▁▂▃▃▁      outside  ▁▁▁▁▃▃▁▂▃▃▁     less in all
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fxremat.core.layout import Buffer, Placement
from fxremat.planner.addresses import Draft, Ints, Outside, Sections, in_sections, placement
from fxremat.planner.deadline import Deadline


@dataclass(frozen=True)
class PartialArena:
    """Buffers that may lie in an arena, and the ``others``, which do not.

    Outside of the arena sizes are rounded up to multiples of ``unit`` bytes. Names are unique.
    """

    buffers: Sequence[Buffer]
    others: Sequence[Buffer]
    unit: int

    @cached_property
    def peak_bytes(self) -> int:
        """The most that is alive at one step, were all of it outside."""
        return int(self._live_of(range(len(self._all))).max(initial=0))

    @cached_property
    def least_outside(self) -> int:
        """The most of the others that is alive at one step."""
        return int(self._live_of(self._others).max(initial=0))

    def total_bytes(self, placement: Placement) -> int:
        """The arena, and the most that is alive outside of it."""
        found = placement.offset_bytes
        outside = (k for k, one in enumerate(self._all) if one.name not in found)
        return placement.arena_bytes + int(self._live_of(outside).max(initial=0))

    def place(self, part: float) -> Placement:
        """With this part of the peak outside, or so much more that the others have room there.

        What fits neither the arena nor the room outside makes the arena larger. If it is alive at
        the peak, there is a second try with it outside. The placement names what lies in the arena.
        """
        kept, best = self._first_outside(part), Placement({}, sys.maxsize)
        for _ in range(2):
            kept |= self._to_balance(kept)
            live = self._live_of(kept)
            room = int(live.max(initial=0))
            outside = Outside(self.peak_bytes - room, room, live, frozenset(kept), self._bytes)
            draft = Draft(self._sections, (None,) * len(self._all), sys.maxsize)
            draft = draft.by_greedy(outside.goal, Deadline(None), outside)
            found = placement([], [draft])
            if self.total_bytes(found) >= self.total_bytes(best):
                break
            best = found
            pairs = zip(draft.offsets, self._sections.size, strict=True)
            tops = [-1 if offset is None else offset + size for offset, size in pairs]
            kept |= {k for k in self._at_peak if tops[k] > outside.goal}
        return best

    def _first_outside(self, part: float) -> set[int]:
        """The others; of what is alive at the peak all that would leave gaps, and the ``part``.

        The part is first what is not alive at the highest of the other peaks: there it would leave
        a gap, too. Then it is what takes the most bytes for the shortest time.
        """
        sections, live = self._sections, self._live_of(range(len(self._all)))
        before = np.maximum.accumulate(np.append(0, live))
        after = np.maximum.accumulate(np.append(live, 0)[::-1])[::-1]

        def gap(k: int) -> tuple[int, float]:
            """The highest peak of those before and after it, and bytes for each section."""
            begin, end = sections.begin[k], sections.end[k]
            return max(int(before[begin]), int(after[end])), self._bytes[k] / (end - begin)

        unaligned = {k for k in self._at_peak if self._bytes[k] != sections.size[k]}
        kept, left = {*self._others, *unaligned}, int(part * self.peak_bytes)
        for one in sorted(self._at_peak - kept, key=gap, reverse=True):
            if left <= 0:
                break
            kept.add(one)
            left -= self._bytes[one]
        return kept

    def _to_balance(self, kept: Set[int]) -> set[int]:
        """What has to be kept outside, too, so that most is outside at the peak of all."""
        live, at, more = self._live_of(kept), self._peak_section, set[int]()

        def beyond(k: int) -> int:
            """How much more would be outside at another step than at the peak."""
            most = max(int(live.max()), int(live[self._span(k)].max()) + self._bytes[k])
            return most - int(live[at]) - self._bytes[k]

        rest = sorted(self._at_peak - kept)
        while rest and live[at] < live.max():
            one = min(rest, key=beyond)
            if beyond(one) >= live.max() - live[at]:
                break
            rest.remove(one)
            more.add(one)
            live[self._span(one)] += self._bytes[one]
        return more

    @cached_property
    def _all(self) -> list[Buffer]:
        solid = (one for one in (*self.buffers, *self.others) if one.size_bytes)
        return sorted(solid, key=lambda one: (one.begin, one.end, one.size_bytes, one.name))

    @cached_property
    def _bytes(self) -> list[int]:
        """Of each buffer outside of the arena."""
        return [replace(one, alignment_bytes=self.unit).padded_bytes for one in self._all]

    @cached_property
    def _sections(self) -> Sections:
        return in_sections(self._all)

    @cached_property
    def _others(self) -> frozenset[int]:
        names = {one.name for one in self.others}
        return frozenset(k for k, one in enumerate(self._all) if one.name in names)

    @cached_property
    def _peak_section(self) -> int:
        return int(np.argmax(self._live_of(range(len(self._all)))))

    @cached_property
    def _at_peak(self) -> frozenset[int]:
        """What may lie in the arena and is alive at the peak."""
        begin, end, peak = self._sections.begin, self._sections.end, self._peak_section
        there = (k for k in range(len(self._all)) if begin[k] <= peak < end[k])
        return frozenset(there) - self._others

    def _live_of(self, indices: Iterable[int]) -> Ints:
        live = np.zeros(self._sections.count, dtype=np.int64)
        for index in indices:
            live[self._span(index)] += self._bytes[index]
        return live

    def _span(self, index: int) -> slice:
        return slice(self._sections.begin[index], self._sections.end[index])

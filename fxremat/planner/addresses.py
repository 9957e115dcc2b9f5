"""Planned addresses: every buffer of a step at a fixed offset of one arena.

Sizes and lifetimes are known before the step runs, so nothing is left to an allocator, and the
arena can be nearly as small as the bytes alive at the peak. Buffers are put one after the other,
each into a gap that those before it leave, in several orders; the best one counts. One buffer takes
a few array operations, so that 20,000 buffers take seconds. The verifier is
`benchmarks.check_addresses`; a search that fits more of what is made to be hard, but no more of
recorded steps, is `benchmarks.placing`.

Time is cut into sections. A section is a greatest set of buffers that are alive at one step; the
sections are in the order of time. Two buffers are alive at one step exactly if both are in one
section: lifetimes are intervals, and an interval graph is known by its maximal cliques (Fulkerson
and Gross, 1965). There are no more sections than buffers, however long the step is.

`PartialArena` places a part of the buffers, and the rest lies with what others allocate outside.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
import numpy.typing as npt

from fxremat.core.layout import Buffer, Placement
from fxremat.planner import constants
from fxremat.planner.indexed_problem import live_bytes

Ints = npt.NDArray[np.int64]


def place(buffers: Sequence[Buffer]) -> Placement:
    """Offsets in the smallest arena that the greedy orders give.

    Parts of time across which nothing is alive are placed alone, all from offset 0. Raises
    `ValueError` where two buffers have one name.
    """
    drafts = drafts_of(buffers)
    goal = max((draft.sections.least_bytes for draft in drafts), default=0)
    return placement(buffers, [draft.by_greedy(goal) for draft in drafts])


def drafts_of(buffers: Sequence[Buffer]) -> list[Draft]:
    """A draft of each part of time; raises `ValueError` where two buffers have one name."""
    if len({buffer.name for buffer in buffers}) < len(buffers):
        raise ValueError("two buffers have one name; an offset is found by name")
    return [Draft(part) for part in split_into_sections(buffers)]


def placement(buffers: Sequence[Buffer], drafts: Sequence[Draft]) -> Placement:
    """The placement that the drafts of all parts make; buffers without bytes lie at 0."""
    offset_bytes = {buffer.name: 0 for buffer in buffers if not buffer.size_bytes}
    for draft in drafts:
        pairs = zip(draft.sections.names, draft.offsets, strict=True)
        offset_bytes.update((name, offset) for name, offset in pairs if offset is not None)
    return Placement(offset_bytes, max((draft.arena_bytes for draft in drafts), default=0))


@dataclass(frozen=True)
class Draft:
    """The best offsets of a part of time so far, in bytes; None for what lies outside."""

    sections: Sections
    offsets: tuple[int | None, ...] = ()
    arena_bytes: int = sys.maxsize

    def or_better(self, offsets: Sequence[int | None]) -> Draft:
        """This, or these offsets if their arena is smaller."""
        arena_bytes = max(_tops(self.sections, offsets), default=0)
        if arena_bytes >= self.arena_bytes:
            return self
        return Draft(self.sections, tuple(offsets), arena_bytes)

    def by_greedy(self, goal: int, outside: Outside | None = None) -> Draft:
        """The best of the greedy orders; the first that reaches the goal is enough."""
        best = self
        rounds = max(1, constants.ADDRESS_BUFFERS // len(self.sections.names))
        ways = list(product(orders(self.sections).values(), (False, True)))
        for number, (order, best_fit) in enumerate(ways[:rounds]):
            if number and best.arena_bytes <= goal:
                break
            best = best.or_better(place_in_order(self.sections, order, best_fit, outside))
        return best


@dataclass(frozen=True)
class Outside:
    """Memory beside an arena that takes what would reach above the arena's goal.

    It has ``room`` bytes. ``live_bytes`` are there in each section anyhow, among them the buffers
    ``kept`` outside. ``size`` is what each buffer takes there.
    """

    goal: int
    room: int
    live_bytes: Ints
    kept: frozenset[int]
    size: Sequence[int]

    def takes(self, live: Ints, index: int, span: slice) -> bool:
        """Whether the buffer has room in these sections, where so much is live; it is put there."""
        if int(live[span].max()) + self.size[index] > self.room:
            return False
        live[span] += self.size[index]
        return True


def _tops(sections: Sections, offsets: Sequence[int | None]) -> list[int]:
    """The end of each buffer; 0 for what lies outside."""
    pairs = zip(offsets, sections.size, strict=True)
    return [0 if offset is None else offset + size for offset, size in pairs]


@dataclass(frozen=True)
class Sections:
    """Buffers by index: in which sections ``begin <= section < end``, sizes, alignments.

    ``size`` is padded to the alignment. Buffers without bytes are not among them.
    """

    names: tuple[str, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    size: tuple[int, ...]
    alignment: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of sections."""
        return max(self.end, default=0)

    @cached_property
    def live_bytes(self) -> tuple[int, ...]:
        """The sum of the sizes in each section."""
        return tuple(live_bytes(zip(self.begin, self.end, self.size, strict=True), self.count))

    @cached_property
    def least_bytes(self) -> int:
        """No arena is smaller."""
        return max(self.live_bytes, default=0)


def split_into_sections(buffers: Sequence[Buffer]) -> list[Sections]:
    """The buffers in sections, in parts: nothing is alive in two of them."""
    order = _solid(buffers)
    parts: list[list[Buffer]] = []
    alive_until = None
    for buffer in order:
        if alive_until is None or buffer.begin >= alive_until:
            parts.append([])
            alive_until = buffer.end
        parts[-1].append(buffer)
        alive_until = max(alive_until, buffer.end)
    return [in_sections(part) for part in parts]


def _solid(buffers: Iterable[Buffer]) -> list[Buffer]:
    """Those with bytes, in the order of time."""
    solid = (one for one in buffers if one.size_bytes)
    return sorted(solid, key=lambda one: (one.begin, one.end, one.size_bytes, one.name))


def in_sections(buffers: Sequence[Buffer]) -> Sections:
    """A section closes at the first end after a begin."""
    events = [(buffer.begin, 1, index) for index, buffer in enumerate(buffers)]
    events += [(buffer.end, 0, index) for index, buffer in enumerate(buffers)]
    begin, end = [0] * len(buffers), [0] * len(buffers)
    section, grown = 0, False
    for _, begins, index in sorted(events):
        if begins:
            begin[index], grown = section, True
            continue
        section, grown = section + grown, False
        end[index] = section
    return Sections(
        tuple(buffer.name for buffer in buffers),
        tuple(begin),
        tuple(end),
        tuple(buffer.padded_bytes for buffer in buffers),
        tuple(buffer.alignment_bytes for buffer in buffers),
    )


def place_in_order(
    sections: Sections, order: Sequence[int], best_fit: bool, outside: Outside | None = None
) -> list[int | None]:
    """The offset of every buffer, in bytes; the gap is the smallest that fits, or the lowest.

    None for those that lie outside.
    """
    placed = _Placed(len(order))
    offsets: list[int | None] = [None] * len(order)
    live = np.zeros(0, dtype=np.int64) if outside is None else outside.live_bytes.copy()
    for index in order:
        if outside is not None and index in outside.kept:
            continue
        begin, end = sections.begin[index], sections.end[index]
        size, alignment = sections.size[index], sections.alignment[index]
        offset = placed.gap_for(begin, end, size, alignment, best_fit)
        span = slice(begin, end)
        if outside and offset + size > outside.goal and outside.takes(live, index, span):
            continue
        offsets[index] = offset
        placed.insert(begin, end, offset, offset + size)
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
        "contention and size": sorted(indices, key=lambda i: (-crowd[i], -size[i], i)),
        "contention": sorted(indices, key=lambda i: (-crowd[i], -span[i], -size[i], i)),
        "size": sorted(indices, key=lambda i: (-size[i], -span[i], i)),
        "area": sorted(indices, key=lambda i: (-size[i] * span[i], i)),
        "lifetime": sorted(indices, key=lambda i: (-span[i], -size[i], i)),
    }


def _contention(sections: Sections) -> list[int]:
    """The most bytes alive in any section of each buffer."""
    live = np.array((*sections.live_bytes, 0), dtype=np.int64)
    bounds = np.array((sections.begin, sections.end), dtype=np.int64).T.ravel()
    most: list[int] = np.maximum.reduceat(live, bounds)[::2].tolist()
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


# -- a part of the buffers -------------------------------------------------------------------


class PartialArena:
    """An arena for ``buffers``; the rest lies outside with the ``others``, which may not lie in it.

    An arena is held all the time, so what lies outside adds its own peak, wherever that is. Where
    much is outside at other times than at the peak of all, some of what is alive at the peak is
    better kept outside, too: then the arena is smaller by as much, and the memory outside is used
    at both times.

        arena    ▁▃▅▇██▅▃▁▁▁      arena    ▁▃▅▆▆▆▅▃▁▁▁
        outside  ▁▁▁▁▁▁▁▂▃▃▁      outside  ▁▁▁▁▃▃▁▂▃▃▁     less in all

    Outside of the arena sizes are rounded up to multiples of ``unit`` bytes. Names are unique.
    """

    def __init__(self, buffers: Sequence[Buffer], others: Sequence[Buffer], unit: int) -> None:
        self.buffers, self.unit = buffers, unit
        self._all = _solid((*buffers, *others))
        # What each buffer takes outside of the arena.
        self._bytes = [replace(one, alignment_bytes=unit).padded_bytes for one in self._all]
        self._sections, every = in_sections(self._all), range(len(self._all))
        names = {one.name for one in others}
        self._others = {k for k in every if self._all[k].name in names}
        self._live = self._live_of(every)
        self._peak_section = peak = int(np.argmax(np.append(self._live, 0)))
        begin, end = self._sections.begin, self._sections.end
        # What may lie in the arena and is alive at the peak.
        self._at_peak = {k for k in every if begin[k] <= peak < end[k]} - self._others
        self.peak_bytes = int(self._live.max(initial=0))
        """The most that is alive at one step, were all of it outside."""
        self.least_outside = int(self._live_of(self._others).max(initial=0))
        """The most of the others that is alive at one step."""

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
            draft = Draft(self._sections).by_greedy(outside.goal, outside)
            found = placement([], [draft])
            if self.total_bytes(found) >= self.total_bytes(best):
                break
            best = found
            tops = _tops(self._sections, draft.offsets)
            kept |= {k for k in self._at_peak if tops[k] > outside.goal}
        return best

    def _first_outside(self, part: float) -> set[int]:
        """The others; of what is alive at the peak all that would leave gaps, and the ``part``.

        The part is first what is not alive at the highest of the other peaks: there it would leave
        a gap, too. Then it is what takes the most bytes for the shortest time.
        """
        sections, live = self._sections, self._live
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

    def _live_of(self, indices: Iterable[int]) -> Ints:
        begin, end, count = self._sections.begin, self._sections.end, self._sections.count
        spans = ((begin[k], end[k], self._bytes[k]) for k in indices)
        return np.array(live_bytes(spans, count), dtype=np.int64)

    def _span(self, index: int) -> slice:
        return slice(self._sections.begin[index], self._sections.end[index])

"""Planned addresses: every buffer of a step at a fixed offset of one arena.

Sizes and lifetimes are known before the step runs, so nothing is left to an allocator, and the
arena can be nearly as small as the bytes alive at the peak. Buffers are put one after the other,
each into a gap that those before it leave, in several orders; the best one counts. One buffer takes
a few array operations, so that 20,000 buffers take seconds. The verifier is
`fxremat.core.check_addresses`; a search that fits more of what is made to be hard, but no more of
recorded steps, is `benchmarks.placing`.

Time is cut into sections. A section is a greatest set of buffers that are alive at one step; the
sections are in the order of time. Two buffers are alive at one step exactly if both are in one
section: lifetimes are intervals, and an interval graph is known by its maximal cliques (Fulkerson
and Gross, 1965). There are no more sections than buffers, however long the step is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import numpy.typing as npt

from fxremat.core.layout import Buffer, Placement
from fxremat.planner import constants
from fxremat.planner.deadline import Deadline

Ints = npt.NDArray[np.int64]


def place(buffers: Sequence[Buffer], *, time_limit_s: float | None = None) -> Placement:
    """Offsets in the smallest arena that the greedy orders give.

    Parts of time across which nothing is alive are placed alone, all from offset 0. The same
    buffers give the same placement, unless the time limit in seconds leaves orders out. Raises
    `ValueError` where two buffers have one name.
    """
    deadline = Deadline(time_limit_s)
    drafts = drafts_of(buffers)
    goal = max((draft.sections.least_bytes for draft in drafts), default=0)
    return placement(buffers, [draft.by_greedy(goal, deadline) for draft in drafts])


def drafts_of(buffers: Sequence[Buffer]) -> list[Draft]:
    """A draft of each part of time; raises `ValueError` where two buffers have one name."""
    if len({buffer.name for buffer in buffers}) < len(buffers):
        raise ValueError("two buffers have one name; an offset is found by name")
    return [Draft.begin(part) for part in split_into_sections(buffers)]


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
    offsets: tuple[int | None, ...]
    arena_bytes: int

    @staticmethod
    def begin(sections: Sections) -> Draft:
        """One buffer above the other."""
        offsets, top = [], 0
        for size, alignment in zip(sections.size, sections.alignment, strict=True):
            offsets.append(top + -top % alignment)
            top = offsets[-1] + size
        return Draft(sections, tuple(offsets), top)

    def or_better(self, offsets: Sequence[int | None]) -> Draft:
        """This, or these offsets if their arena is smaller."""
        arena_bytes = arena_of(self.sections, offsets)
        if arena_bytes >= self.arena_bytes:
            return self
        return Draft(self.sections, tuple(offsets), arena_bytes)

    def by_greedy(self, goal: int, deadline: Deadline, outside: Outside | None = None) -> Draft:
        """The best of the greedy orders; the first that reaches the goal is enough."""
        best = self
        rounds = max(1, constants.ADDRESS_BUFFERS // len(self.offsets))
        ways = list(product(orders(self.sections).values(), (False, True)))
        for order, best_fit in ways[:rounds]:
            if best.arena_bytes <= goal or not deadline.running():
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


def arena_of(sections: Sections, offsets: Sequence[int | None]) -> int:
    """The bytes up to the highest top."""
    pairs = zip(offsets, sections.size, strict=True)
    return max((offset + size for offset, size in pairs if offset is not None), default=0)


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
        change = [0] * (self.count + 1)
        for begin, end, size in zip(self.begin, self.end, self.size, strict=True):
            change[begin] += size
            change[end] -= size
        live, total = [], 0
        for step in change[:-1]:
            total += step
            live.append(total)
        return tuple(live)

    @cached_property
    def least_bytes(self) -> int:
        """No arena is smaller."""
        return max(self.live_bytes, default=0)


def split_into_sections(buffers: Sequence[Buffer]) -> list[Sections]:
    """The buffers in sections, in parts: nothing is alive in two of them."""
    order = sorted(
        (buffer for buffer in buffers if buffer.size_bytes),
        key=lambda buffer: (buffer.begin, buffer.end, buffer.size_bytes, buffer.name),
    )
    parts: list[list[Buffer]] = []
    alive_until = None
    for buffer in order:
        if alive_until is None or buffer.begin >= alive_until:
            parts.append([])
            alive_until = buffer.end
        parts[-1].append(buffer)
        alive_until = max(alive_until, buffer.end)
    return [in_sections(part) for part in parts]


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
    live = None if outside is None else outside.live_bytes.copy()
    for index in order:
        if outside is not None and index in outside.kept:
            continue
        begin, end = sections.begin[index], sections.end[index]
        size, alignment = sections.size[index], sections.alignment[index]
        offset = placed.gap_for(begin, end, size, alignment, best_fit)
        if (
            outside is not None
            and live is not None
            and offset + size > outside.goal
            and outside.takes(live, index, slice(begin, end))
        ):
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

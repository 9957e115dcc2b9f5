"""Time in sections, and buffers as plain numbers.

A section is a greatest set of buffers that are alive at one step; the sections are in the order of
time. Two buffers are alive at one step exactly if both are in one section: lifetimes are
intervals, and an interval graph is known by its maximal cliques (Fulkerson and Gross, 1965).
There are no more sections than buffers, however long the step is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fxremat.core.addresses import Buffer


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
    return [_in_sections(part) for part in parts]


def _in_sections(buffers: Sequence[Buffer]) -> Sections:
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

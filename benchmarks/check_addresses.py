"""The verifiers of placements and layouts: does all lie in the arena, and do no two share a byte?

Written from the definitions, the obvious way: every pair of buffers is compared, and of a step each
buffer with all that is alive when it is placed. They know the nouns only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, combinations
from types import MappingProxyType
from typing import Literal

from fxremat.core.events import Allocate, Free, RunEvents
from fxremat.core.layout import Buffer, HalfLayout, Placement, StepLayout
from fxremat.core.step import Order

Kind = Literal[
    "no offset", "not aligned", "below the arena", "beyond the arena", "overlap", "not its own"
]


class BadPlacement(Exception):
    """A placement breaks a rule; ``kind`` says which, ``names`` are the buffers that break it."""

    def __init__(self, kind: Kind, names: tuple[str, ...], detail: str) -> None:
        super().__init__(f"{kind}: {' and '.join(names)}: {detail}")
        self.kind = kind
        self.names = names


def live_peak(buffers: Iterable[Buffer]) -> int:
    """The greatest sum of padded sizes alive at one step.

    No arena is smaller: buffers that are alive at one step share no byte.
    """
    change: defaultdict[int, int] = defaultdict(int)
    for buffer in buffers:
        change[buffer.begin] += buffer.padded_bytes
        change[buffer.end] -= buffer.padded_bytes
    return max(accumulate(change[step] for step in sorted(change)), default=0)


def check_placement(buffers: Sequence[Buffer], placement: Placement) -> None:
    """Raises `BadPlacement` for the first rule that the placement breaks."""
    for buffer in buffers:
        _check_alone(buffer, placement)
    for one, other in combinations(buffers, 2):
        _check_pair(one, other, placement)


def _check_alone(buffer: Buffer, placement: Placement) -> None:
    """The buffer has an offset, a multiple of its alignment, and lies within the arena."""
    offset = placement.offset_bytes.get(buffer.name)
    if offset is None:
        raise BadPlacement("no offset", (buffer.name,), "the placement does not name it")
    extent = offset, offset + _padded(buffer)
    _check_extent(buffer.name, extent, placement.arena_bytes, buffer.alignment_bytes)


def _check_pair(one: Buffer, other: Buffer, placement: Placement) -> None:
    """Two buffers that are alive at one step share no byte."""
    if max(one.begin, other.begin) >= min(one.end, other.end):
        return
    first = placement.offset_bytes[one.name]
    second = placement.offset_bytes[other.name]
    start = max(first, second)
    stop = min(first + _padded(one), second + _padded(other))
    if start < stop:
        step = max(one.begin, other.begin)
        detail = f"both have bytes {start:,} to {stop:,} at step {step}"
        raise BadPlacement("overlap", (one.name, other.name), detail)


def _padded(buffer: Buffer) -> int:
    """The bytes that the buffer takes: whole units of its alignment."""
    units, rest = divmod(buffer.size_bytes, buffer.alignment_bytes)
    return (units + (1 if rest else 0)) * buffer.alignment_bytes


Extent = tuple[int, int]
"""The first byte, and the byte after the last."""


def check_layout(
    runs: Sequence[RunEvents],
    order: Order,
    layout: StepLayout,
    alignment_bytes: int,
    passed_on: Mapping[tuple[int, str], Collection[int]] = MappingProxyType({}),
) -> None:
    """Raises `BadPlacement` for the first rule that the layout breaks.

    What a run places is no result, and no gradient of an input of its own. It is aligned, lies in
    the arena, and shares no byte with what is alive then, of any run. Results that are
    ``passed_on`` may be placed; they are alive until all runs that hold them have gone backward.
    """
    live: dict[tuple[int, str], Extent] = {}
    waiting = {block: {*holders} for block, holders in passed_on.items()}
    for run, phase in order:
        one, mine = runs[run], layout.runs[run]
        half = mine.forward if phase == "forward" else mine.backward
        places = _places(half)
        for name in places:
            if (run, name) not in passed_on:
                _check_is_own(one, name)
        for event in one.forward if phase == "forward" else one.backward:
            if isinstance(event, Allocate) and event.name in places:
                offset = places[event.name]
                extent = offset, offset + event.nbytes
                _check_extent(event.name, extent, layout.arena_bytes, alignment_bytes)
                for (other, name), taken in live.items():
                    if max(extent[0], taken[0]) < min(extent[1], taken[1]):
                        detail = f"run {run} places it over what run {other} has there"
                        raise BadPlacement("overlap", (event.name, name), detail)
                live[run, event.name] = extent
            elif isinstance(event, Free) and (run, event.name) not in waiting:
                live.pop((run, event.name), None)
        for block, holders in waiting.items() if phase == "backward" else ():
            holders.discard(run)
            if not holders:
                live.pop(block, None)


def _places(half: HalfLayout) -> dict[str, int]:
    """The offset of each block that the half places."""
    pairs = zip(half.buffers, half.offsets, strict=True)
    return {
        one.block: offset for one, offset in pairs if one.block is not None and offset is not None
    }


def _check_is_own(run: RunEvents, name: str) -> None:
    """Nobody else is given the block."""
    others = {*run.results, *(one.gradient for one in run.inputs if one.own)}
    if name in others or name in dict(run.incoming):
        raise BadPlacement("not its own", (name,), "its end is known to nobody")


def _check_extent(name: str, extent: Extent, arena_bytes: int, alignment_bytes: int) -> None:
    """The extent is aligned and lies in the arena."""
    if extent[0] < 0:
        raise BadPlacement("below the arena", (name,), f"offset {extent[0]:,}")
    if extent[0] % alignment_bytes:
        detail = f"offset {extent[0]:,}, alignment {alignment_bytes:,}"
        raise BadPlacement("not aligned", (name,), detail)
    if extent[1] > arena_bytes:
        detail = f"ends at {extent[1]:,}, the arena at {arena_bytes:,}"
        raise BadPlacement("beyond the arena", (name,), detail)

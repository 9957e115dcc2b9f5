"""The verifier of placements: does every buffer lie in the arena, and do no two share a byte?

Written from the definitions, the obvious way: every pair is compared. It knows the nouns only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Literal

from fxremat.core.addresses import Buffer, Placement

Kind = Literal["no offset", "not aligned", "below the arena", "beyond the arena", "overlap"]


class BadPlacement(Exception):
    """A placement breaks a rule; ``kind`` says which, ``names`` are the buffers that break it."""

    def __init__(self, kind: Kind, names: tuple[str, ...], detail: str) -> None:
        super().__init__(f"{kind}: {' and '.join(names)}: {detail}")
        self.kind = kind
        self.names = names


def check_placement(buffers: Sequence[Buffer], placement: Placement) -> None:
    """Raises `BadPlacement` for the first rule that the placement breaks."""
    for buffer in buffers:
        _check_alone(buffer, placement)
    for one, other in combinations(buffers, 2):
        _check_pair(one, other, placement)


def _check_alone(buffer: Buffer, placement: Placement) -> None:
    """The buffer has an offset, a multiple of its alignment, and lies within the arena."""
    names = (buffer.name,)
    offset = placement.offset_bytes.get(buffer.name)
    if offset is None:
        raise BadPlacement("no offset", names, "the placement does not name it")
    if offset < 0:
        raise BadPlacement("below the arena", names, f"offset {offset:,}")
    if offset % buffer.alignment_bytes:
        detail = f"offset {offset:,}, alignment {buffer.alignment_bytes:,}"
        raise BadPlacement("not aligned", names, detail)
    end = offset + _padded(buffer)
    if end > placement.arena_bytes:
        detail = f"ends at {end:,}, the arena at {placement.arena_bytes:,}"
        raise BadPlacement("beyond the arena", names, detail)


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

"""Memory snapshots of torch: written by hand as torch.cuda.memory._snapshot documents them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.allocator_snapshot import compare, from_snapshot
from fxremat.core.events import Allocate, EmptyCache, Free
from fxremat.memory.allocator import replay
from fxremat.memory.allocator_settings import AllocatorSettings

MIB = 2**20
LARGE, SMALL, OTHER = 0x7F0000000000, 0x7F0010000000, 0x7F0020000000

Row = dict[str, Any]


def entry(action: str, addr: int, nbytes: int, **more: Any) -> Row:
    """One entry of a trace."""
    return {"action": action, "addr": addr, "size": nbytes, "stream": 0, "frames": [], **more}


def freed(addr: int, nbytes: int) -> list[Row]:
    """The two entries of one free."""
    return [entry("free_requested", addr, nbytes), entry("free_completed", addr, nbytes)]


def block(nbytes: int, state: str = "inactive", requested: int | None = None) -> Row:
    """A block of a segment as it is at the end."""
    return {"size": nbytes, "requested_size": requested or nbytes, "state": state, "frames": []}


def segment(address: int, *blocks: Row) -> Row:
    """A segment as it is at the end."""
    total = sum(b["size"] for b in blocks)
    return {"device": 0, "address": address, "total_size": total, "stream": 0, "blocks": [*blocks]}


def snapshot(trace: list[Row], *segments: Row) -> Row:
    return {"segments": [*segments], "device_traces": [trace, []]}


def test_a_recording_of_expandable_segments() -> None:
    """Pages of 20 MiB: 30 MiB after 1.5 map one more; two go back when the cache is emptied."""
    rest = 3 * MIB // 2
    trace = [
        entry("segment_map", LARGE, 20 * MIB),
        entry("alloc", LARGE, rest),
        entry("segment_map", LARGE + 20 * MIB, 20 * MIB),
        entry("alloc", LARGE + rest, 30 * MIB),
        *freed(LARGE + rest, 30 * MIB),
        entry("segment_unmap", LARGE + 20 * MIB, 20 * MIB),
    ]
    end = segment(LARGE, block(rest, "active_allocated"), block(20 * MIB - rest))
    recorded = snapshot(trace, end)
    assert from_snapshot(recorded).events[-1] == EmptyCache()
    result = compare(recorded, AllocatorSettings(expandable_segments=True))
    assert (result.recorded_peak_bytes, result.worst_difference_bytes) == (40 * MIB, 0)
    assert compare(recorded).peak_difference_bytes == 10 * MIB


def test_a_retry_is_an_emptied_cache() -> None:
    """A free segment goes back when 30 MiB find no room; the failed 90 MiB leave no event."""
    trace = [
        entry("segment_alloc", LARGE, 20 * MIB),
        entry("alloc", LARGE, 3 * MIB),
        *freed(LARGE, 3 * MIB),
        entry("segment_free", LARGE, 20 * MIB),
        entry("segment_alloc", OTHER, 30 * MIB),
        entry("alloc", OTHER, 30 * MIB),
        {"action": "oom", "size": 90 * MIB, "device_free": 10 * MIB, "stream": 0, "frames": []},
    ]
    recorded = snapshot(trace, segment(OTHER, block(30 * MIB, "active_allocated")))
    recording = from_snapshot(recorded)
    kinds = [type(event) for event in recording.events]
    assert kinds == [Allocate, Free, EmptyCache, Allocate]
    assert recording.reserved_bytes == (20 * MIB, 20 * MIB, 0, 30 * MIB)
    assert compare(recorded).worst_difference_bytes == 0
    usage = replay(event for event in recording.events if event != EmptyCache())
    assert usage.peak_reserved_bytes == 50 * MIB


def test_what_was_there_before() -> None:
    """4 MiB live through; 5 MiB are freed in the trace, so both were allocated before it."""
    trace = [*freed(LARGE + 4 * MIB, 5 * MIB), entry("alloc", LARGE + 4 * MIB, 6 * MIB)]
    end = segment(
        LARGE,
        block(4 * MIB, "active_allocated"),
        block(6 * MIB, "active_allocated"),
        block(10 * MIB),
    )
    recording = from_snapshot(snapshot(trace, end))
    names = [f"{LARGE:#x}.1", f"{LARGE + 4 * MIB:#x}.1"]
    assert recording.preexisting == 2
    assert recording.events[:3] == (
        Allocate(names[0], 4 * MIB),
        Allocate(names[1], 5 * MIB),
        Free(names[1]),
    )
    assert recording.reserved_bytes == (20 * MIB,) * 4
    result = compare(snapshot(trace, end))
    assert (result.worst_difference_bytes, result.steps, result.preexisting) == (0, 2, 2)


def test_private_pools_are_refused() -> None:
    trace = [entry("segment_alloc", LARGE, 20 * MIB, pool_id=(0, 1))]
    with pytest.raises(ValueError, match="record without CUDA graphs"):
        from_snapshot(snapshot(trace, segment(LARGE, block(20 * MIB))))

"""The model of torch's CUDA caching allocator: rules by hand, any events, and recorded steps."""

from __future__ import annotations

import gzip
import json
import random
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.core.events import Allocate, EmptyCache, Event, Free
from fxremat.memory.allocator.caching import CachingAllocator, replay
from fxremat.memory.allocator.settings import AllocatorSettings, parse_settings
from tests.examples import examples

MIB = 2**20


def allocator(text: str = "") -> CachingAllocator:
    """An allocator with the settings of ``text`` on a device without end."""
    return CachingAllocator(parse_settings(text))


def test_nothing_is_reserved_at_first() -> None:
    empty = allocator()
    assert (empty.reserved_bytes, empty.allocated_bytes, empty.segment_count) == (0, 0, 0)


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),
        (13 * MIB - 512, 13 * MIB - 512, 14 * MIB),
    ],
)
def test_first_allocation(nbytes: int, allocated: int, reserved: int) -> None:
    """A segment's rest of at most 1 MiB stays with its block; 11 MiB are then given 12."""
    alone = allocator()
    alone.allocate(nbytes)
    assert (alone.requested_bytes, alone.allocated_bytes) == (nbytes, allocated)
    assert (alone.reserved_bytes, alone.segment_count) == (reserved, 1)
    assert alone.inactive_split_bytes == reserved - allocated


def _filled_segment(free_mib: int) -> CachingAllocator:
    """One large segment: ``free_mib`` MiB that were freed, then a block of all other bytes."""
    full = allocator()
    first = full.allocate(free_mib * MIB)
    full.allocate((20 - free_mib) * MIB)
    assert full.reserved_bytes == 20 * MIB
    full.free(first)
    return full


def test_a_rest_of_one_mebibyte_is_not_split() -> None:
    cached = _filled_segment(3)
    cached.allocate(2 * MIB)
    assert (cached.allocated_bytes, cached.requested_bytes) == (20 * MIB, 19 * MIB)


def test_a_rest_of_more_is_split() -> None:
    cached = _filled_segment(3)
    cached.allocate(2 * MIB - 512)
    assert cached.allocated_bytes == 19 * MIB - 512
    assert cached.inactive_split_bytes == MIB + 512


def test_small_segments_split_to_the_last_512_bytes() -> None:
    small = allocator()
    for nbytes in (MIB, MIB - 512, 1):
        small.allocate(nbytes)
    assert small.allocated_bytes == small.reserved_bytes == 2 * MIB


def test_pools_share_no_segment() -> None:
    """19 MiB are free in a large segment, but a small request takes its own."""
    both = allocator()
    both.allocate(2 * MIB)
    both.allocate(MIB)
    assert both.reserved_bytes == 22 * MIB


def test_streams_share_no_block() -> None:
    both = allocator()
    both.free(both.allocate(30 * MIB, stream=1))
    both.allocate(30 * MIB, stream=2)
    assert both.reserved_bytes == 60 * MIB
    both.allocate(30 * MIB, stream=1)
    assert both.reserved_bytes == 60 * MIB


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 0, 2)])
def test_free_neighbours_are_one_block(order: tuple[int, ...]) -> None:
    segment = allocator()
    blocks = [segment.allocate(5 * MIB) for _ in range(3)]
    for index in order:
        segment.free(blocks[index])
    assert [nbytes for _, nbytes, _, _ in segment.free_blocks()] == [20 * MIB]
    assert segment.inactive_split_bytes == 0


def test_segments_side_by_side_are_not_merged() -> None:
    two = allocator()
    blocks = [two.allocate(20 * MIB) for _ in range(2)]
    for block in blocks:
        two.free(block)
    assert [nbytes for _, nbytes, _, _ in two.free_blocks()] == [20 * MIB, 20 * MIB]


def test_best_fit_is_the_smallest_then_the_lowest() -> None:
    cached = allocator()
    blocks = {mib: [cached.allocate(mib * MIB) for _ in range(2)] for mib in (60, 40, 50)}
    for pair in blocks.values():
        for block in reversed(pair):
            cached.free(block)
    assert cached.allocate(41 * MIB) == blocks[50][0]
    assert cached.allocate(40 * MIB) == blocks[40][0]
    assert cached.allocate(45 * MIB) == blocks[50][1]


def test_divisions_round_requests() -> None:
    """Between 4 and 8 MiB in four steps: 5 MiB and a byte are 6 MiB; below 2 KiB by 512 bytes."""
    rounded = allocator("roundup_power2_divisions:4")
    for nbytes, expected in ((5 * MIB + 1, 6 * MIB), (2048, 2048), (2049, 2560), (1025, 1536)):
        before = rounded.allocated_bytes
        rounded.allocate(nbytes)
        assert rounded.allocated_bytes - before == expected


def test_rounding_decides_the_pool() -> None:
    """900 KiB with two steps between 512 KiB and 1 MiB are 1 MiB, still small."""
    rounded = allocator("roundup_power2_divisions:2")
    rounded.allocate(900 * 1024)
    assert (rounded.allocated_bytes, rounded.reserved_bytes) == (MIB, 2 * MIB)


def test_oversize_blocks_wait_for_oversize_requests() -> None:
    cached = allocator("max_split_size_mb:32")
    cached.free(cached.allocate(40 * MIB))
    cached.allocate(8 * MIB)
    assert cached.reserved_bytes == 60 * MIB
    cached.allocate(35 * MIB)
    assert (cached.reserved_bytes, cached.allocated_bytes) == (60 * MIB, 48 * MIB)


@pytest.mark.parametrize(("text", "reserved"), [("", 110), (",max_non_split_rounding_mb:31", 70)])
def test_oversize_blocks_waste_less_than_the_limit(text: str, reserved: int) -> None:
    cached = allocator(f"max_split_size_mb:32{text}")
    cached.free(cached.allocate(70 * MIB))
    cached.allocate(40 * MIB)
    assert cached.reserved_bytes == reserved * MIB


def test_whole_segments_are_oversize_at_the_least_split_size() -> None:
    """With 20 MB, a free segment of 20 MiB does not serve a request of 3 MiB."""
    cached = allocator("max_split_size_mb:20")
    cached.free(cached.allocate(3 * MIB))
    cached.allocate(3 * MIB)
    assert cached.reserved_bytes == 40 * MIB


def test_large_segment_size() -> None:
    smaller = allocator("large_segment_size_mb:12")
    smaller.allocate(2 * MIB)
    assert smaller.reserved_bytes == 12 * MIB


@pytest.mark.parametrize(("nbytes", "reserved"), [(40 * MIB, 100), (40 * MIB + 512, 60)])
def test_oversize_blocks_waste_less_than_20_mebibytes(nbytes: int, reserved: int) -> None:
    cached = allocator("max_split_size_mb:32")
    cached.free(cached.allocate(60 * MIB))
    cached.allocate(nbytes)
    assert cached.reserved_bytes == reserved * MIB


def test_empty_cache_keeps_segments_in_use() -> None:
    mixed = allocator()
    mixed.allocate(3 * MIB)
    mixed.free(mixed.allocate(30 * MIB))
    mixed.free(mixed.allocate(100))
    mixed.empty_cache()
    assert (mixed.reserved_bytes, mixed.segment_count) == (20 * MIB, 1)


def test_no_bytes_take_nothing() -> None:
    empty = allocator()
    assert empty.allocate(0) == 0
    empty.free(0)
    assert empty.reserved_bytes == 0


def test_wrong_use_is_refused() -> None:
    one = allocator()
    with pytest.raises(ValueError, match="-1 bytes"):
        one.allocate(-1)
    address = one.allocate(1)
    one.free(address)
    with pytest.raises(ValueError, match="free each address once"):
        one.free(address)


def test_replay_names_peaks() -> None:
    events: list[Event] = [
        Allocate("a", 3 * MIB),
        Allocate("b", 30 * MIB),
        Free("b"),
        EmptyCache(),
        Allocate("c", 17 * MIB),
        Free("a"),
        Allocate("a", 2 * MIB, stream=1),
    ]
    usage = replay(events)
    assert (usage.peak_allocated_bytes, usage.peak_reserved_bytes) == (33 * MIB, 50 * MIB)
    assert (usage.peak_requested_bytes, usage.segment_count) == (33 * MIB, 2)


def test_replay_refuses_impossible_traces() -> None:
    with pytest.raises(ValueError, match=r"event 1 allocates 'a' again"):
        replay([Allocate("a", 1), Allocate("a", 1)])
    with pytest.raises(ValueError, match=r"event 0 frees 'a'"):
        replay([Free("a")])


def test_replay_of_nothing() -> None:
    assert replay([]).peak_reserved_bytes == 0


@pytest.mark.parametrize("expandable", [False, True])
def test_fifty_thousand_events_take_seconds(expandable: bool) -> None:
    draw = random.Random(0)
    events: list[Event] = []
    live: list[str] = []
    while len(events) < 50_000:
        if live and draw.random() < 0.49:
            events.append(Free(live.pop(draw.randrange(len(live)))))
        else:
            live.append(f"v{len(events)}")
            events.append(Allocate(live[-1], int(2 ** draw.uniform(5, 27))))
    before = time.process_time()
    replay(events, AllocatorSettings(expandable_segments=expandable))
    assert time.process_time() - before < 3.0


Step = tuple[str, int, int]


def steps() -> st.SearchStrategy[list[Step]]:
    """What to do: allocate bytes on a stream, free the n-th live block, or empty the cache."""
    exact = st.sampled_from([1, 511, 512, 513, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 20 * MIB])
    drawn = st.builds(lambda power, part: int(2**power * part), st.integers(4, 24), st.floats(1, 2))
    allocate = st.tuples(st.just("allocate"), st.one_of(exact, drawn), st.sampled_from([0, 0, 7]))
    free = st.tuples(st.just("free"), st.integers(0, 30), st.just(0))
    return st.lists(st.one_of(allocate, allocate, free, st.just(("empty", 0, 0))), max_size=60)


def any_settings() -> st.SearchStrategy[AllocatorSettings]:
    """Settings of every kind, also together."""
    return st.builds(
        AllocatorSettings,
        max_split_bytes=st.sampled_from([None, 24 * MIB, 32 * MIB]),
        max_non_split_rounding_bytes=st.sampled_from([24 * MIB, 40 * MIB]),
        large_segment_bytes=st.sampled_from([20 * MIB, 12 * MIB, 24 * MIB]),
        divisions=st.sampled_from([(0,) * 16, (4,) * 16, (8, 1, 0, 2) * 4]),
        expandable_segments=st.booleans(),
    )


@examples(300)
@given(steps(), any_settings())
def test_blocks_never_overlap_and_peaks_are_the_highest_levels(
    sequence: list[Step], settings: AllocatorSettings
) -> None:
    """What is reserved holds what is allocated, and goes back in the end."""
    cached = CachingAllocator(settings)
    live: dict[int, int] = {}
    levels = [(0, 0, 0)]
    for action, number, stream in sequence:
        if action == "allocate":
            live[cached.allocate(number, stream)] = number
        elif action == "empty":
            cached.empty_cache()
        elif live:
            address = list(live)[number % len(live)]
            del live[address]
            cached.free(address)
        ends = sorted((address, address + nbytes) for address, nbytes in live.items())
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        level = cached.requested_bytes, cached.allocated_bytes, cached.reserved_bytes
        assert sum(live.values()) == level[0] <= level[1] <= level[2]
        free = sum(nbytes for _, nbytes, _, _ in cached.free_blocks())
        assert level[1] + free == level[2]
        levels.append(level)
    requested, allocated, reserved = (max(column) for column in zip(*levels, strict=True))
    assert cached.peak_requested_bytes == requested
    assert cached.peak_allocated_bytes == allocated
    assert cached.peak_reserved_bytes == reserved
    for address in live:
        cached.free(address)
    cached.empty_cache()
    assert cached.reserved_bytes == 0


RECORDED = sorted((Path(__file__).parent / "data" / "gpu_events").glob("*.json.gz"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.split(".")[0])
def test_recorded_steps_take_what_a_gpu_said(path: Path) -> None:
    """Steps of training on an H200, replayed: its reserved bytes to 3 %, its allocated ones to 1 %.

    Beside the events of the graph a loop has its inputs, other tensors, and the states of AdamW,
    which come after the first backward. Before it the segment of the plan was taken with room for
    these states, and a block behind the room kept them apart.
    """
    recorded = json.loads(gzip.decompress(path.read_bytes()))
    inputs, measured = recorded["events"]["inputs"], recorded["measured"]
    states = [one["nbytes"] for one in inputs if one["gradient"] is not None for _ in range(2)]
    room, wall = sum(states), 2 * MIB
    beside = max(0, recorded["held_bytes"] - room)
    halves = ("forward", "incoming", "backward")
    lines = [line for half in halves for line in recorded["events"][half]]
    step = [Allocate(name, size[0]) if size else Free(name) for name, *size in lines]
    events = [
        *(Allocate(f"input {k}", one["nbytes"]) for k, one in enumerate(inputs)),
        *(Allocate(f"beside {k}", beside // 2) for k in range(2)),
        *(Allocate("segment", recorded["segment_bytes"] + wall + room), Free("segment")),
        *(Allocate("room", room), Allocate("wall", wall)),
        *step,
        Free("room"),
    ]
    first = replay(events).peak_reserved_bytes
    assert first == pytest.approx(measured["first_step"]["reserved"], rel=0.03)
    freed = {one.name for one in step if isinstance(one, Free)}
    left = [one.name for one in step if isinstance(one, Allocate) and one.name not in freed]
    without_room = [e for e in events if e.name not in ("room", "wall", "segment")]
    without_room += [Allocate(f"state {k}", nbytes) for k, nbytes in enumerate(states)]
    later = replay([*without_room, *map(Free, left), *step]).peak_allocated_bytes
    assert later == pytest.approx(measured["steps_2_to_5"]["allocated"], rel=0.01)

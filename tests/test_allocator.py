"""The model of torch's CUDA caching allocator, its settings, and memory snapshots."""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.allocator import Allocator, EmptyCache, HeapEvent, apply_events, most_requested
from benchmarks.allocator_snapshot import compare, from_snapshot
from fxremat.core.events import Allocate, Event, Free
from fxremat.memory.allocator import replay
from fxremat.memory.allocator_settings import AllocatorSettings, parse_settings
from tests.examples import examples

# --- allocator ----------------------------------------------------------------------------


MIB = 2**20
BLOCK = 512 / MIB


def taken(name: str, mib: float, stream: int = 0) -> Allocate:
    return Allocate(name, int(mib * MIB), stream)


def after(text: str, events: Iterable[HeapEvent]) -> Allocator:
    """An allocator with the settings of ``text`` on a device without end, after these events."""
    made = Allocator(parse_settings(text))
    for _ in apply_events(made, events):
        pass
    return made


A, B, C, D = "abcd"
PAGES = "expandable_segments:True"
HOLE_OF_3 = (taken(A, 3), taken(B, 17), Free(A))
RULES: dict[str, tuple[str, tuple[HeapEvent, ...], float, float]] = {
    # name: settings, events, MiB reserved and MiB allocated in the end
    "nothing": ("", (), 0, 0),
    "a request of no bytes": ("", (taken(A, 0), Free(A)), 0, 0),
    "a rest of one MiB is not split": ("", (*HOLE_OF_3, taken(C, 2)), 20, 20),
    "a rest of more is split": ("", (*HOLE_OF_3, taken(C, 2 - BLOCK)), 20, 19 - BLOCK),
    "small segments split to 512 bytes": (
        "", (taken(A, 1), taken(B, 1 - BLOCK), Allocate(C, 1)), 2, 2),
    "pools share no segment": ("", (taken(A, 2), taken(B, 1)), 22, 3),
    "streams share no block": (
        "", (taken(A, 30, 1), Free(A), taken(B, 30, 2), taken(C, 30, 1)), 60, 60),
    **{
        f"free neighbours are one block, {order}": (
            "", (*(taken(x, 5) for x in (A, B, C)), *map(Free, order), taken(D, 20)), 20, 20)
        for order in ("abc", "acb", "cba", "bac")
    },
    "segments side by side are not": (
        "", (taken(A, 20), taken(B, 20), Free(A), Free(B), taken(C, 40)), 80, 40),
    "rounding decides the pool": (  # of 512 KiB to 1 MiB in two steps, 900 KiB take the second
        "roundup_power2_divisions:2", (taken(A, 900 / 1024),), 2, 1),
    "oversize blocks wait for oversize requests": (
        "max_split_size_mb:32", (taken(A, 40), Free(A), taken(B, 8), taken(C, 35)), 60, 48),
    "oversize blocks waste less than 20 MiB": (
        "max_split_size_mb:32", (taken(A, 60), Free(A), taken(B, 40)), 100, 40),
    "and are used where they waste less": (
        "max_split_size_mb:32", (taken(A, 60), Free(A), taken(B, 40 + BLOCK)), 60, 60),
    "oversize blocks waste less than a limit": (
        "max_split_size_mb:32,max_non_split_rounding_mb:31",
        (taken(A, 70), Free(A), taken(B, 40)), 70, 70),
    "whole segments are oversize at the least split size": (
        "max_split_size_mb:20", (taken(A, 3), Free(A), taken(B, 3)), 40, 3),
    "large segments have a size": ("large_segment_size_mb:12", (taken(A, 2),), 12, 2),
    "an emptied cache keeps segments in use": (
        "", (taken(A, 3), taken(B, 30), Free(B), Allocate(C, 1), Free(C), EmptyCache()), 20, 3),
    "expandable segments grow by pages": (  # 31.5 MiB map 40, not 20 and 30
        PAGES, (Allocate(A, 1), taken(B, 1.5), taken(C, 30)), 42, 31.5 + BLOCK),
    "they fill holes first": (
        PAGES,
        (*(taken(x, 20) for x in (A, B, C)), Free(A), EmptyCache(), taken(D, 15), Free(B),
         taken(B, 25)),
        60, 60),
    "they keep what lies in a page in use": (
        PAGES, (taken(A, 20 - BLOCK), taken(B, 20), Free(B), EmptyCache()), 20, 20 - BLOCK),
    "they split large blocks to 512 bytes": (
        PAGES, (taken(A, 3), taken(B, 2), Free(A), taken(C, 3 - BLOCK)), 20, 5 - BLOCK),
    "they prefer a block that cannot grow": (
        PAGES, (taken(A, 14), taken(B, 14), Free(A), taken(C, 11), taken(D, 14)), 60, 39),
    "large pages have the size of large segments": (
        f"{PAGES},large_segment_size_mb:12", (taken(A, 13),), 24, 13),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_rules_by_hand(name: str) -> None:
    text, events, reserved, allocated = RULES[name]
    found = after(text, events)
    assert (found.reserved / MIB, found.allocated / MIB) == (reserved, allocated)


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
    alone = Allocator()
    alone.allocate(nbytes)
    assert (alone.requested, alone.allocated, alone.reserved) == (nbytes, allocated, reserved)
    assert sum(free for _, free, _, _ in alone.free_blocks()) == reserved - allocated


def test_best_fit_is_the_smallest_then_the_lowest() -> None:
    cached = Allocator()
    blocks = {mib: [cached.allocate(mib * MIB) for _ in range(2)] for mib in (60, 40, 50)}
    for pair in blocks.values():
        for block in reversed(pair):
            cached.free(block)
    assert cached.allocate(41 * MIB) == blocks[50][0]
    assert cached.allocate(40 * MIB) == blocks[40][0]
    assert cached.allocate(45 * MIB) == blocks[50][1]


def test_divisions_round_requests() -> None:
    """Between 4 and 8 MiB in four steps: 5 MiB and a byte are 6 MiB; below 2 KiB by 512 bytes."""
    rounded = after("roundup_power2_divisions:4", ())
    for nbytes, expected in ((5 * MIB + 1, 6 * MIB), (2048, 2048), (2049, 2560), (1025, 1536)):
        before = rounded.allocated
        rounded.allocate(nbytes)
        assert rounded.allocated - before == expected


def test_wrong_use_is_refused() -> None:
    """Also by the replay of a trace."""
    one = Allocator()
    with pytest.raises(ValueError, match="-1 bytes"):
        one.allocate(-1)
    address = one.allocate(1)
    one.free(address)
    with pytest.raises(ValueError, match="free each address once"):
        one.free(address)
    with pytest.raises(ValueError, match=r"event 1 allocates 'a' again"):
        replay([Allocate("a", 1), Allocate("a", 1)])
    with pytest.raises(ValueError, match=r"event 0 frees 'a'"):
        replay([Free("a")])


def test_replay_names_peaks() -> None:
    events: list[Event] = [
        taken(A, 3),
        taken(B, 30),
        Free(B),
        taken(C, 17),
        Free(A),
        taken(A, 2, 1),
    ]
    usage = replay(events)
    assert (usage.peak_allocated_bytes, usage.peak_reserved_bytes) == (33 * MIB, 70 * MIB)
    assert most_requested(events) == 33 * MIB


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
        max_split=st.sampled_from([None, 24 * MIB, 32 * MIB]),
        max_non_split_rounding=st.sampled_from([24 * MIB, 40 * MIB]),
        large_segment=st.sampled_from([20 * MIB, 12 * MIB, 24 * MIB]),
        divisions=st.sampled_from([(0,) * 16, (4,) * 16, (8, 1, 0, 2) * 4]),
        expandable_segments=st.booleans(),
    )


@examples(300)
@given(steps(), any_settings())
def test_blocks_never_overlap_and_peaks_are_the_highest_levels(
    sequence: list[Step], settings: AllocatorSettings
) -> None:
    """What is reserved holds what is allocated, and goes back in the end."""
    cached = Allocator(settings)
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
        level = cached.requested, cached.allocated, cached.reserved
        assert sum(live.values()) == level[0] <= level[1] <= level[2]
        free = sum(nbytes for _, nbytes, _, _ in cached.free_blocks())
        assert level[1] + free == level[2]
        levels.append(level)
    _, allocated, reserved = (max(column) for column in zip(*levels, strict=True))
    assert cached.peak_allocated_bytes == allocated
    assert cached.peak_reserved_bytes == reserved
    for address in live:
        cached.free(address)
    cached.empty_cache()
    assert cached.reserved == 0


_STEPS = Path(__file__).parent.parent / "benchmarks" / "results" / "steps"
RECORDED = [_STEPS / f"{name}.json.gz" for name in ("deberta_amp", "gemma2", "llamab")]


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


# --- settings -----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", " ", "backend:native", "pinned_num_register_threads:8,"])
def test_defaults_are_those_of_torch(text: str) -> None:
    settings = parse_settings(text)
    assert settings == AllocatorSettings()
    assert settings.max_split is None
    assert settings.max_non_split_rounding == settings.large_segment == 20 * MIB
    assert settings.divisions == (0,) * 16
    assert not settings.expandable_segments


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("max_split_size_mb:64", {"max_split": 64 * MIB}),
        ("max_non_split_rounding_mb:30", {"max_non_split_rounding": 30 * MIB}),
        ("large_segment_size_mb:12", {"large_segment": 12 * MIB}),
        ("garbage_collection_threshold:0.8", {}),
        ("expandable_segments:True", {"expandable_segments": True}),
        ("expandable_segments:True,expandable_segments:False", {}),
        ("per_process_memory_fraction:0.5", {}),
        ("roundup_power2_divisions:8", {"divisions": (8,) * 16}),
        (" max_split_size_mb : 64 , pinned_use_background_threads : True", {"max_split": 64 * MIB}),
        ("throw_on_cudamalloc_oom:False,graph_capture_record_stream_reuse:True", {}),
    ],
)
def test_one_key(text: str, fields: dict[str, Any]) -> None:
    assert parse_settings(text) == AllocatorSettings(**fields)


def test_divisions_by_size() -> None:
    """The first pair holds for smaller sizes too, ``>`` past the last; 128 MB has none."""
    with pytest.raises(ValueError, match="powers of 2"):
        AllocatorSettings(divisions=(3,) * 16)
    settings = parse_settings("roundup_power2_divisions:[64:8,256:4,512:0,1024:2,>:1]")
    divisions = [8, 8, 8, 8, 8, 8, 8, 0, 4, 0, 2, 1, 1, 1, 1, 1]
    assert settings.divisions == tuple(divisions)
    sizes = (1, MIB, 64 * MIB, 128 * MIB - 1, 128 * MIB, 256 * MIB, 2**30, 2**31, 2**50)
    assert [settings.divisions_for(nbytes) for nbytes in sizes] == [8, 8, 8, 8, 0, 4, 2, 1, 1]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("max_split_sizemb:64", "did you mean 'max_split_size_mb'"),
        ("max_split_size_mb", "key:value pairs"),
        ("max_split_size_mb:", "key:value pairs"),
        (",max_split_size_mb:64", "key:value pairs"),
        ("roundup_power2_divisions:[64:8", "key:value pairs"),
        ("max_split_size_mb:big", "expected a whole number"),
        ("max_split_size_mb:19", "at least one large segment"),
        ("max_split_size_mb:30,large_segment_size_mb:40", "at least one large segment"),
        ("max_non_split_rounding_mb:19", "at least one large segment"),
        ("large_segment_size_mb:10", "expected more than 10"),
        ("expandable_segments:true", "expected True or False"),
        ("roundup_power2_divisions:3", "a power of 2"),
        ("roundup_power2_divisions:0", "a power of 2"),
        ("roundup_power2_divisions:[64:3]", "a power of 2"),
        ("roundup_power2_divisions:[63:4]", "a power of 2"),
        ("roundup_power2_divisions:[4]", "pairs such as"),
        ("backend:cudaMallocAsync", "remove the key"),
        ("throw_on_cudamalloc_oom:True", "not modelled"),
    ],
)
def test_what_is_wrong_is_named(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        parse_settings(text)
    assert text.split(":")[0].strip(",") in str(caught.value)


# --- snapshot -----------------------------------------------------------------------------


def test_a_memory_snapshot_of_torch_is_replayed() -> None:
    """4 MiB live through; 5 MiB are freed in the trace, so both were allocated before it."""
    begin, sizes = 0x7F0000000000, {"action": "alloc", "size": 6 * MIB}
    moved = [{"action": f"free_{half}", "size": 5 * MIB} for half in ("requested", "completed")]
    trace: list[dict[str, Any]] = [
        {"addr": begin + 4 * MIB, "stream": 0, "frames": [], **one} for one in (*moved, sizes)
    ]
    blocks = [
        {"size": mib * MIB, "requested_size": mib * MIB, "state": state, "frames": []}
        for mib, state in ((4, "active_allocated"), (6, "active_allocated"), (10, "inactive"))
    ]
    segment = {"device": 0, "address": begin, "total_size": 20 * MIB, "stream": 0, "blocks": blocks}
    snapshot = {"segments": [segment], "device_traces": [trace, []]}
    recording = from_snapshot(snapshot)
    names = [f"{begin:#x}.1", f"{begin + 4 * MIB:#x}.1"]
    assert recording.preexisting == 2
    assert recording.events[:3] == (taken(names[0], 4), taken(names[1], 5), Free(names[1]))
    assert recording.reserved_bytes == (20 * MIB,) * 4
    result = compare(snapshot)
    assert (result.worst_difference_bytes, result.steps, result.preexisting) == (0, 2, 2)
    trace[0]["pool_id"] = (0, 1)
    with pytest.raises(ValueError, match="record without CUDA graphs"):
        from_snapshot(snapshot)

"""Random sequences of events through the allocator's model, each checked by the oracle."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.memory.allocator import AllocatorSettings, CachingAllocator, Entry
from tests.allocator_oracle import MIB, Oracle
from tests.examples import examples

Step = tuple[str, int, int]


def steps() -> st.SearchStrategy[list[Step]]:
    """What to do: allocate bytes on a stream, free the n-th live block, or empty the cache."""
    exact = st.sampled_from([1, 511, 512, 513, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 20 * MIB])
    drawn = st.builds(lambda power, part: int(2**power * part), st.integers(4, 24), st.floats(1, 2))
    stream = st.sampled_from([0, 0, 0, 7])
    allocate = st.tuples(st.just("allocate"), st.one_of(exact, drawn, drawn), stream)
    free = st.tuples(st.just("free"), st.integers(0, 30), st.just(0))
    empty = st.just(("empty", 0, 0))
    one = st.one_of(allocate, allocate, allocate, free, free, st.one_of(free, empty))
    return st.lists(one, min_size=1, max_size=60)


def any_settings() -> st.SearchStrategy[AllocatorSettings]:
    """Settings of every kind, also together."""
    return st.builds(
        AllocatorSettings,
        max_split_bytes=st.sampled_from([None, None, 24 * MIB, 32 * MIB]),
        max_non_split_rounding_bytes=st.sampled_from([24 * MIB, 40 * MIB]),
        large_segment_bytes=st.sampled_from([20 * MIB, 20 * MIB, 12 * MIB, 24 * MIB]),
        divisions=st.sampled_from([(0,) * 16, (4,) * 16, (8, 1, 0, 2) * 4]),
        expandable_segments=st.booleans(),
    )


class Checked:
    """An allocator and its oracle, side by side."""

    def __init__(self, options: AllocatorSettings) -> None:
        self.log: list[Entry] = []
        self.allocator = CachingAllocator(options, self.log)
        self.oracle = Oracle(options)
        self.live: dict[int, int] = {}

    def run(self, step: Step) -> None:
        action, number, stream = step
        seen = len(self.log)
        if action == "allocate":
            address = self.allocator.allocate(number, stream)
            self.oracle.on_allocate(number, stream, self.log[seen:])
            assert self.log[-1].address == address
            self.live[address] = number
        elif action == "empty":
            self.allocator.empty_cache()
            self.oracle.on_empty_cache(self.log[seen:])
        elif self.live:
            address = list(self.live)[number % len(self.live)]
            del self.live[address]
            self.allocator.free(address)
            self.oracle.on_free(address, self.log[seen:])
        self.compare_levels()

    def compare_levels(self) -> None:
        allocator, memory = self.allocator, self.oracle.memory
        assert allocator.reserved_bytes == memory.reserved
        assert allocator.allocated_bytes == sum(memory.live.values())
        assert allocator.requested_bytes == sum(self.live.values())
        assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.reserved_bytes
        assert allocator.inactive_split_bytes == memory.split_bytes()
        assert sorted(allocator.free_blocks()) == memory.all_gaps()


@examples(300)
@given(steps(), any_settings())
def test_every_event_is_what_the_rules_demand(
    sequence: list[Step], options: AllocatorSettings
) -> None:
    checked = Checked(options)
    for step in sequence:
        checked.run(step)


@examples(60)
@given(steps(), any_settings())
def test_same_events_same_log(sequence: list[Step], options: AllocatorSettings) -> None:
    first, second = Checked(options), Checked(options)
    for step in sequence:
        first.run(step)
        second.run(step)
    assert first.log == second.log


@examples(100)
@given(steps(), any_settings())
def test_peaks_are_the_highest_levels(sequence: list[Step], options: AllocatorSettings) -> None:
    checked = Checked(options)
    levels = [(0, 0, 0)]
    for step in sequence:
        checked.run(step)
        allocator = checked.allocator
        levels.append(
            (allocator.allocated_bytes, allocator.reserved_bytes, allocator.requested_bytes)
        )
    allocated, reserved, requested = (max(column) for column in zip(*levels, strict=True))
    assert checked.allocator.peak_allocated_bytes == allocated
    assert checked.allocator.peak_reserved_bytes == reserved
    assert checked.allocator.peak_requested_bytes == requested


@examples(100)
@given(steps(), any_settings())
def test_all_memory_goes_back_in_the_end(sequence: list[Step], options: AllocatorSettings) -> None:
    checked = Checked(options)
    for step in sequence:
        checked.run(step)
    for _ in range(len(checked.live)):
        checked.run(("free", 0, 0))
    checked.run(("empty", 0, 0))
    assert checked.allocator.reserved_bytes == 0
    assert checked.allocator.free_blocks() == []


@pytest.mark.parametrize("expandable", [False, True])
def test_the_sequences_reach_every_path(expandable: bool) -> None:
    """Splits and holes: what the properties are about does happen."""
    options = AllocatorSettings(expandable_segments=expandable)
    draw = random.Random(5)
    checked = Checked(options)
    for step in range(200):
        if step % 50 == 49:
            checked.run(("empty", 0, 0))
        elif draw.random() < 0.6:
            checked.run(("allocate", int(2 ** draw.uniform(8, 24.5)), draw.choice([0, 0, 7])))
        else:
            checked.run(("free", draw.randrange(100), 0))
    actions = {entry.action for entry in checked.log}
    kind = {"segment_map", "segment_unmap"} if expandable else {"segment_alloc", "segment_free"}
    assert kind < actions


def _log_of_a_reuse() -> list[Entry]:
    """A segment, two blocks in it, the first freed and used again."""
    log: list[Entry] = []
    allocator = CachingAllocator(log=log)
    first = allocator.allocate(4096)
    allocator.allocate(4096)
    allocator.free(first)
    allocator.allocate(4096)
    return log


def _judge(log: list[Entry]) -> None:
    oracle = Oracle(AllocatorSettings())
    oracle.on_allocate(4096, 0, log[:2])
    oracle.on_allocate(4096, 0, log[2:3])
    oracle.on_free(log[3].address, log[3:4])
    oracle.on_allocate(4096, 0, log[4:])


def test_the_oracle_accepts_a_log_as_it_is() -> None:
    _judge(_log_of_a_reuse())


@pytest.mark.parametrize(
    ("index", "change", "why"),
    [
        (0, {"nbytes": 4 * MIB}, None),
        (0, {"small": False}, None),
        (1, {"nbytes": 8192}, "split as it should be"),
        (1, {"requested_bytes": 1}, None),
        (2, {"address": 1 << 40}, "the best fit is used"),
        (2, {"stream": 1}, None),
        (3, {"nbytes": 512}, "freed as it was placed"),
        (4, {"address": (1 << 40) + 8192}, "the best fit is used"),
    ],
)
def test_the_oracle_notices(index: int, change: dict[str, int], why: str | None) -> None:
    log = _log_of_a_reuse()
    log[index] = replace(log[index], **change)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=why):
        _judge(log)

"""Planned addresses: the verifier's pairs, sections, and what `place` promises."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.address_shapes import pyramid, transformer, uneven
from fxremat.core.check_addresses import BadPlacement, check_placement
from fxremat.core.layout import Buffer, Placement, live_peak
from fxremat.planner.addresses import Sections, place, split_into_sections
from tests.buffers import EARLY, FINE, LATE, THREE, buffers


def live_peak_again(given_buffers: list[Buffer]) -> int:
    """The peak, step by step."""
    return max(
        (
            sum(
                math.ceil(buffer.size_bytes / buffer.alignment_bytes) * buffer.alignment_bytes
                for buffer in given_buffers
                if buffer.begin <= step < buffer.end
            )
            for step in range(10)
        ),
        default=0,
    )


def one_part(given_buffers: list[Buffer] | tuple[Buffer, ...]) -> Sections:
    """The sections of buffers that hang together."""
    (part,) = split_into_sections(given_buffers)
    return part


# -- the nouns and the checker ---------------------------------------------------------------


@pytest.mark.parametrize("wrong", [(2, 2, 1, 1), (3, 2, 1, 1), (0, 1, -1, 1), (0, 1, 1, 0)])
def test_no_such_buffer(wrong: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="wrong"):
        Buffer("wrong", *wrong)


@given(buffers())
def test_live_peak_is_that_of_the_steps(some: list[Buffer]) -> None:
    assert live_peak(some) == live_peak_again(some)


def test_checker_accepts() -> None:
    check_placement(THREE, Placement(FINE, 16))


@pytest.mark.parametrize(
    ("change", "arena_bytes", "kind", "names"),
    [
        ({"late": None}, 16, "no offset", ("late",)),
        ({"long": 12}, 20, "not aligned", ("long",)),
        ({"early": -1}, 16, "below the arena", ("early",)),
        ({}, 15, "beyond the arena", ("long",)),
        ({"late": 4}, 16, "overlap", ("long", "late")),
        ({"late": 12}, 32, "overlap", ("long", "late")),
        ({"late": 9}, 16, "overlap", ("long", "late")),
    ],
)
def test_checker_rejects(
    change: dict[str, int | None], arena_bytes: int, kind: str, names: tuple[str, ...]
) -> None:
    offsets = {name: at for name, at in (FINE | change).items() if at is not None}
    with pytest.raises(BadPlacement, match=kind) as raised:
        check_placement(THREE, Placement(offsets, arena_bytes))
    assert (raised.value.kind, raised.value.names) == (kind, names)


def test_checker_counts_padding() -> None:
    padded = replace(EARLY, alignment_bytes=8)
    with pytest.raises(BadPlacement, match="overlap"):
        check_placement(
            [padded, Buffer("beside", 0, 2, 4)], Placement({"early": 0, "beside": 4}, 8)
        )
    with pytest.raises(BadPlacement, match="beyond"):
        check_placement([padded], Placement({"early": 0}, 4))
    check_placement([padded], Placement({"early": 0}, 8))


# -- sections --------------------------------------------------------------------------------


def test_sections_part_where_nothing_is_alive_across() -> None:
    parts = split_into_sections([LATE, EARLY, Buffer("empty", 0, 4, 0)])
    assert [part.names for part in parts] == [("early",), ("late",)]
    assert one_part(THREE).live_bytes == (12, 13)


@given(buffers())
def test_sections_keep_who_meets_whom_and_the_peak(some: list[Buffer]) -> None:
    parts = split_into_sections(some)
    assert max((part.least_bytes for part in parts), default=0) == live_peak_again(some)
    place_of = {
        name: (number, part.begin[index], part.end[index])
        for number, part in enumerate(parts)
        for index, name in enumerate(part.names)
    }
    solid = [buffer for buffer in some if buffer.size_bytes]
    assert set(place_of) == {buffer.name for buffer in solid}
    for one in solid:
        for other in solid:
            part, begin, end = place_of[one.name]
            other_part, other_begin, other_end = place_of[other.name]
            meet = part == other_part and begin < other_end and other_begin < end
            assert meet == (one.begin < other.end and other.begin < one.end)


# -- place -----------------------------------------------------------------------------------


@settings(deadline=None)
@given(buffers(most=30))
def test_placements_pass_the_checker(some: list[Buffer]) -> None:
    placement = place(some)
    check_placement(some, placement)
    assert placement.arena_bytes >= live_peak(some)


@settings(deadline=None)
@given(buffers(most=20), st.randoms(use_true_random=False))
def test_the_order_of_the_question_does_not_matter(
    some: list[Buffer], chance: random.Random
) -> None:
    shuffled = list(some)
    chance.shuffle(shuffled)
    assert place(shuffled) == place(some)


def test_nothing_to_place() -> None:
    assert place([]) == Placement({}, 0)
    assert place([Buffer("empty", 0, 1, 0)]) == Placement({"empty": 0}, 0)


def test_names_are_unique() -> None:
    with pytest.raises(ValueError, match="one name"):
        place([EARLY, EARLY])


def test_a_time_limit_leaves_a_placement() -> None:
    some = uneven(12)
    check_placement(some, place(some, time_limit_s=0.0))


@pytest.mark.parametrize("make", [transformer, pyramid, uneven])
@pytest.mark.parametrize("seed", [1, 2])
def test_training_steps_come_within_a_hundredth(
    make: Callable[[int, int], list[Buffer]],
    seed: int,
) -> None:
    some = make(12, seed)
    placement = place(some)
    check_placement(some, placement)
    assert placement.arena_bytes <= 1.01 * live_peak(some)


def test_twenty_thousand_buffers() -> None:
    some = transformer(540)
    assert len(some) > 19_000
    started = time.process_time()
    placement = place(some)
    assert time.process_time() - started < 10
    assert placement.arena_bytes <= 1.01 * live_peak(some)

"""Planned addresses: the checker's pairs, what `place` promises, the search and the programme."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import addresses as benchmark
from benchmarks.address_shapes import pyramid, transformer, uneven
from fxremat.core.addresses import Buffer, Placement, live_peak
from fxremat.core.check_addresses import BadPlacement, check_placement
from fxremat.planner.addresses import place, tuning
from fxremat.planner.addresses.exact import place_exactly
from fxremat.planner.addresses.greedy import orders, place_in_order
from fxremat.planner.addresses.restarts import search_within
from fxremat.planner.addresses.search import Outcome, Search
from fxremat.planner.addresses.sections import Sections, split_into_sections
from fxremat.planner.addresses.valleys import Valleys
from fxremat.planner.deadline import Deadline

LONG, EARLY, LATE = Buffer("long", 0, 4, 8, 8), Buffer("early", 0, 2, 4), Buffer("late", 2, 4, 5)
THREE = (LONG, EARLY, LATE)
FINE = {"long": 8, "early": 0, "late": 1}

# Every step is full at 10 bytes, so b has to lie at the top or the bottom. No greedy order puts it
# there with d and e beside it.
TIGHT = (
    Buffer("a", 0, 2, 3),
    Buffer("b", 0, 4, 2),
    Buffer("c", 0, 2, 5),
    Buffer("d", 2, 6, 4),
    Buffer("e", 2, 4, 4),
    Buffer("f", 4, 6, 6),
)


# -- strategies ------------------------------------------------------------------------------


@st.composite
def buffers(
    draw: st.DrawFn, most: int = 8, alignments: tuple[int, ...] = (1, 4, 8)
) -> list[Buffer]:
    """Up to ``most`` buffers over few steps; some have no bytes."""
    out = []
    for index in range(draw(st.integers(0, most))):
        begin = draw(st.integers(0, 9))
        end = draw(st.integers(begin + 1, 10))
        size, alignment = draw(st.integers(0, 20)), draw(st.sampled_from(alignments))
        out.append(Buffer(f"b{index}", begin, end, size, alignment))
    return out


@st.composite
def packed(draw: st.DrawFn) -> tuple[list[Buffer], int]:
    """A rectangle of steps and bytes, cut into buffers: they fit it, and fill it."""
    steps, height = draw(st.integers(2, 12)), draw(st.integers(2, 40))
    pieces = [(0, steps, 0, height)]
    for _ in range(draw(st.integers(1, 25))):
        begin, end, low, high = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        if draw(st.booleans()) and end - begin > 1:
            cut = draw(st.integers(begin + 1, end - 1))
            pieces += [(begin, cut, low, high), (cut, end, low, high)]
        elif high - low > 1:
            cut = draw(st.integers(low + 1, high - 1))
            pieces += [(begin, end, low, cut), (begin, end, cut, high)]
        else:
            pieces.append((begin, end, low, high))
    return [
        Buffer(f"p{index}", begin, end, high - low)
        for index, (begin, end, low, high) in enumerate(pieces)
    ], height


def cut_at_random(chance: random.Random, steps: int, height: int, cuts: int) -> list[Buffer]:
    """A rectangle as in `packed`, with more pieces; those of most area are cut."""
    pieces = [(0, steps, 0, height)]
    for _ in range(cuts):
        pieces.sort(key=lambda piece: (piece[1] - piece[0]) * (piece[3] - piece[2]))
        begin, end, low, high = pieces.pop()
        if chance.random() < 0.5 and end - begin > 1:
            cut = chance.randrange(begin + 1, end)
            pieces += [(begin, cut, low, high), (cut, end, low, high)]
        else:
            cut = chance.randrange(low + 1, high)
            pieces += [(begin, end, low, cut), (begin, end, cut, high)]
    return [
        Buffer(f"p{index}", begin, end, high - low)
        for index, (begin, end, low, high) in enumerate(pieces)
    ]


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


def least_arena_by_permutations(given_buffers: list[Buffer]) -> int:
    """The least arena: each order, every buffer as low as those before it allow."""
    return min(max((_lowest(order)), default=0) for order in permutations(given_buffers))


def _lowest(order: tuple[Buffer, ...]) -> list[int]:
    """The tops of buffers that are put one on the other in this order."""
    tops: list[int] = []
    for index, buffer in enumerate(order):
        beneath = [
            top
            for top, other in zip(tops, order[:index], strict=True)
            if other.begin < buffer.end and buffer.begin < other.end and other.size_bytes
        ]
        step = buffer.alignment_bytes
        start = math.ceil(max(beneath, default=0) / step) * step
        tops.append(start + math.ceil(buffer.size_bytes / step) * step if buffer.size_bytes else 0)
    return tops


def one_part(given_buffers: list[Buffer] | tuple[Buffer, ...]) -> Sections:
    """The sections of buffers that hang together."""
    (part,) = split_into_sections(given_buffers)
    return part


# -- the nouns and the checker ---------------------------------------------------------------


@pytest.mark.parametrize("wrong", [(2, 2, 1, 1), (3, 2, 1, 1), (0, 1, -1, 1), (0, 1, 1, 0)])
def test_no_such_buffer(wrong: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="wrong"):
        Buffer("wrong", *wrong)


def test_live_peak_pads_sizes() -> None:
    assert live_peak(THREE) == 13
    assert live_peak([LONG, replace(EARLY, alignment_bytes=16), LATE]) == 24
    assert live_peak([]) == 0


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
@given(buffers(most=30), st.integers(0, 500))
def test_placements_pass_the_checker(some: list[Buffer], effort: int) -> None:
    placement = place(some, effort=effort)
    check_placement(some, placement)
    assert placement.arena_bytes >= live_peak(some)


@settings(max_examples=60, deadline=None)
@given(buffers(most=6))
def test_few_buffers_get_the_least_arena(some: list[Buffer]) -> None:
    assert place(some).arena_bytes == least_arena_by_permutations(some)


@settings(max_examples=60, deadline=None)
@given(buffers(most=8, alignments=(4,)))
def test_search_and_programme_agree(some: list[Buffer]) -> None:
    optimum = 0
    for part in split_into_sections(some):
        found = place_exactly(part, sum(part.size), 4, tuning.EXACT_NODES, Deadline(None))
        assert found is not None
        assert found.is_optimal
        arena = max(map(sum, zip(found.offsets, part.size, strict=True)))
        optimum = max(optimum, arena)
        fits = search_within(part, arena, 100_000, Deadline(None))
        fails = search_within(part, arena - 4, 100_000, Deadline(None))
        assert (fits.outcome, fails.outcome) == (Outcome.FOUND, Outcome.IMPOSSIBLE)
    assert place(some).arena_bytes == optimum


@settings(deadline=None)
@given(packed())
def test_what_fills_a_rectangle_fits_it(puzzle: tuple[list[Buffer], int]) -> None:
    pieces, height = puzzle
    placement = place(pieces)
    check_placement(pieces, placement)
    assert placement.arena_bytes == height == live_peak(pieces)


@settings(deadline=None)
@given(buffers(most=20), st.sampled_from([2, 16, 512]))
def test_a_bigger_alignment_is_obeyed(some: list[Buffer], alignment: int) -> None:
    wider = [replace(b, alignment_bytes=b.alignment_bytes * alignment) for b in some]
    offsets = place(wider, effort=200).offset_bytes
    assert all(offsets[b.name] % (b.alignment_bytes * alignment) == 0 for b in some)


@settings(deadline=None)
@given(buffers(most=20), st.randoms(use_true_random=False))
def test_the_order_of_the_question_does_not_matter(
    some: list[Buffer], chance: random.Random
) -> None:
    shuffled = list(some)
    chance.shuffle(shuffled)
    assert place(shuffled, effort=300) == place(some, effort=300)


@pytest.mark.parametrize(("steps", "height", "cuts"), [(8, 30, 14), (12, 60, 26), (16, 60, 32)])
def test_a_search_gives_up_no_solution(steps: int, height: int, cuts: int) -> None:
    """What has one is never called impossible, however many wrong turns there are."""
    outcomes = []
    for seed in range(100):
        chance = random.Random(seed)
        pieces = cut_at_random(chance, steps, height, cuts)
        for part in split_into_sections(pieces):
            rank = chance.sample(range(len(part.size)), len(part.size))
            search = Search(part, height, Valleys(part), rank)
            outcomes.append(search.run(3_000, 10**9, Deadline(None)))
            if outcomes[-1] is Outcome.FOUND:
                offsets = dict(zip(part.names, search.skyline.offset, strict=True))
                mine = [piece for piece in pieces if piece.name in offsets]
                check_placement(mine, Placement(offsets, height))
    assert Outcome.IMPOSSIBLE not in outcomes
    assert outcomes.count(Outcome.FOUND) > 0.9 * len(outcomes)


def test_search_fits_what_the_greedy_orders_do_not() -> None:
    part = one_part(TIGHT)
    least = min(
        max(map(sum, zip(place_in_order(part, order, best_fit), part.size, strict=True)))
        for order in orders(part).values()
        for best_fit in (False, True)
    )
    placement = place(TIGHT)
    check_placement(TIGHT, placement)
    assert least > placement.arena_bytes == live_peak(TIGHT) == 10


def test_a_capacity_is_enough() -> None:
    loose = place(TIGHT, capacity_bytes=20)
    check_placement(TIGHT, loose)
    assert loose.arena_bytes <= 20
    assert place(TIGHT, capacity_bytes=10, effort=0).arena_bytes > 10
    assert place(TIGHT, capacity_bytes=3).arena_bytes == 10


def test_nothing_to_place() -> None:
    assert place([]) == Placement({}, 0)
    assert place([Buffer("empty", 0, 1, 0)]) == Placement({"empty": 0}, 0)


def test_names_are_unique() -> None:
    with pytest.raises(ValueError, match="one name"):
        place([EARLY, EARLY])


def test_a_time_limit_leaves_a_placement() -> None:
    some = uneven(12)
    check_placement(some, place(some, time_limit_s=0.0))


# -- training steps --------------------------------------------------------------------------


@pytest.mark.parametrize("make", [transformer, pyramid, uneven])
@pytest.mark.parametrize("seed", [1, 2])
def test_training_steps_come_within_a_hundredth(
    make: Callable[[int, int], list[Buffer]],
    seed: int,
) -> None:
    some = make(12, seed)
    placement = place(some, effort=2_000)
    check_placement(some, placement)
    assert placement.arena_bytes <= 1.01 * live_peak(some)


def test_twenty_thousand_buffers() -> None:
    some = transformer(540)
    assert len(some) > 19_000
    started = time.process_time()
    placement = place(some)
    assert time.process_time() - started < 10
    assert placement.arena_bytes <= 1.01 * live_peak(some)
    assert not overlaps(some, placement)


def overlaps(some: list[Buffer], placement: Placement) -> int:
    """Pairs that share a byte at a step, counted with arrays: the checker would take a minute."""
    table = np.array(
        [[b.begin, b.end, placement.offset_bytes[b.name], b.padded_bytes] for b in some]
    )
    begin, end, low, size = table.T
    high = low + size
    count = 0
    for first in range(0, len(some), 500):
        rows = slice(first, first + 500)
        in_time = (begin[rows, None] < end) & (begin < end[rows, None])
        count += int((in_time & (low[rows, None] < high) & (low < high[rows, None])).sum())
    return count - int((size > 0).sum())  # each meets itself


# -- the benchmark ---------------------------------------------------------------------------


def write(folder: Path, name: str, some: tuple[Buffer, ...]) -> Path:
    """A CSV file as the benchmark reads it."""
    rows = [f"{b.name},{b.begin},{b.end},{b.size_bytes}" for b in some]
    path = folder / name
    path.write_text("\n".join(["id,lower,upper,size", *rows]) + "\n")
    return path


def test_benchmark_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "tight.10.csv", TIGHT)
    out = tmp_path / "results" / "out.json"
    assert benchmark.main([str(tmp_path), "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["buffers"], row["live_peak"], row["arena_bytes"]) == (6, 10, 10)
    assert (row["capacity_bytes"], row["fits"], row["ratio"], row["fault"]) == (10, True, 1.0, "")
    heading, printed = capsys.readouterr().out.splitlines()
    assert heading == benchmark.HEADING
    assert printed.split() == ["tight.10", "6", "10", "10", "1.0000", printed.split()[5], "yes"]


def test_benchmark_says_what_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "tight.csv", TIGHT)
    assert benchmark.main([str(path)]) == 0
    assert benchmark.main([str(path), "--capacity", "9"]) == 1
    assert capsys.readouterr().out.rstrip().endswith("NO")


def test_benchmark_asks_the_checker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "tight.10.csv", TIGHT)
    wrong = Placement({buffer.name: 0 for buffer in TIGHT}, 10)
    monkeypatch.setattr(benchmark, "place", lambda *given, **options: wrong)
    assert benchmark.main([str(path)]) == 1


def test_shapes_have_unique_names_and_reach_the_end() -> None:
    for make in (transformer, pyramid, uneven):
        some = make(3)
        assert len({b.name for b in some}) == len(some)
        last = max(b.end for b in some)
        gradients = [b for b in some if b.name.startswith("gradient")]
        assert {b.end for b in gradients} == {last}
        assert all(one.begin < other.begin for one, other in pairwise(gradients))

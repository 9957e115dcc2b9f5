"""Planned addresses: what the checker refuses, what is placed, and the search for less."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import addresses as benchmark
from benchmarks.address_shapes import pyramid, transformer, uneven
from benchmarks.check_addresses import BadPlacement, check_placement, live_peak
from fxremat.core.layout import Buffer, Placement
from fxremat.planner.addresses import place, split_into_sections

LONG, EARLY, LATE = Buffer("long", 0, 4, 8, 8), Buffer("early", 0, 2, 4), Buffer("late", 2, 4, 5)
THREE = (LONG, EARLY, LATE)
FINE = {"long": 8, "early": 0, "late": 1}


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


# --- the nouns and the checker --------------------------------------------------------------


@pytest.mark.parametrize("wrong", [(2, 2, 1, 1), (3, 2, 1, 1), (0, 1, -1, 1), (0, 1, 1, 0)])
def test_no_such_buffer(wrong: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="wrong"):
        Buffer("wrong", *wrong)


@given(buffers())
def test_live_peak_is_that_of_the_steps(some: list[Buffer]) -> None:
    """Also where buffers are parted into sections."""
    peak = max(sum(_padded(one) for one in some if one.begin <= k < one.end) for k in range(10))
    assert live_peak(some) == peak
    assert max((part.least_bytes for part in split_into_sections(some)), default=0) == peak


def _padded(buffer: Buffer) -> int:
    return math.ceil(buffer.size_bytes / buffer.alignment_bytes) * buffer.alignment_bytes


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
    check_placement(THREE, Placement(FINE, 16))
    padded = replace(EARLY, alignment_bytes=8)
    with pytest.raises(BadPlacement, match="overlap"):
        check_placement(
            [padded, Buffer("beside", 0, 2, 4)], Placement({"early": 0, "beside": 4}, 8)
        )
    with pytest.raises(BadPlacement, match="beyond"):
        check_placement([padded], Placement({"early": 0}, 4))
    check_placement([padded], Placement({"early": 0}, 8))


def test_sections_part_where_nothing_is_alive_across() -> None:
    parts = split_into_sections([LATE, EARLY, Buffer("empty", 0, 4, 0)])
    assert [part.names for part in parts] == [["early"], ["late"]]
    (part,) = split_into_sections(THREE)
    assert part.live_bytes == (12, 13)


# --- place ----------------------------------------------------------------------------------


@settings(deadline=None)
@given(buffers(most=30), st.randoms(use_true_random=False))
def test_placements_pass_the_checker(some: list[Buffer], chance: random.Random) -> None:
    """The order of the question does not matter."""
    placement = place(some)
    check_placement(some, placement)
    assert placement.arena_bytes >= live_peak(some)
    shuffled = list(some)
    chance.shuffle(shuffled)
    assert place(shuffled) == placement


def test_nothing_to_place() -> None:
    """Names are unique."""
    assert place([]) == Placement({}, 0)
    assert place([Buffer("empty", 0, 1, 0)]) == Placement({"empty": 0}, 0)
    with pytest.raises(ValueError, match="one name"):
        place([EARLY, EARLY])


@pytest.mark.parametrize("make", [transformer, pyramid, uneven])
@pytest.mark.parametrize("seed", [1, 2])
def test_training_steps_come_within_a_hundredth(
    make: Callable[[int, int], list[Buffer]], seed: int
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


# --- the search -----------------------------------------------------------------------------

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


def test_benchmark_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its search fits what no greedy order does, and it says what does not fit."""
    rows = [f"{b.name},{b.begin},{b.end},{b.size_bytes}" for b in TIGHT]
    path, out = tmp_path / "tight.10.csv", tmp_path / "results" / "out.json"
    path.write_text("\n".join(["id,lower,upper,size", *rows]) + "\n")
    assert place(TIGHT).arena_bytes > live_peak(TIGHT) == 10
    assert benchmark.main([str(tmp_path), "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["buffers"], row["live_peak_bytes"], row["arena_bytes"]) == (6, 10, 10)
    assert (row["capacity_bytes"], row["fits"], row["ratio"], row["fault"]) == (10, True, 1.0, "")
    path = path.rename(tmp_path / "tight.csv")
    assert benchmark.main([str(path)]) == 0
    assert benchmark.main([str(path), "--capacity", "9"]) == 1
    assert capsys.readouterr().out.rstrip().endswith("NO")

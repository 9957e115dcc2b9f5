"""The search for small arenas: optimal on few buffers, and the benchmark that runs it."""

from __future__ import annotations

import json
import math
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import addresses as benchmark
from benchmarks.placing import place
from fxremat.core.check_addresses import check_placement
from fxremat.core.layout import Buffer, live_peak
from fxremat.planner.addresses import place as greedy
from tests.buffers import buffers

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


@settings(max_examples=60, deadline=None)
@given(buffers(most=6))
def test_few_buffers_get_the_least_arena(some: list[Buffer]) -> None:
    assert place(some).arena_bytes == least_arena_by_permutations(some)


@settings(deadline=None)
@given(packed())
def test_what_fills_a_rectangle_fits_it(puzzle: tuple[list[Buffer], int]) -> None:
    pieces, height = puzzle
    placement = place(pieces)
    check_placement(pieces, placement)
    assert placement.arena_bytes == height == live_peak(pieces)


def test_search_fits_what_the_greedy_orders_do_not() -> None:
    placement = place(TIGHT)
    check_placement(TIGHT, placement)
    assert greedy(TIGHT).arena_bytes > placement.arena_bytes == live_peak(TIGHT) == 10


def test_a_capacity_is_enough() -> None:
    loose = place(TIGHT, capacity_bytes=20)
    check_placement(TIGHT, loose)
    assert loose.arena_bytes <= 20
    assert place(TIGHT, capacity_bytes=10, effort=0).arena_bytes > 10
    assert place(TIGHT, capacity_bytes=3).arena_bytes == 10


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
    assert (row["buffers"], row["live_peak_bytes"], row["arena_bytes"]) == (6, 10, 10)
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

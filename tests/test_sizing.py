"""A step's peak at many sizes: expected from a few dry runs, and the line between two plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fxremat.compile.dry_run.dry_run import AllocatorEvents, DryRun
from fxremat.core.events import Allocate, Free
from fxremat.whatif.largest_size import _in_dry_runs, _largest_of_torch
from fxremat.whatif.symbolic_step import PeaksBySize


def shown(size: int, scores: int, kept: int, rounded: int = 1) -> DryRun:
    """Weights, activations and scores; what is ``rounded`` up is no polynomial."""
    row, square = kept * size, scores * size * size
    scratch = -(-size // rounded) * 64
    events = (
        Allocate("weights", 1000), Allocate("0", row), Allocate("1", square), Free("1"),
        Allocate("2", scratch), Free("2"), Free("0"),
    )  # fmt: skip
    live = (1000 + row, 1000 + row + square, 1000 + row + scratch)
    return DryRun(max(live), live, (), {}, allocator=AllocatorEvents(events))


@given(st.integers(0, 9), st.integers(1, 50), st.integers(1, 8), st.integers(1, 300))
def test_polynomials_are_known_from_three_sizes(
    scores: int, kept: int, first: int, size: int
) -> None:
    """Every event at every point, and no further dry run is made."""
    asked: list[int] = []

    def dry_run(size: int) -> DryRun:
        asked.append(size)
        return shown(size, scores, kept)

    peaks = PeaksBySize(dry_run, lambda one: one.peak_bytes)
    allocated = PeaksBySize(dry_run, lambda one: sum(
        e.nbytes for e in one.events if isinstance(e, Allocate)
    ))  # fmt: skip
    assert peaks.expected(size, first).peak_bytes == shown(size, scores, kept).peak_bytes
    assert asked == [first, 2 * first, 3 * first]
    asked.clear()
    events = shown(size, scores, kept).events
    assert allocated.peak_of(allocated.expected(size, first)) == sum(
        e.nbytes for e in events if isinstance(e, Allocate)
    )
    assert len(asked) == 3


def test_other_events_have_a_dry_run() -> None:
    """As where a size of one leaves out what others do."""

    def dry_run(size: int) -> DryRun:
        one = shown(size, 1, 3)
        return replace(one, allocator=AllocatorEvents(one.events[:-1])) if size == 2 else one

    peaks = PeaksBySize(dry_run, lambda one: one.peak_bytes)
    assert peaks.expected(50, 2).peak_bytes == shown(50, 1, 3).peak_bytes
    assert sorted(peaks.shown) == [2, 4, 6, 50]


def test_what_is_rounded_up_is_found_by_dry_runs() -> None:
    """What is expected leaves most out; what is named fits, and is the largest, or nearly."""
    peaks = PeaksBySize(lambda size: shown(size, 0, 3, rounded=7), lambda one: one.peak_bytes)
    steps: Any = SimpleNamespace(
        sizes={"batch": 2},
        what="batch",
        expected_bytes=lambda size: peaks.expected(size, 2).peak_bytes,
        peak_bytes=lambda size: peaks.at(size).peak_bytes,
    )
    found = _largest_of_torch(steps, 10_000)
    assert found is not None
    largest, peak = found
    true = max(s for s in range(1000) if shown(s, 0, 3, rounded=7).peak_bytes <= 10_000)
    assert peak == shown(largest, 0, 3, rounded=7).peak_bytes <= 10_000
    assert 0.99 * true <= largest <= true
    assert len(peaks.shown) < 12
    assert _largest_of_torch(steps, 1) is None


@dataclass
class Surprising:
    """A step of which each plan really takes a tenth more; at least 10 bytes of each size."""

    size: int
    log: list[tuple[int, int]]

    def quickest(self, target: int) -> Any:
        self.log.append((self.size, target))
        peak = max(target, 10 * self.size)
        return SimpleNamespace(peak_bytes=peak, time_us=1.0, dry_run_peak=lambda: peak * 11 // 10)


def test_what_takes_more_than_expected_aims_lower_and_then_is_smaller() -> None:
    """The same size first; what is named was counted within the budget."""
    log: list[tuple[int, int]] = []

    def at(size: int) -> Any:
        return Surprising(size, log)

    found = _in_dry_runs(at, 95, 50, 1000, 0)
    assert found is not None
    size, peak, _ = found
    assert log[:2] == [(95, 1000), (95, 909)]
    assert 50 < size <= 90
    assert peak <= 1000
    assert _in_dry_runs(at, 95, 94, 1000, 0) is None

"""Measured peaks, and a step's peak at many sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxremat.compile.dry_run.dry_run import AllocatorEvents, DryRun
from fxremat.core.events import Allocate, Free
from fxremat.memory.measured_peak import (
    MeasuredPeak,
    _running_peak,
    held_bytes,
    measure_call,
    measure_peak,
)
from fxremat.whatif.largest_size import _largest_of_torch
from fxremat.whatif.symbolic_step import PeaksBySize

# --- measure ------------------------------------------------------------------------------

SIDE = 64
SQUARE = SIDE * SIDE * 4  # bytes of one float32 matrix


def steps() -> None:
    """Allocates 4,000, then 2,000 more, frees the first, then 12,000 more."""
    first = torch.empty(1000)
    second = torch.empty(500)
    del first
    third = torch.empty(3000)
    del second, third


def test_peak_of_allocations_on_cpu() -> None:
    """With what the function returns, while it runs."""
    assert measure_peak(steps) == MeasuredPeak(14_000, 0, 14_000, "cpu")
    assert measure_peak(lambda: torch.empty(1000)).above_start_bytes == 4000
    assert measure_peak(lambda: None).above_start_bytes == 0


def test_events_are_taken_by_time_and_ties_as_recorded() -> None:
    late = (9, -10, "CPU")
    assert _running_peak([late, (5, 10, "CPU"), (6, 20, "CPU")]) == 30
    assert _running_peak([(5, 10, "CPU"), (5, -10, "CPU"), (5, 20, "CPU")]) == 20
    assert _running_peak([(5, 10, "CPU"), (5, 20, "CPU"), (5, -10, "CPU")]) == 30
    assert _running_peak([(5, 10, "CPU"), (5, 20, "CUDA"), (6, 30, "CUDA")], "CUDA") == 50


def test_freeing_what_was_there_is_room_for_more() -> None:
    box = [torch.empty(1000)]

    def swap() -> None:
        box.clear()
        box.append(torch.empty(1500))

    assert measure_peak(swap, held=list(box)).above_start_bytes == 6000
    # The list that was measured held the tensor; now only the box does.
    assert measure_peak(swap).above_start_bytes == 0


def train(matrix: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Two matrix products with an exponential between; saves two matrices."""
    return torch.sin(torch.exp(matrix @ weight) @ weight)


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix and a weight that wants a gradient."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(SIDE, SIDE, generator=generator)
    return matrix, torch.randn(SIDE, SIDE, generator=generator).requires_grad_()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot_eager"])
def test_forward_alone(compiled: bool) -> None:
    """At most three matrices live: exp's output while sin reads its argument and writes."""
    function = torch.compile(train, backend="aot_eager") if compiled else train
    matrix, weight = leaves()
    with torch.no_grad():
        function(matrix, weight)
        peak = measure_peak(lambda: function(matrix, weight), held=[matrix, weight])
    assert peak == MeasuredPeak(4 * SQUARE, 2 * SQUARE, 2 * SQUARE, "cpu")


MATRIX = torch.empty(10, 10)


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        ((MATRIX, MATRIX.t(), MATRIX[2:], [MATRIX, {"again": MATRIX}]), 400),
        ((torch.empty(100)[:3],), 400),
        ((None, 3, "text", [2.0]), 0),
        ((torch.empty(10), torch.empty(10, device="meta")), 40),
    ],
    ids=["storages count once", "a view has all of its storage", "something else", "elsewhere"],
)
def test_held_bytes(given: tuple[Any, ...], nbytes: int) -> None:
    assert held_bytes(*given, device="cpu") == nbytes


def test_held_bytes_of_a_module_with_gradients() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    parameters = 4 * (4 * 8 + 8 + 8 + 8)
    buffers = 4 * (8 + 8) + 8
    assert held_bytes(module) == parameters + buffers
    module(torch.ones(2, 4)).sum().backward()
    assert held_bytes(module) == 2 * parameters + buffers


def test_held_bytes_of_an_optimizer() -> None:
    weight = torch.nn.Parameter(torch.ones(100))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(100)
    optimizer.step()
    assert held_bytes(optimizer) == 4 * 400 + 4  # weight, gradient, two moments, step
    assert held_bytes(optimizer, weight) == held_bytes(optimizer)


def test_what_cannot_be_counted_or_measured() -> None:
    with pytest.raises(TypeError, match="cannot count the bytes of a function"):
        held_bytes(train)
    with pytest.raises(ValueError, match="cannot measure on 'meta'"):
        measure_peak(steps, device="meta")


@dataclass
class Counters:
    """What CUDA's allocator counts, and nobody may reset."""

    current: int
    peak: int
    allocated: int = 10**9

    def allocate(self, nbytes: int) -> None:
        self.current += nbytes
        self.allocated += max(0, nbytes)
        self.peak = max(self.peak, self.current)

    def stats(self, device: torch.device) -> dict[str, int]:
        return {f"allocated_bytes.all.{name}": n for name, n in vars(self).items()}


CALLS: dict[str, tuple[int, tuple[int, ...], int]] = {
    # the peak before, what is allocated and freed, and what is found
    "the peak is new": (1000, (500, 300, -800), 800),
    "what was freed does not count": (1000, (500, -500, 600, -600), 600),
    "without a new peak all that was allocated counts": (9000, (500, 300, -800), 800),
    "also what was freed": (9000, (500, -500, 600, -600), 1100),
    "but no more than the old peak": (1700, (500, -500, 600, -600), 700),
}


@pytest.mark.parametrize(("peak", "sizes", "above"), CALLS.values(), ids=CALLS)
def test_a_call_on_cuda_leaves_the_peak_statistics(
    monkeypatch: pytest.MonkeyPatch, peak: int, sizes: tuple[int, ...], above: int
) -> None:
    counters = Counters(1000, peak)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", counters.stats)
    resets: list[Any] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    taken = measure_call(lambda: list(map(counters.allocate, sizes)), torch.device("cuda"))
    assert (taken, resets) == (above, [])


@pytest.mark.gpu
def test_peak_of_allocations_on_cuda() -> None:
    held = torch.empty(2**20, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()

    def allocate() -> None:
        first = torch.empty(2**20, dtype=torch.uint8, device="cuda")
        del first
        torch.empty(2**21, dtype=torch.uint8, device="cuda")

    highest = torch.cuda.max_memory_allocated()
    peak = measure_peak(allocate, held=[held])
    assert torch.cuda.max_memory_allocated() == max(highest, peak.peak_bytes)
    assert (peak.start_bytes, peak.above_start_bytes) == (before, 2**21)
    assert peak.device.startswith("cuda")


# --- sizing -------------------------------------------------------------------------------


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

"""The search for the largest size that fits, by torch's own partition and by plans of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fxremat.compile.constants import CLOSE_ENOUGH
from fxremat.core.constants import ROUNDS
from fxremat.whatif.extrapolation import PlannedSteps, TorchSteps

Way = Literal["torch.compile", "checkpointed blocks", "fxremat"]
WAYS: tuple[Way, ...] = ("torch.compile", "checkpointed blocks", "fxremat")


@dataclass(frozen=True)
class Point:
    """A step of one size of what varies, by one way to train; of size 0 where not even 1 fits.

    The peak is in the bytes that the budget counts, beside what is held, the time that of the whole
    step, in microseconds.
    """

    what: str
    way: Way
    size: int
    peak_bytes: int
    time_us: float

    @property
    def per_second(self) -> float:
        """Sizes a second, as samples or tokens."""
        return 1e6 * self.size / self.time_us if self.time_us else 0.0


def points_by_torch(steps: TorchSteps, way: Way, budget: int) -> list[Point]:
    """The graph as torch cuts it: at quarters of the largest size that fits, and at that size.

    The largest is counted in a dry run; at quarters of it the peak is the expected one.
    """
    found = _largest_of_torch(steps, budget)
    if found is None:
        return [Point(steps.what, way, 0, 0, 0.0)]
    largest, peak = found
    below = sorted({max(1, quarters * largest // 4) for quarters in (1, 2, 3)} - {largest})
    peaks = {**{size: steps.expected_bytes(size) for size in below}, largest: peak}
    return [Point(steps.what, way, size, peaks[size], steps.time_us(size)) for size in peaks]


def _largest_of_torch(steps: TorchSteps, budget: int) -> tuple[int, int] | None:
    """The largest size that is expected to fit, and its peak in a dry run.

    Where that takes more than was expected, the next one aims lower by as much. Where nothing is
    expected to fit any more, sizes are counted in dry runs until the largest is found.
    """
    first, target = steps.sizes[steps.what], budget
    size = largest_within(steps.expected_bytes, target, first)
    while size:
        peak = steps.peak_bytes(size)
        if peak <= budget:
            return size, peak
        target -= peak - budget
        size = min(size - 1, largest_within(steps.expected_bytes, target, size))
    size = largest_within(steps.peak_bytes, budget, first)
    return (size, steps.peak_bytes(size)) if size else None


def points_by_us(
    steps: PlannedSteps,
    by_torch: Mapping[Way, Sequence[Point]],
    budget: int,
    weights_bytes: int,
) -> list[Point]:
    """Where torch's own partition fits it is ours, too; then what lies between, and the largest.

    The largest is counted in a dry run, and smaller ones follow where it does not fit. In between,
    at the largest size that checkpointing fits, else halfway, the peak is the planned one. Plans
    are those of the quickest solver.
    """
    what, plain = steps.plain.what, steps.plain
    below = [replace(one, way="fxremat") for one in by_torch["torch.compile"] if one.size]
    fits = below[-1].size if below else 0
    ends = [one.size for one in by_torch.get("checkpointed blocks", ())[-1:] if one.size]
    for end in ends:
        if end < fits and all(one.size != end for one in below):
            there = plain.expected_bytes(end), plain.time_us(end)
            below = sorted([*below, Point(what, "fxremat", end, *there)], key=lambda one: one.size)
    fixed = 2 * weights_bytes  # what a step takes at no size at all: weights, and their gradients
    first = max(1, *(points[-1].size for points in by_torch.values()))
    guess = _guess(steps, first, budget, fixed)
    found = _in_dry_runs(steps, guess, fits, budget, fixed)
    if found is None:
        return below or [Point(what, "fxremat", 0, 0, 0.0)]
    size, peak, time_us = found
    for between in (one for one in ends or [(size + fits) // 2] if fits < one < size):
        least = fixed + (peak - fixed) * between / size
        most = plain.expected_bytes(between)
        kept = min(1.0, max(0.0, (budget - least) / max(1.0, most - least)))
        for part in (kept, kept / 2, 0.0):
            plan = steps.quickest(between, budget, part)
            if plan.peak_bytes <= budget:
                below.append(Point(what, "fxremat", between, plan.peak_bytes, plan.time_us))
                break
    return [*below, Point(what, "fxremat", size, peak, time_us)]


def _guess(steps: PlannedSteps, size: int, budget: int, fixed: int) -> int:
    """The size whose least peak, as the planner expects it, is the budget or nearly.

    Variants need sizes as numbers, so the line through the last two peaks leads to the next size.
    """
    before, low = 0, fixed
    for _ in range(ROUNDS):
        high = steps.quickest(size, 0).peak_bytes
        slope = (high - low) / (size - before)
        guess = max(1, size + int((budget - high) // slope)) if slope > 0 else size
        if abs(guess - size) <= CLOSE_ENOUGH * size:
            break
        before, low, size = size, high, guess
    return size


def _in_dry_runs(
    steps: PlannedSteps, size: int, fits: int, budget: int, fixed: int
) -> tuple[int, int, float] | None:
    """The size, or a smaller one above ``fits``, whose plan is within the budget in a dry run.

    It comes with its peak and its time. Where a plan takes more than was expected, the next one
    aims lower by as much: once at the same size, if a plan for that is to be expected, else at a
    smaller one. Where that is far smaller, a size between the two is tried.
    """
    target, has_aimed_lower, too_large = budget, False, 0
    while size > fits:
        plan, within = steps.quickest(size, target), target
        taken = plan.peak_bytes
        if taken <= target:
            taken, within = plan.dry_run_peak(), budget
            if taken <= budget:
                found = size, taken, plan.time_us
                return _between(steps, (size + too_large) // 2, target, budget, found) or found
            target = min(target - 1, target * budget // taken)
            if not has_aimed_lower:
                has_aimed_lower = True
                continue
        too_large, has_aimed_lower = size, False
        scaled = size * (within - fixed) // max(1, taken - fixed)  # all but what is fixed grows
        size = min(size - 1, max(0, scaled))
    return None


def _between(
    steps: PlannedSteps, size: int, target: int, budget: int,
    found: tuple[int, int, float],
) -> tuple[int, int, float] | None:  # fmt: skip
    """A far larger size than what was found, if its plan is within the budget in a dry run."""
    if size <= (1 + CLOSE_ENOUGH) * found[0]:
        return None
    plan = steps.quickest(size, target)
    if plan.peak_bytes > target:
        return None
    taken = plan.dry_run_peak()
    return (size, taken, plan.time_us) if taken <= budget else None


def largest_within(peak: Callable[[int], int], budget: int, first: int) -> int:
    """The largest size whose ``peak`` is within the budget, for a peak that grows with it.

    Peaks are nearly straight lines, so the next size asked for is where the line through the last
    two meets the budget.
    """
    known = dict[int, int]()
    low, high, size = 0, None, max(1, first)
    while high is None or high - low > 1:
        known[size] = peak(size)
        if known[size] <= budget:
            low = size
        else:
            high = size
        size = _next_size(known, budget, low, high)
    return low


def _next_size(known: Mapping[int, int], budget: int, low: int, high: int | None) -> int:
    """Strictly between the largest that fits and the smallest that does not."""
    top = 2**ROUNDS * low + 1 if high is None else high - 1
    near = sorted(known, key=lambda size: abs(known[size] - budget))[:2]
    guess = 2 * low if high is None else (low + high) // 2
    if len(near) == 2:
        one, other = near
        slope = (known[one] - known[other]) / (one - other)
        if slope > 0:
            line = one + int((budget - known[one]) // slope)
            line += line == low
            if high is None or low < line < high:  # reserved bytes rise in steps: halves else
                guess = line
    return max(low + 1, min(top, guess))

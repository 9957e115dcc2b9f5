"""Versions of runs: the best of all choices, as far as trying them all can tell."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.core.constants import MEASURABLE
from fxremat.core.step import Step, StepPoint, Version
from fxremat.planner.step_versions import fastest, lowest, not_beaten

bytes_ = st.integers(0, 60)
versions = st.builds(Version, st.integers(1, 40).map(float), bytes_, bytes_, bytes_)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Runs of one or two parts, the last to come the first to go."""
    parts = draw(st.lists(st.lists(versions, min_size=1, max_size=4), min_size=1, max_size=2))
    part_of = draw(st.lists(st.integers(0, len(parts) - 1), min_size=1, max_size=4))
    count = len(part_of)
    moments = [StepPoint(draw(bytes_), tuple(range(run)), run, "forward") for run in range(count)]
    moments.append(StepPoint(draw(bytes_), tuple(range(count))))
    for run in reversed(range(count)):
        moments.append(StepPoint(draw(bytes_), tuple(range(run)), run, "backward"))
    return Step(tuple(moments), tuple(part_of), tuple(map(tuple, parts)))


def choices(step: Step, most_versions: int) -> list[tuple[int, ...]]:
    """All, with at most so many versions of each part."""
    places = [range(len(step.versions[part])) for part in step.part_of]

    def few(chosen: tuple[int, ...]) -> bool:
        taken = set(zip(step.part_of, chosen, strict=True))
        parts = range(len(step.versions))
        return all(sum(part == p for p, _ in taken) <= most_versions for part in parts)

    return [chosen for chosen in product(*places) if few(chosen)]


@given(steps(), st.integers(1, 300), st.integers(1, 2))
def test_the_fastest_within_the_budget(step: Step, budget: int, most: int) -> None:
    within = [one for one in choices(step, most) if step.peak_bytes(one) <= budget]
    found = fastest(step, budget, most)
    assert (found is None) == (not within)
    if found is not None:
        assert found in within
        assert step.time_us(found) <= min(map(step.time_us, within)) * (1 + MEASURABLE) * 1.002


@given(steps(), st.integers(1, 2))
def test_the_lowest(step: Step, most: int) -> None:
    found = lowest(step, most)
    assert step.peak_bytes(found) == min(map(step.peak_bytes, choices(step, most)))
    assert fastest(step, step.peak_bytes(found), most) is not None


@given(st.lists(versions, min_size=1, max_size=6))
def test_what_is_left_out_is_beaten_by_what_is_kept(offered: list[Version]) -> None:
    kept = [offered[k] for k in not_beaten(offered)]
    assert len(set(kept)) == len(kept)
    for one in offered:
        assert any(
            all(a <= b for a, b in zip(better.figures, one.figures, strict=True)) for better in kept
        )


@pytest.mark.parametrize("count", [24, 48])
def test_many_runs_are_no_harder(count: int) -> None:
    """A front of versions, as a block of a transformer has it: two of them are mixed."""
    front = tuple(
        Version(100.0 + 3.0 * k * k, 40 - 4 * k, 60 - 3 * k, 90 - 4 * k) for k in range(9)
    )
    runs = range(count)
    moments = [StepPoint(100, tuple(range(run)), run, "forward") for run in runs]
    moments += [StepPoint(100, tuple(range(run)), run, "backward") for run in reversed(runs)]
    step = Step(tuple(moments), (0,) * count, (front,))
    found = fastest(step, 100 + 25 * count)
    assert found is not None
    assert step.peak_bytes(found) <= 100 + 25 * count
    assert len(set(found)) == 2
    alike = [step.time_us((k,) * count) for k in range(9)
             if step.peak_bytes((k,) * count) <= 100 + 25 * count]  # fmt: skip
    assert step.time_us(found) <= min(alike)

"""Bytes of a step, by what waits and what runs at each moment."""

from __future__ import annotations

from fxremat.core.step import Step, StepPoint, Version

THRIFTY = Version(12.0, 1, 5, 9)
LAVISH = Version(10.0, 4, 6, 7)


def step() -> Step:
    """Two runs of one part, one within the other."""
    moments = (
        StepPoint(20, (), 0, "forward"),
        StepPoint(22, (0,), 1, "forward"),
        StepPoint(30, (0, 1)),
        StepPoint(20, (0,), 1, "backward"),
        StepPoint(23, (), 0, "backward"),
    )
    return Step(moments, (0, 0), ((THRIFTY, LAVISH),))


def test_what_waits_and_what_runs_is_on_top_of_what_is_outside() -> None:
    found = [step().bytes_at(moment, (1, 0)) for moment in step().points]
    assert found == [20 + 6, 22 + 4 + 5, 30 + 4 + 1, 20 + 4 + 9, 23 + 7]
    assert step().peak_bytes((1, 0)) == 35
    assert step().time_us((1, 0)) == 22.0


def test_a_step_without_moments_takes_nothing() -> None:
    assert Step((), (), ()).peak_bytes(()) == 0

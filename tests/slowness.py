"""Fails a test that takes long and is not marked ``slow``: ``pytest --fail-slow SECONDS``.

A busy machine makes a test wait, and threads let it compute several seconds in one. Neither makes
it slow here: what counts is the smaller of its time on the clock and its time on processors, that
of the compilers it starts included. Ranks that a server of processes starts are not seen there, so
a part of the time on the clock counts in any case.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from typing import Any

import pytest

LEAST_PART = 0.25
"""Of the time on the clock: a test is not made to wait longer by anything but itself."""


class SlowTests:
    """A plugin that looks at the preparation, the call and the cleaning up of each test."""

    def __init__(self, most_seconds: float) -> None:
        self.most_seconds = most_seconds
        self.before = processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A part that took too long fails, if nothing else made it fail."""
        report = yield
        now = processor_seconds()
        computed, self.before = now - self.before, now
        seconds = max(min(call.duration, computed), LEAST_PART * call.duration)
        if report.passed and seconds > self.most_seconds and not item.get_closest_marker("slow"):
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} took {seconds:.1f} s in its {call.when}, more than "
                f"{self.most_seconds:g} s: make it faster or mark it with pytest.mark.slow"
            )
        return report


def slow_but(always: Iterable[str], values: Iterable[str]) -> list[Any]:
    """Parameters of a test, of which `make test` takes ``always`` alone."""
    kept = set(always)
    return [v if v in kept else pytest.param(v, marks=pytest.mark.slow) for v in values]


def processor_seconds() -> float:
    """What this process and its children that ended have computed until now."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system

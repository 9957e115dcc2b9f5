"""Ctrl-C while something that is not Python runs, and what is said of what takes long."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator

import highspy
import pytest

from fxremat.compile import stage_times
from fxremat.compile.stage_times import StageTimes
from fxremat.planner import SolverOptions, solve
from fxremat.planner.deadline import Deadline
from fxremat.planner.milp.highs import Milp
from tests.chains import blocks


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, also where the tests run in the background of a shell: that ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def programme() -> Milp:
    """Of two columns that are 0 or 1, one at least is 1."""
    milp = Milp()
    first, second = milp.binary(1.0), milp.binary(2.0)
    milp.row([(first, 1.0), (second, 1.0)], 1.0, 2.0)
    return milp


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_does_not_wait_for_a_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it runs without looking up."""
    ended = threading.Event()
    monkeypatch.setattr(highspy.Highs, "run", lambda self: ended.wait(30))
    begun = time.perf_counter()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        programme().solve(Deadline(None))
    ended.set()
    assert time.perf_counter() - begun < 2


def test_any_thread_may_ask() -> None:
    found: list[float] = []
    thread = threading.Thread(
        target=lambda: found.append(programme().solve(Deadline(None)).objective)
    )
    thread.start()
    thread.join()
    assert found == [1.0]


def test_what_the_solver_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: highspy.Highs) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(highspy.Highs, "run", fail)
    with pytest.raises(MemoryError, match="no more"):
        programme().solve(Deadline(None))


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_planning_within_two_seconds() -> None:
    """A problem that takes much longer; nothing is caught on the way."""
    problem = blocks(400)
    budget = problem.resident_bytes + 1
    begun = time.perf_counter()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        solve(problem, budget, "auto", SolverOptions(time_limit_s=60))
    assert time.perf_counter() - begun < 2.5


def test_a_long_stage_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stage_times, "LONG_S", 0.1)
    times = StageTimes({"trace": 7.0})
    with caplog.at_level(logging.INFO, logger=stage_times.__name__):
        with times.stage("verify"):
            pass
        with times.stage("plan"):
            time.sleep(0.4)
    assert [record.getMessage() for record in caplog.records] == ["still planning; 7 s so far"]

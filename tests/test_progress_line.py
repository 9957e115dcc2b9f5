"""The line on the terminal while planning takes long."""

from __future__ import annotations

import io
import logging
import sys
import time

import pytest

from fxremat.compile import stage_times
from fxremat.compile.stage_times import CLEAR, StageTimes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(
    monkeypatch: pytest.MonkeyPatch,
    stream: io.StringIO,
    level: int = logging.WARNING,
    most_waits: int = 0,
) -> str:
    """What planning that takes long writes to standard error.

    On a busy machine the thread that writes may come late: it is waited for so often.
    """
    monkeypatch.setattr(stage_times, "LONG_S", 0.1)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(stage_times.log, "level", level)
    stage_times.log.manager._clear_cache()  # type: ignore[attr-defined]
    times = StageTimes({"trace": 7.0})
    with times.stage("plan"), times.stage("verify"):
        time.sleep(0.3)
        for _ in range(most_waits):
            if not stream.getvalue():
                time.sleep(0.1)
    return stream.getvalue()


def test_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(monkeypatch, Terminal(), most_waits=100)
    assert text.startswith(f"{CLEAR}fxremat: verifying a plan; 7 s so far")
    assert text.endswith(CLEAR)
    assert "\n" not in text


def test_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(monkeypatch, io.StringIO()) == ""


def test_of_several_ranks_one_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert written(monkeypatch, Terminal()) == ""


def test_not_where_the_log_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CLEAR not in written(monkeypatch, Terminal(), logging.INFO)

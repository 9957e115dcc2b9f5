"""Machines on which other programs run: what they disturb is not kept, nor planned by."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fxremat
from fxremat.core.constants import MOST_WAITING
from fxremat.cost import op_timers, timing
from fxremat.cost.call_times import KIND, CallTimes
from fxremat.cost.number_file import number_path
from fxremat.cost.timing import MachineIsBusy
from fxremat.report.report import Report
from tests.single_calls import ATEN
from tests.small import Block

HOST = torch.device("cpu")
A, B = torch.empty(8, 16), torch.empty(16, 32)


def timed(waits: Iterable[float], seconds: list[float], patch: pytest.MonkeyPatch) -> timing.Timing:
    """What is found where the runs take so long, and threads wait so long for a core in each."""
    waited, took = iter([w for each in waits for w in (0.0, each)]), iter(seconds)
    patch.setattr(timing, "waiting_s", lambda device: next(waited))
    patch.setattr(timing, "_seconds", lambda call, device: next(took))
    return timing.quickest(lambda: None, HOST)


def test_runs_that_other_programs_disturb_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what the kernel's own tasks take now and then."""
    waits = [2e-3, 1e-3, *[1e-4] * 500]
    assert timed(waits, [2e-3, 3e-3, *[5e-3] * 500], monkeypatch) == pytest.approx((5000.0, 0.0))


def test_where_each_run_is_disturbed_that_counts_which_waited_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Short runs are looked at together."""
    waits, seconds = [8e-3, 4e-3, *[8e-3] * 500], [16e-3, 20e-3, *[16e-3] * 500]
    assert timed(waits, seconds, monkeypatch) == pytest.approx((20e3, 0.2))
    found = timed([1e-3] * 500, [1e-5] * 50_000, monkeypatch)
    assert found == pytest.approx((10.0, 1.0), rel=0.02)


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="told by Linux alone")
def test_linux_tells_how_long_threads_wait_for_a_core() -> None:
    """Beside a program on the same core they do for half of the time."""
    here = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(here)})
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            begin, before = time.monotonic(), timing.waiting_s(HOST)
            while (passed := time.monotonic() - begin) < 1.0:
                pass
            waited = timing.waiting_s(HOST) - before
        finally:
            other.kill()
            os.sched_setaffinity(0, here)
    assert waited > MOST_WAITING * passed
    assert timing.waiting_s(torch.device("cuda")) == 0.0


# --- what is kept -------------------------------------------------------------------------


def waits(part: float, patch: pytest.MonkeyPatch) -> None:
    """Each run takes half a millisecond, for this part of which its threads wait for a core."""
    now = [0.0]

    def run(call: Callable[[], object], device: torch.device) -> float:
        call()
        now[0] += part * 5e-4
        return 5e-4

    patch.setattr(timing, "waiting_s", lambda device: now[0])
    patch.setattr(timing, "BUSY_TIMING_S", 1e-3)
    patch.setattr(timing, "_seconds", run)


def test_what_is_always_disturbed_counts_and_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits(0.1, monkeypatch)
    measured = mock.Mock(side_effect=timing.quickest)
    monkeypatch.setattr(timing, "quickest", measured)
    for again in (1, 2):
        timing.forget_unsure()
        measured.reset_mock()
        for _ in range(3):  # tried neither for each node anew, nor for each graph
            found = CallTimes(HOST, tmp_path).of_call(ATEN.mm.default, (A, B), {})
            assert found == pytest.approx(500.0), again
            assert op_timers.measured_rates(HOST, tmp_path).call_us == pytest.approx(500.0)
        assert measured.call_count == 4, "both, and the clock beside each"
    for kind in (KIND, op_timers.KIND):
        assert not number_path(tmp_path, HOST, kind).exists()


def test_what_waits_for_most_of_its_time_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks, which have to plan alike, and were asked to measure, take what they find."""
    waits(0.5, monkeypatch)
    calls = CallTimes(HOST, tmp_path)
    with pytest.raises(MachineIsBusy):
        calls.of_call(ATEN.mm.default, (A, B), {})
    with pytest.raises(MachineIsBusy):
        _ = op_timers.measured_rates(HOST, tmp_path).call_us
    monkeypatch.setattr(timing, "is_a_rank", lambda: True)
    assert calls.of_call(ATEN.mm.default, (A, B), {}) == pytest.approx(500.0)


# --- plans --------------------------------------------------------------------------------


def planned(executor: str, op_times: str = "measured") -> tuple[Report, list[torch.Tensor | None]]:
    """The plan of a few blocks at a budget that needs some work, and the gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(*(Block(32) for _ in range(4))), torch.randn(512, 32)
    how: Any = {"executor": executor, "memory_budget": "1.5MiB", "op_times": op_times}
    torch.compile(model, backend="fxremat", options=how)(x).square().mean().backward()
    (report,) = fxremat.reports()
    return report, [one.grad for one in model.parameters()]


@pytest.mark.parametrize("executor", ["aot_eager", "inductor"])
def test_what_cannot_be_timed_is_planned_by_figures_and_not_for_later_processes(
    executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one, on a quiet machine, finds no plan on disk that was made without times."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    expected, gradients = planned(executor, op_times="roofline")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        waits(0.9, patch)
        busy, found = planned(executor)
    assert [one.message for one in caplog.records if "ops cannot be timed" in one.message]
    assert busy.recomputed == expected.recomputed
    torch.testing.assert_close(found, gradients)
    timed = mock.Mock(side_effect=timing.quickest)
    monkeypatch.setattr(timing, "quickest", timed)
    monkeypatch.setattr(timing, "waiting_s", lambda device: 0.0)
    caplog.clear()
    planned(executor)
    assert timed.call_count
    assert not [one.message for one in caplog.records if "ops cannot be timed" in one.message]

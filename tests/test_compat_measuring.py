"""The profiler's memory events, and random numbers that measuring draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxremat.compat.measuring import (
    profiler_memory_events,
    profiler_runs,
    random_state_kept,
    recorded_allocations,
)


def test_profiler_memory_events() -> None:
    assert not profiler_runs()
    with torch.profiler.profile(profile_memory=True) as prof:
        assert profiler_runs()
        with pytest.raises(RuntimeError, match="after its with block"):
            profiler_memory_events(prof)
        tensor = torch.empty(1000)
        del tensor
    assert not profiler_runs()
    events = profiler_memory_events(prof)
    assert [(size, device) for _, size, device in events] == [(4000, "CPU"), (-4000, "CPU")]
    assert events[0][0] <= events[1][0]


def test_random_state_kept() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with random_state_kept():
        torch.rand(10)
    assert torch.equal(torch.rand(2), expected)


def test_recording_ends_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    names = torch.cuda.memory
    assert all(hasattr(names, name) for name in ("_record_memory_history", "_snapshot"))
    monkeypatch.setattr(names, "_record_memory_history", lambda **given: log.append(given))
    monkeypatch.setattr(names, "_snapshot", lambda device: {"segments": [*log]})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("idle"))
    gpu = torch.device("cuda", 0)
    snapshot = recorded_allocations(lambda: log.append("run"), gpu)
    assert snapshot["segments"][1:] == ["run", "idle"]
    assert log[3:] == [{"enabled": None}]
    with pytest.raises(ZeroDivisionError):
        recorded_allocations(lambda: 1 // 0, gpu)
    assert log[-1] == {"enabled": None}

"""Numbers for loggers: names, what they count in, and where each comes from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxremat
from fxremat.memory.measured_peak import MeasuredPeak
from fxremat.sizes import GIB
from tests.step_reports import altered, moving, planned

ALLOCATOR = {
    "active_bytes.all.peak": 3 * GIB, "reserved_bytes.all.peak": 4 * GIB,
    "num_alloc_retries": 1, "num_ooms": 2,
}  # fmt: skip


def test_what_was_planned() -> None:
    report = altered(
        planned(), budget_bytes=4 * GIB, predicted_peak_bytes=3 * GIB, count="allocated"
    )
    found = fxremat.metrics(reports=[report])
    assert found["fxremat/predicted_peak(GiB)"] == 3
    assert found["fxremat/budget(GiB)"] == 4
    assert found["fxremat/budget_used(%)"] == 75
    assert found["fxremat/time_overhead(%)"] == pytest.approx(100 * report.time_overhead)
    assert found["fxremat/saved(GiB)"] == report.saved_bytes / GIB
    assert found["fxremat/graphs"] == 1
    assert not any(name.startswith("memory/") for name in found)
    assert all(isinstance(value, (int, float)) for value in found.values())


def test_several_graphs_without_a_budget() -> None:
    graphs = [altered(planned(), budget_bytes=None), altered(moving(), budget_bytes=None)]
    found = fxremat.metrics(reports=graphs)
    assert found["fxremat/graphs"] == 2
    assert found["fxremat/saved(GiB)"] == sum(g.saved_bytes for g in graphs) / GIB
    assert not any("budget" in name for name in found)


def test_nothing_was_compiled() -> None:
    torch._dynamo.reset()
    assert fxremat.metrics() == {}


def test_what_was_measured() -> None:
    found = fxremat.metrics(MeasuredPeak(2 * GIB, GIB, GIB, "cpu"), reports=[])
    assert found == {"memory/max_active(GiB)": 2}
    found = fxremat.metrics(MeasuredPeak(2 * GIB, GIB, GIB, "cuda:0", 3 * GIB), reports=[])
    assert found == {"memory/max_active(GiB)": 2, "memory/max_reserved(GiB)": 3}


def test_what_the_allocator_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torchtitan's names; the next call counts from here on only if that is asked for."""
    resets: list[Any] = []

    class Properties:
        total_memory = 8 * GIB

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: ALLOCATOR)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    assert fxremat.metrics(reports=[]) == {
        "memory/max_active(GiB)": 3,
        "memory/max_active(%)": 37.5,
        "memory/max_reserved(GiB)": 4,
        "memory/max_reserved(%)": 50,
        "memory/num_alloc_retries": 1,
        "memory/num_ooms": 2,
    }
    assert resets == []
    fxremat.metrics(reports=[], reset=True)
    assert resets == [None]

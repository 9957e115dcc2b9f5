"""What outlives a compilation: reports in a store, and the state of a session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxremat.compile import session
from fxremat.core.plan import Plan
from fxremat.core.problem import Op, Problem, Value
from fxremat.cost.op_timers import TRAFFIC
from fxremat.report.report import (
    MemoryFigures,
    Provenance,
    Report,
    Row,
    StepMemory,
    ValueTables,
)
from tests.conftest import Golden
from tests.step_reports import altered

MIB = 2**20
REPORT = Report(
    graph=2,
    time_overhead=0.125,
    memory=MemoryFigures(
        budget_bytes=8 * MIB,
        resident_bytes=MIB,
        held_bytes=2 * MIB,
        store_all_peak_bytes=10 * MIB,
        planned_peak_bytes=7 * MIB,
        predicted_peak_bytes=7 * MIB + MIB // 2,
        minimum_peak_bytes=5 * MIB,
    ),
    values=ValueTables(
        tuple(Row(f"gelu_{i} [layers.{i}, model.py:{8 + i}]", MIB // 4) for i in range(12)),
        (Row("addmm_3 [layers.3, model.py:8]", MIB, 2, 11.5), Row("mul", 512, 1, 0.5)),
        at_peak=(Row("primals_1 [graph input]", MIB),),
    ),
    provenance=Provenance(nodes=40, dry_runs=3, seconds={"plan": 0.25, "apply": 0.5}),
    step=StepMemory((MIB, 7 * MIB, 2 * MIB)),
    problem=Problem(
        "p",
        (Value("x", MIB),),
        (Op("a", (), ("x",), 12.5), Op("b", ("x",), (), 0.0, inplace=())),
        (),
        (),
        (),
    ),
    plan=Plan(("a", "b", "a"), "greedy", 8 * MIB, 7 * MIB, 12.5, 0.25, 10.0, 4 * MIB),
)


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxremat.compile.session.cache_directory", lambda: str(tmp_path))


# --- the report ------------------------------------------------------------------------------


def test_report_text(golden: Golden) -> None:
    golden(str(REPORT))


def test_report_summary_text(golden: Golden) -> None:
    golden(altered(replace(REPORT, from_cache=True), budget_bytes=None).summary())


# --- the store ------------------------------------------------------------------------------


def test_a_stored_report_is_read_back() -> None:
    session.store("key", REPORT)
    assert session.load("key", 5) == replace(REPORT, graph=5, from_cache=True)
    assert session.load("other key", 5) is None
    assert [path.name for path in session.store_path("key").parent.iterdir()] == ["key.json"]


def test_a_cache_that_cannot_be_written_fails_no_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands where the folder for our files should be."""
    monkeypatch.setattr("fxremat.cost.op_timers.TRAFFIC", TRAFFIC[:1])  # measured each time
    (tmp_path / "fxremat").write_text("no folder")
    torch._dynamo.reset()
    options: dict[str, Any] = {
        "executor": "aot_eager",
        "memory_budget": "2MiB",
        "op_times": "measured",
    }
    model, x = nn.Conv2d(3, 4, 3), torch.ones(2, 3, 8, 8)
    call = torch.compile(model, backend="fxremat", options=options)
    call(x).sum().backward()
    assert model.weight.grad is not None
    assert len(session.reports()) == 1
    assert (tmp_path / "fxremat").read_text() == "no folder"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"graph": 1, "saved": []}', "\x00"])
def test_what_is_no_report_counts_as_none(text: str) -> None:
    session.store("key", REPORT)
    session.store_path("key").write_text(text, encoding="utf-8")
    assert session.load("key", 0) is None


# --- the state ----------------------------------------------------------------------------------


def test_planning_apart_leaves_no_trace_and_reset_forgets() -> None:
    with session.separate():
        session.STATE.reports.append(REPORT)
        assert session.begin().graph == 0
        with session.separate():
            assert session.reports() == []
        assert session.reports() == [REPORT]
        assert session.begin().graph == 1
        session.reset()
        assert session.reports() == []
        assert session.begin().graph == 0

"""Planned against measured seconds: what is compared, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.rows import Row
from benchmarks.runner import Timing
from benchmarks.seconds import Figures, _figures, picture, table, write

ONE = Figures(
    model="gpt6", way="fxremat50%", kind="fxremat", peak=0.5, obeyed=True, planned=1.08,
    measured=1.1, best=1.09, cold=1.5, warm=1.0, stages={"plan": 2.0}, error=None,
)  # fmt: skip


def test_ratios_are_to_compile() -> None:
    base = Row("compile", "compile", peak_bytes=200, compile_seconds=10.0)
    base.step_seconds = [[2.0, 3.0], [2.5]]
    row = Row("fxremat50%", "fxremat", budget_bytes=100, peak_bytes=100, compile_seconds=15.0)
    row.report = {"time_overhead": 0.1, "seconds": {"plan": 1.0}, "predicted_peak_bytes": 100}
    row.step_seconds, row.time_ratios = [[3.0, 2.2], [4.0]], [1.1, 1.3]
    found = _figures("gpt6", row, base, warm=11.0)
    assert found.peak == 0.5
    assert found.obeyed
    assert found.planned == pytest.approx(1.1)
    assert found.measured == pytest.approx(1.2)
    assert found.best == pytest.approx(1.1)
    assert (found.cold, found.warm) == (1.5, 1.1)
    refused = _figures("gpt6", Row("fxremat33%", "fxremat", error="no"), base, warm=None)
    assert (refused.peak, refused.measured, refused.cold, refused.warm) == (None,) * 4
    assert refused.error == "no"


def test_what_is_refused_has_a_line_and_no_mark(tmp_path: Path) -> None:
    refused = replace(ONE, way="fxremat33%", peak=None, measured=None, planned=None, cold=None)
    assert "fxremat33%" in table([refused])
    assert picture([ONE, refused]).count("<circle") == 1
    path = tmp_path / "there" / "seconds.json"
    write(path, [ONE, refused], Timing(1, 1, 1), {"cpu": "any"})
    data = json.loads(path.read_text())
    assert [row["points"] for row in data["figures"]] == [pytest.approx(2.0), None]
    assert path.with_suffix(".svg").exists()

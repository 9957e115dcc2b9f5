"""Planned against measured seconds: what is compared, and what is said of it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import worker
from benchmarks.rows import Row
from benchmarks.runner import Timing
from benchmarks.seconds import (
    Figures,
    _figures,
    parse_arguments,
    picture,
    summary,
    table,
    ways,
    write,
)
from benchmarks.training import Infeasible

ONE = Figures(
    model="gpt6", way="fxremat50%", kind="fxremat", peak=0.5, obeyed=True, planned=1.08,
    measured=1.1, best=1.09, cold=1.5, warm=1.0, stages={"plan": 2.0}, error=None,
)  # fmt: skip
BASE = replace(
    ONE, way="compile", kind="compile", peak=1.0, obeyed=None, planned=None, measured=1.0
)


def test_the_knob_comes_before_what_is_compared_with_it() -> None:
    names = [variant.name for variant in ways(["80%", "50%"], knob=True, bare=True)]
    assert names[-1] == "fxremat@knob"
    assert names.index("knob0.5") < names.index("fxremat80%")
    assert {"plain80%", "plain50%"} <= set(names)
    assert [variant.name for variant in ways(["33%"], knob=False, bare=False)] == ["fxremat33%"]


def test_points_are_measured_less_planned() -> None:
    assert ONE.points == pytest.approx(2.0)
    assert BASE.points is None


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


def test_table_and_summary_say_the_worst() -> None:
    worse = replace(ONE, model="llama", measured=1.2, cold=3.0)
    text = table([BASE, ONE, worse])
    assert len(text.splitlines()) == 4
    assert "+12.0" in text
    said = summary([BASE, ONE, worse])
    assert "median 7.0 points, worst 12.0" in said
    assert "(worst 1.200)" in said
    assert "(worst 3.00)" in said


def test_what_is_refused_has_a_line_and_no_mark(tmp_path: Path) -> None:
    refused = replace(ONE, way="fxremat33%", peak=None, measured=None, planned=None, cold=None)
    assert "fxremat33%" in table([refused])
    assert picture([ONE, refused]).count("<circle") == 1
    path = tmp_path / "there" / "seconds.json"
    write(path, [ONE, refused], Timing(1, 1, 1), {"cpu": "any"})
    data = json.loads(path.read_text())
    assert [row["points"] for row in data["figures"]] == [pytest.approx(2.0), None]
    assert path.with_suffix(".svg").exists()


def test_what_a_refusal_took_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        time.sleep(0.01)
        raise Infeasible("no", 7)

    monkeypatch.setattr(worker, "prepare", refuse)
    answer = worker.Worker("fxremat50%", "gpt", "small", "cpu", "float32", 0).prepare(5)
    assert answer.pop("compile_seconds") >= 0.01
    assert answer == {"infeasible": "no", "minimum_bytes": 7}


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(SystemExit, match="unknown parts"):
        parse_arguments(["--parts", "81%"])

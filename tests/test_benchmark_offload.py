"""The benchmark of moves, at its smallest: plans of two layers, checked and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import offload


@pytest.mark.slow
def test_plans_of_a_model_of_two_layers(tmp_path: Path) -> None:
    out = tmp_path / "plans.json"
    given = ["plans", "--models", "gpt2-medium", "--layers", "2", "--devices", "T4"]
    assert offload.main([*given, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["strategy"] for row in rows} == {"keep", "recompute", "offload", "both"}
    assert all(row["status"] in ("ok", "over", "infeasible") for row in rows)
    cases: dict[tuple[object, ...], dict[str, float]] = {}
    for row in rows:
        if row["status"] == "ok":
            case = (row["link"], row["budget"])
            cases.setdefault(case, {})[row["strategy"]] = row["time_us"]
    assert cases
    for times in cases.values():
        assert times["both"] <= min(times.values()) * (1 + 1e-9)

"""What a run on a GPU says of its rows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fxremat
from benchmarks.gpu import Group, main, text
from benchmarks.rows import MIB, Row
from benchmarks.runner import Case, Timing
from fxremat.cost.cards import absent_card


def group(folder: Path, *rows: Row) -> Group:
    """Rows as the processes have filled them."""
    made = Group(Case("gpt", "base", "cuda", "bfloat16", 0, 1), Timing(1, 1, 1), folder)
    made.rows = {row.variant: row for row in rows}
    return made


def measured(variant: str, kind: str, reserved: int, error: float = 0.0) -> Row:
    """A row with a budget of 100 MiB, of which 90 were allocated."""
    row = Row(variant, kind, peak_bytes=90 * MIB, reserved_bytes=reserved * MIB)
    row.gradient_error = error
    if kind == "fxremat":
        row.budget_bytes = 100 * MIB
        row.report = {
            "predicted_peak_bytes": 90 * MIB,
            "predicted_reserved_bytes": 99 * MIB,
            "time_overhead": 0.1,
        }
    return row


def test_budgets_count_reserved_bytes(tmp_path: Path) -> None:
    """Also where fewer were allocated, and those of the first step."""
    broken = group(tmp_path, measured("fxremat50%", "fxremat", 110))
    assert broken.failures == ["gpt fxremat50%: the budget is not obeyed"]
    first = measured("fxremat50%", "fxremat", 99)
    first.first_bytes = 101 * MIB
    assert group(tmp_path, first).failures == broken.failures
    kept = group(tmp_path, measured("fxremat50%", "fxremat", 99))
    assert kept.failures == []
    assert "+0.00%" in text([kept])
    assert "-10.00%" in text([broken])


def test_gradients_that_are_off_are_a_failure(tmp_path: Path) -> None:
    """Ours alone: nobody promised the others'."""
    row = measured("fxremat50%", "fxremat", 99, error=0.07)
    repeated = measured("checkpoint", "checkpoint", 99, error=0.17)
    found = group(tmp_path, repeated, row).failures
    assert found == ["gpt fxremat50%: gradients are off by 7.0e-02"]


def test_a_refusal_is_no_failure(tmp_path: Path) -> None:
    row = Row("fxremat33%", "fxremat", budget_bytes=10 * MIB, minimum_bytes=20 * MIB, error="no")
    found = group(tmp_path, row)
    assert found.failures == []
    assert found.refusals == ["gpt fxremat33%: refused at 10.0 MiB, least 20.0 MiB"]


def test_an_absent_card_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain, a budget that is obeyed, and one that is refused; nothing is measured."""
    asked: list[int | None] = []

    def explain(model: Any, *inputs: Any, options: dict[str, Any]) -> Any:
        assert absent_card() is not None
        assert inputs
        budget = options.get("memory_budget")
        asked.append(budget)
        if budget is not None and budget < 50 * MIB:
            raise fxremat.InfeasibleBudget(budget, 55 * MIB)
        reserved = 100 * MIB if budget is None else budget - 1
        report = SimpleNamespace(
            predicted_peak_bytes=reserved - MIB,
            predicted_reserved_bytes=reserved,
            time_overhead=0.0 if budget is None else 0.25,
        )
        return SimpleNamespace(graphs=[report])

    monkeypatch.setattr(fxremat, "explain", explain)
    out = tmp_path / "new" / "said.json"
    arguments = ["--absent", "T4", "--models", "mixer", "--size", "small", "--out", str(out)]
    assert main([*arguments, "--ways", "plain80%,fxremat33%"]) == 0
    assert asked == [None, 80 * MIB, 33 * MIB]
    plain, most, third = json.loads(out.read_text())["said"]
    assert (plain["way"], plain["time"], most["time"]) == ("store all", 1.0, 1.25)
    assert (third["allocated_bytes"], third["minimum_bytes"]) == (None, 55 * MIB)
    assert "refused: 55.0" in capsys.readouterr().out

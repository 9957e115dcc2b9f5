"""The benchmark of loops on a GPU, whose rows are run on the CPU here, and what it says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import MARKS, Rows, failures, lines, main
from benchmarks.rows import MIB

MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def small():
    return Model(), torch.randn(512, 64)
"""


def row(way: str, **more: Any) -> dict[str, Any]:
    return {"model": "bert", "way": way, "status": "ok", "budget": None, **more}


@pytest.mark.slow
def test_rows_are_run_and_kept_and_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With plans from elsewhere; another run has nothing left to do."""
    (tmp_path / "model.py").write_text(MODEL)
    name = f"{tmp_path / 'model.py'}:small"
    plans = {"rows": [{"model": name, "loop": "adamw_fused", "budget": 2 * MIB}]}
    (tmp_path / "loops.json").write_text(json.dumps(plans))
    out = tmp_path / "new" / "rows.json"
    asked = [name, "--device", "cpu", "--out", str(out), "--plans", str(tmp_path)]
    asked += ["--ways", "plain,fxremat60%,save_matmuls", "--together", "2"]
    assert main(asked) == 0, capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    by_way = {one["way"]: one for one in rows}  # they are written as they end
    assert [one["status"] for one in rows] == ["ok"] * 3
    plain, ours, saved = (by_way[way] for way in ("plain", "fxremat60%", "save_matmuls"))
    assert ours["budget"] == 2 * MIB
    assert plain["losses"] == pytest.approx(ours["losses"], rel=1e-4)
    assert plain["losses"] == pytest.approx(saved["losses"], rel=1e-4)
    assert len(plain["step_ms"]) == 10
    before = out.read_text()
    assert main(asked) == 0
    assert out.read_text() == before
    assert main([*asked, "--minutes", "0", "--ways", "knob"]) == 0  # no time for it


def test_budgets_are_parts_of_what_was_reserved() -> None:
    rows = Rows({}, None)
    with pytest.raises(KeyError):
        rows.budget("bert", "fxremat60%", {})
    rows.keep(row("plain", reserved=1000))
    rows.keep(row("checkpoint", reserved=400))
    assert rows.budget("bert", "fxremat60%", {}) == 600
    assert rows.budget("bert", "fxremat60%", {"bert": 700}) == 700
    assert rows.budget("bert", "fxremat@checkpoint", {"bert": 700}) == 400
    assert rows.budget("bert", "knob", {}) is None


def test_what_failed_or_was_not_timed_is_run_again(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    rows = [
        row("plain", step_ms=[6.0]),
        row("checkpoint"),
        row("knob", status="failed"),
        row("fxremat60%", status="refused", least=2 * MIB),
    ]
    out.write_text(json.dumps({"rows": rows}))
    again = Rows({}, out)
    again.read()
    assert [way for _, way in again.rows] == ["plain", "fxremat60%"]


def test_what_is_wrong_is_said_and_a_refusal_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    over = row("fxremat60%", status="over", budget=6 * MIB, reserved=7 * MIB, step_ms=[9.0])
    rows = [
        over,
        row("plain", reserved=10 * MIB, step_ms=[6.0]),
        row("fxremat@checkpoint", status="refused", budget=MIB, least=2 * MIB),
        row("knob", status="failed", error="the worker died"),
    ]
    assert list(failures(rows)) == [
        "bert fxremat60%: 7.0 MiB are over the budget of 6.0",
        "bert knob: the worker died",
    ]
    assert [line[1] for line in lines(rows)[1:]] == [
        "plain", "fxremat60%", "fxremat@checkpoint", "knob",
    ]  # fmt: skip
    assert lines(rows)[2][8] == "1.500"
    found, text = tmp_path / "rows.json", tmp_path / "page.md"
    machine = {"device": "a card", "date": "2026-01-02T03:04", "torch": "2"}
    found.write_text(json.dumps({"machine": machine, "rows": rows}))
    text.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    assert main(["--table", str(found), "--into", str(text)]) == 0
    assert "a card, 2026-01-02, torch 2" in text.read_text()
    assert "old" not in text.read_text()
    assert main(["--table", str(found)]) == 0
    assert "| bert | plain | ok |" in capsys.readouterr().out

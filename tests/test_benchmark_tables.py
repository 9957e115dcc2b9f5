"""The rows and tables of the benchmarks."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import compare, library_calls, planner, rules, rules_measure
from benchmarks.gpu import failures, main
from benchmarks.gpu_worker import recorded_allocations
from benchmarks.planner_table import Case
from benchmarks.planner_table import Row as PlannerRow
from benchmarks.rows import MIB, Row
from benchmarks.rules_models import MODELS, OF_RULE
from benchmarks.seconds import until_steady
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem, problem_to_json
from fxremat.passes.variants.table import RULES
from fxremat.planner import SolverOptions, solve
from tests.chains import homogeneous, skipping

pytestmark = pytest.mark.usefixtures("fresh")


# --- planner ------------------------------------------------------------------------------


CASE = Case("problem", 3, 100, 60, 60)


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """A directory with a chain and a U-Net in small."""
    for name, problem in {"chain": homogeneous(6), "skips": skipping()}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(problem_to_json(problem)))
    return tmp_path


def run(problems: Path, *more: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit status and the rows of the file."""
    out = problems / "results" / "out.json"
    given = ["--problems", str(problems), "--traced", "none", "--out", str(out), *more]
    status = planner.main(given)
    return status, json.loads(out.read_text())["rows"] if out.exists() else []


def test_rows_of_solvers_side_by_side(problems: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = run(
        problems, "--solvers", "greedy,auto", "--budgets", "80,30", "--time-limit", "1"
    )
    _, refused = run(problems, "--solvers", "rotor", "--only", "skips", "--budgets", "80")
    assert [row["status"] for row in refused] == ["refused"]
    assert status == 0
    assert [(r["problem"], r["budget_percent"], r["solver"]) for r in rows] == [
        (problem, percent, solver)
        for problem in ("chain", "skips")
        for percent in (80, 30)
        for solver in ("greedy", "auto")
    ]
    for row in rows:
        assert row["status"] == ("ok" if row["peak_bytes"] <= row["budget_bytes"] else "infeasible")
        if row["status"] == "ok":
            assert row["bound_percent"] <= row["added_percent"] + 1e-4
            assert row["gap_percent"] >= 0
        else:
            assert row["added_percent"] is None
            assert row["peak_bound_bytes"] <= row["peak_bytes"]
    assert {row["status"] for row in rows} == {"ok", "infeasible"}
    printed = capsys.readouterr().out
    assert "chain: 13 ops" in printed
    assert "infeasible, least peak found, proven: at least" in printed
    assert '"ratio": added time over that of greedy' in printed


def test_a_false_peak_fails(
    problems: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lie(problem: Problem, budget: int | None, name: str, options: SolverOptions) -> Plan:
        return replace(solve(problem, budget, name, options), peak_bytes=1)

    monkeypatch.setattr(planner, "solve", lie)
    status, rows = run(problems, "--solvers", "greedy", "--only", "chain", "--budgets", "80")
    assert status == 1
    assert [row["status"] for row in rows] == ["FAILED"]
    assert "FAILED: 1 of 1 rows" in capsys.readouterr().out


def test_bounds_that_another_plan_refutes() -> None:
    good = PlannerRow(CASE, "good", "ok", 0.0, 50, 40, added_percent=5.0, bound_percent=5.0)
    wrong = PlannerRow(CASE, "wrong", "ok", 0.0, 50, 40, added_percent=9.0, bound_percent=6.0)
    lost = PlannerRow(CASE, "lost", "infeasible", 0.0, 70, 65)
    broken = PlannerRow(CASE, "broken", "FAILED", 0.0, 1, 0)
    rows = planner.refuted([good, wrong, lost, broken])
    assert [row.status for row in rows] == ["ok", "FAILED", "FAILED", "FAILED"]
    assert rows[-1] == broken


# --- rules --------------------------------------------------------------------------------


def test_every_rule_has_models() -> None:
    assert list(OF_RULE) == [rule.name for rule in RULES]
    assert {model for models in OF_RULE.values() for model in models} <= {*MODELS}


def test_a_rule_that_pays(tmp_path: Path) -> None:
    out = tmp_path / "rules.json"
    words = ["--names", "sign_masks", "--sizes", "cpu", "--alone", "--seconds", "0.2"]
    assert rules.main([*words, "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    (row,) = data["rows"]
    # before torch 2.13 gradients of max-pools are gathered in loops: no masks are at the peak
    version: Any = torch.__version__
    saves = bool(version >= (2, 13))
    assert (row["least_with"] < row["least_without"]) == saves
    bytes_too = "bytes and " if saves else ""
    assert data["verdicts"] == {"sign_masks": f"pays in {bytes_too}seconds"}


def test_broken_promises_are_failures() -> None:
    figures = partial(rules_measure.Figures, "a rule", "gpt")
    over = figures("with", budget_bytes=80, peak_bytes=81)
    assert list(over.failures()) == ["a rule, with: 81 bytes, budget 80"]
    wrong = figures("with", gradient_error=0.1)
    assert len(list(wrong.failures())) == 1
    lossy = figures("with", True, gradient_error=0.1, report={"variants": {"a rule": 1}})
    assert list(lossy.failures()) == []
    least = figures("without", least_bytes=1 << 20)
    assert "the least is 1.00 MiB" in rules_measure.table([least])


@pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="this torch has no such call"
)
def test_the_call_of_torch_computes_the_same() -> None:
    gpt, arguments = library_calls.make(library_calls.Shape(2, 8, 8, 300))
    torch.testing.assert_close(library_calls.WithCall(gpt)(*arguments), gpt(*arguments))


def result(peak: int | None, added: float, **more: Any) -> dict[str, Any]:
    """A file of `python -m benchmarks` with one row of fxremat."""
    report = {"time_overhead": added, "predicted_peak_bytes": 1, "variants": {"sign_masks": 2}}
    row = Row("fxremat50%", "fxremat", 200, 10, peak, report=report)
    case = {"model": "gpt", "size": "small", "device": "cpu", "dtype": "float32"}
    return {"results": [{**case, "rows": [{**row.to_json(), **more}]}]}


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (result(100, 0.1), []),
        (result(100, 0.102), []),
        (result(120, 0.1), ["peak"]),
        (result(210, 0.1), ["over its budget", "peak"]),
        (result(90, 0.2), ["planned time"]),
        (result(None, 0.1, minimum_bytes=300), ["refused"]),
        (result(None, 0.1, error="KeyError: x"), ["fails: KeyError: x"]),
    ],
)
def test_what_got_worse(
    after: dict[str, Any], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = compare.facts_of(result(100, 0.1))
    (pair,) = compare.compare(before, compare.facts_of(after), 0.005)
    assert list(pair.worse()) == expected
    paths = [tmp_path / name for name in ("before.json", "after.json")]
    for path, data in zip(paths, (result(100, 0.1), after), strict=True):
        path.write_text(json.dumps(data))
    assert compare.main(list(map(str, paths))) == int(bool(expected))
    assert f"1 compared, {len(expected) > 0:d} worse" in capsys.readouterr().out


# --- gpu ----------------------------------------------------------------------------------


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


def test_what_is_wrong_is_said_and_a_refusal_is_not() -> None:
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


# --- seconds ------------------------------------------------------------------------------


def test_first_steps_take_what_is_beyond_steady_ones() -> None:
    assert until_steady({"steps": [10.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.2, 1.0, 1.0, 0.9]}) == 11.0


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

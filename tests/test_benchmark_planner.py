"""The benchmark of the planner: its rows, its file, and what it says of refusals and failures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planner
from benchmarks.planner_table import Case, Row
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem, problem_to_json
from fxremat.planner import SolverOptions, solve
from tests.chains import homogeneous, skipping

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


def test_a_solver_refuses(problems: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = run(problems, "--solvers", "rotor", "--only", "skips", "--budgets", "80")
    assert status == 0
    assert [row["status"] for row in rows] == ["refused"]
    assert rows[0]["peak_bytes"] is None
    assert rows[0]["reason"].startswith("the problem is not a chain")
    assert "Use the solver" not in capsys.readouterr().out


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


def test_steps_that_are_missing_fail() -> None:
    problem = homogeneous(4)
    case = planner.make_case("chain", problem, 100)
    plan = solve(problem, None, "greedy")
    broken = replace(plan, steps=plan.steps[:-1])
    assert planner.judged(case, problem, "any", plan, 0.0).status == "ok"
    assert planner.judged(case, problem, "any", broken, 0.0).reason.startswith("op never runs")


def test_bounds_that_another_plan_refutes() -> None:
    good = Row(CASE, "good", "ok", 0.0, 50, 40, added_percent=5.0, bound_percent=5.0)
    wrong = Row(CASE, "wrong", "ok", 0.0, 50, 40, added_percent=9.0, bound_percent=6.0)
    lost = Row(CASE, "lost", "infeasible", 0.0, 70, 65)
    broken = Row(CASE, "broken", "FAILED", 0.0, 1, 0)
    rows = planner.refuted([good, wrong, lost, broken])
    assert [row.status for row in rows] == ["ok", "FAILED", "FAILED", "FAILED"]
    assert rows[-1] == broken

"""``explain`` and ``page``: of reports in files, and of steps that they plan themselves."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

import fxremat
from fxremat.cli import main
from fxremat.report.exports import chrome_trace, memory_snapshot
from fxremat.report.files import write_report
from fxremat.report.page import page_of
from fxremat.sizes import format_bytes
from tests.pages import small_front
from tests.small import stack_and_input
from tests.step_reports import moving, planned


def test_files_of_two_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = [planned(), replace(moving(), graph=1)]
    for report in reports:
        write_report(str(tmp_path), report)
    front = tmp_path / "front.json"
    front.write_text(json.dumps(small_front().to_json()))
    page, trace, snapshot = (tmp_path / name for name in ("a.html", "a.json", "a.pickle"))
    given = [str(tmp_path / f"graph_{n}.report.json") for n in (0, 1)]
    assert main(["page", str(page), *given, "--front", str(front)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(planned().summary())
    assert f"written   {page}" in printed
    viewers = ["--perfetto", str(trace), "--memory-viz", str(snapshot)]
    assert main(["explain", *given, *viewers]) == 0
    assert page.read_text() == page_of(reports, small_front())
    assert json.loads(trace.read_text()) == chrome_trace(reports)
    assert pickle.loads(snapshot.read_bytes()) == memory_snapshot(reports)
    printed = capsys.readouterr().out
    assert printed.startswith(str(planned()))
    assert f"written   {trace}" in printed


@pytest.mark.parametrize(
    ("report", "asked", "said"),
    [
        ("{}", "explain report.json", "no report of this version of fxremat"),
        ("[]", "explain report.json", "no report of this version of fxremat"),
        ("{", "page out.html report.json", "not JSON"),
        (None, "page out.html report.json", "No such file"),
        ("{}", "page out.html report.json --front report.json", "no front; pareto --out writes"),
        ("[]", "page out.html report.json --front report.json", "no front; pareto --out writes"),
    ],
)
def test_refused_in_one_line(
    report: str | None, asked: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if report is not None:
        Path("report.json").write_text(report)
    assert main(asked.split()) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("out.*"))


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_report(str(tmp_path), planned())
    given = [str(tmp_path / "graph_0.report.json"), "--memory-viz", str(tmp_path / "no" / "file")]
    assert main(["explain", *given]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_a_step_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report is that of `fxremat.explain`; what does not fit is refused in one line."""
    monkeypatch.setenv("FXREMAT_VARIANTS", "none")
    monkeypatch.setenv("FXREMAT_SOLVER", "greedy")
    step = ["tests.small:stack_and_input", "--device", "cpu", "--optimizer", "none"]
    page = tmp_path / "step.html"
    assert main(["page", str(page), *step, "--budget", "1MiB"]) == 0
    assert page.read_text().startswith("<!")
    printed = capsys.readouterr().out
    model, given = stack_and_input()
    (graph,) = fxremat.explain(model, *given, memory_budget="1MiB").graphs
    peak = f"-> {format_bytes(graph.predicted_peak_bytes)} of 1.00 MiB"
    assert peak in printed
    assert main(["explain", *step, "--budget", "1B"]) == 1
    printed = capsys.readouterr().err
    assert "the least that fxremat can plan is" in printed
    assert "What to do: set memory_budget=" in printed
    assert printed.count("\n") == 1

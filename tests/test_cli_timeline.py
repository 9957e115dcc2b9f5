"""``python -m fxremat timeline``: files for viewers, made of reports in files."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from fxremat.cli import main
from fxremat.report.chrome_trace import chrome_trace
from fxremat.report.files import write_report
from fxremat.report.snapshot import memory_snapshot
from tests.step_reports import moving, planned


def test_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_report(str(tmp_path), planned())
    trace, snapshot = tmp_path / "step.json", tmp_path / "step.pickle"
    report = str(tmp_path / "graph_0.report.json")
    given = ["--perfetto", str(trace), "--memory-viz", str(snapshot)]
    assert main(["timeline", report, *given]) == 0
    assert trace.read_text() == (tmp_path / "graph_0.trace.json").read_text()
    assert pickle.loads(snapshot.read_bytes()) == memory_snapshot([planned()])
    printed = capsys.readouterr().out
    assert printed.startswith(planned().summary())
    assert f"written   {trace}" in printed


def test_graphs_of_one_step(tmp_path: Path) -> None:
    reports = [planned(), replace(moving(), graph=1)]
    for report in reports:
        write_report(str(tmp_path), report)
    given = [str(tmp_path / f"graph_{n}.report.json") for n in (0, 1)]
    assert main(["timeline", *given, "--perfetto", str(tmp_path / "step.json")]) == 0
    assert json.loads((tmp_path / "step.json").read_text()) == chrome_trace(reports)


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        ("{}", ["--perfetto", "out.json"], "no report of this version of fxremat"),
        ("[]", ["--perfetto", "out.json"], "no report of this version of fxremat"),
        ("{", ["--perfetto", "out.json"], "not JSON"),
        ("{}", [], "nothing to write; give --page"),
    ],
)
def test_refused(
    text: str, more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    assert main(["timeline", str(path), *more]) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_report(str(tmp_path), planned())
    given = [str(tmp_path / "graph_0.report.json"), "--memory-viz", str(tmp_path / "no" / "file")]
    assert main(["timeline", *given]) == 2
    assert "No such file or directory" in capsys.readouterr().err

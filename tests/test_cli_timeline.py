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
from fxremat.report.page import page_of
from fxremat.report.snapshot import memory_snapshot
from tests.pages import small_front
from tests.step_reports import moving, planned


def test_files_of_two_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = [planned(), replace(moving(), graph=1)]
    for report in reports:
        write_report(str(tmp_path), report)
    front = tmp_path / "front.json"
    front.write_text(json.dumps(small_front().to_json()))
    page, trace, snapshot = (tmp_path / name for name in ("a.html", "a.json", "a.pickle"))
    given = [str(tmp_path / f"graph_{n}.report.json") for n in (0, 1)]
    given += ["--page", str(page), "--front", str(front)]
    given += ["--perfetto", str(trace), "--memory-viz", str(snapshot)]
    assert main(["timeline", *given]) == 0
    assert page.read_text() == page_of(reports, small_front())
    assert json.loads(trace.read_text()) == chrome_trace(reports)
    assert pickle.loads(snapshot.read_bytes()) == memory_snapshot(reports)
    printed = capsys.readouterr().out
    assert printed.startswith(planned().summary())
    assert f"written   {trace}" in printed


@pytest.mark.parametrize(
    ("report", "more", "said"),
    [
        ("{}", "--perfetto out.json", "no report of this version of fxremat"),
        ("[]", "--perfetto out.json", "no report of this version of fxremat"),
        ("{", "--page out.html", "not JSON"),
        (None, "--page out.html", "No such file"),
        ("{}", "", "nothing to write; give --page"),
        ("{}", "--page out.html --front report.json", "no front; pareto --out writes one"),
        ("[]", "--page out.html --front report.json", "no front; pareto --out writes one"),
    ],
)
def test_refused_in_one_line(
    report: str | None, more: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if report is not None:
        Path("report.json").write_text(report)
    assert main(["timeline", "report.json", *more.split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("out.*"))


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_report(str(tmp_path), planned())
    given = [str(tmp_path / "graph_0.report.json"), "--memory-viz", str(tmp_path / "no" / "file")]
    assert main(["timeline", *given]) == 2
    assert "No such file or directory" in capsys.readouterr().err

"""The option ``report``: files of every graph, and the command line reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fxremat
from fxremat.cli import main
from fxremat.compile.session import reports
from fxremat.core.json_data import from_data
from fxremat.errors import InvalidOption
from fxremat.report.page import page_of
from fxremat.report.report import Report
from tests.small import Stack, seeded

EAGER = {"executor": "aot_eager"}
FILES = [
    "graph_0.html",
    *(f"graph_0.{kind}.json" for kind in ("plan", "problem", "report")),
    "graph_0.snapshot.pickle",
    "graph_0.trace.json",
]


pytestmark = pytest.mark.usefixtures("fresh")


def compiled(folder: object, **more: Any) -> tuple[Callable[..., Any], torch.Tensor]:
    model, x = seeded(Stack, 64, 32)
    options: Any = {**EAGER, "report": folder, **more}
    return torch.compile(model, backend="fxremat", options=options), x


def test_files_of_a_compiled_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    model, x = compiled(folder, memory_budget="8MiB")
    model(x).sum().backward()
    assert sorted(p.name for p in folder.iterdir()) == FILES
    written = from_data(Report, json.loads((folder / "graph_0.report.json").read_text()))
    assert written == reports()[-1]
    assert (folder / "graph_0.html").read_text(encoding="utf-8") == page_of([written])
    main(["check", str(folder / "graph_0.problem.json"), str(folder / "graph_0.plan.json")])
    assert f"{written.plan.peak_bytes:,}" in capsys.readouterr().out


def test_every_graph_has_files(tmp_path: Path) -> None:
    model, x = seeded(lambda: Stack(broken=True), 64, 32)
    options: Any = {**EAGER, "report": tmp_path}
    torch.compile(model, backend="fxremat", options=options)(x).sum().backward()
    assert len(reports()) == 2
    for n in (0, 1):
        assert (tmp_path / f"graph_{n}.report.json").exists()


def test_a_refused_budget_has_files(tmp_path: Path) -> None:
    model, x = compiled(tmp_path, memory_budget="1MiB", reserve="1000KiB")
    with pytest.raises(Exception, match="cannot be trained") as failure:
        model(x)
    refused: Any = failure.value
    while not isinstance(refused, fxremat.InfeasibleBudget):
        refused = refused.inner_exception
    written = from_data(Report, json.loads((tmp_path / "graph_0.report.json").read_text()))
    assert written.predicted_peak_bytes == refused.minimum_bytes
    assert written.budget_bytes == 2**20


def test_explain_writes_too(tmp_path: Path) -> None:
    model, x = seeded(Stack, 64, 32)
    found = fxremat.explain(model, x, options={**EAGER, "report": tmp_path})
    written = from_data(Report, json.loads((tmp_path / "graph_0.report.json").read_text()))
    assert written == found.graphs[0]


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model, x = compiled(tmp_path / "file")
    with pytest.raises(Exception, match="a folder that can be created") as failure:
        model(x)
    assert isinstance(getattr(failure.value, "inner_exception", failure.value), InvalidOption)


def test_a_disk_that_is_full_later_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    model, x = compiled(tmp_path)
    model(x).sum().backward()
    assert "could not be written" in caplog.text

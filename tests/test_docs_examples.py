"""The examples of docs/examples that need torch alone: losses stay, and the budget is kept."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "part"), [("volumes", 0.62), ("weather", 0.6)])
def test_an_example_learns_the_same_within_its_budget(
    name: str, part: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    main = importlib.import_module(name).main
    plain, taken = main(steps=3), _peak(capsys)
    torch._dynamo.reset()
    budget = part * taken
    assert main(steps=3, budget=f"{budget:.2f}MiB") == pytest.approx(plain, rel=1e-4)
    assert _peak(capsys) <= budget + 0.05  # it is said in tenths of a MiB
    sys.modules.pop(name)


def test_the_notebook_draws_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = list[tuple[object, ...]]()
    display = SimpleNamespace(IFrame=lambda *given: shown.append(given))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "step.ipynb").read_text(encoding="utf-8"))["cells"]
    exec("\n".join("".join(one["source"]) for one in cells if one["cell_type"] == "code"), {})
    assert "MiB" in capsys.readouterr().out
    assert shown == [("step.html", 1100, 800)]
    assert (tmp_path / "step.html").stat().st_size > 1000


def _peak(capsys: pytest.CaptureFixture[str]) -> float:
    """In MiB, as the example said it."""
    said = re.search(r"^peak ([\d.]+) MiB", capsys.readouterr().out, re.MULTILINE)
    assert said is not None
    return float(said[1])

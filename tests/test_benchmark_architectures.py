"""The matrix of architectures: what is measured, how a row is judged, and some rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from benchmarks.architectures import __main__ as matrix
from benchmarks.architectures.cases import checkpoint_blocks, repeated_blocks
from benchmarks.architectures.measuring import measured
from benchmarks.architectures.models import ARCHITECTURES
from benchmarks.architectures.rows import Row, page


class Nested(nn.Module):
    """A list of blocks, each with a list inside, and one layer apart."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)))
            for _ in range(3)
        )
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_repeated_blocks_are_the_outermost_ones() -> None:
    model = Nested()
    assert repeated_blocks(model) == [*model.blocks]
    assert checkpoint_blocks([model, nn.Linear(2, 2)]) == 3


def row(status: str, **found: Any) -> Row:
    return Row({"name": "one", "status": status, **found})


def test_what_breaks_a_promise_is_bad() -> None:
    way = {"peaks": [90, 100], "first_seconds": 1.0, "step_seconds": 1.0}
    assert not row("ok").is_bad
    assert row("over").is_bad
    assert row("failed").is_bad
    assert row("inactive").is_bad
    assert not row("inactive", warned=["no effect"]).is_bad
    assert row("refused", budget=100, checkpointed=way).is_bad
    assert not row("refused", budget=99, checkpointed=way).is_bad
    assert not row("refused", budget=99).is_bad


def test_a_file_is_continued_and_a_page_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def measure(name: str, minutes: float) -> Row:
        asked.append(name)
        return Row({"name": name, "status": "ok" if name == "gnn" else "over", "error": "much"})

    monkeypatch.setattr(matrix, "measure", measure)
    found = tmp_path / "rows.json"
    assert matrix.main(["gnn", "--json", str(found)]) == 0
    assert matrix.main(["gnn", "gan", "--json", str(found)]) == 1
    assert asked == ["gnn", "gan"]
    assert "1 ok, 1 over" in capsys.readouterr().out
    data = json.loads(found.read_text(encoding="utf-8"))
    text = page(data["machine"], list(map(Row, data["rows"])), 45)
    assert "| gan | over |" in text
    assert "2 of 45 architectures are measured" in text
    assert "* **gnn**: much" in text


def test_there_are_45_of_them_and_names_are_checked() -> None:
    assert len(ARCHITECTURES) >= 45
    with pytest.raises(SystemExit):
        matrix.main(["nonsense"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gnn", "pinn", "unet3d", "fno"])
def test_architectures_in_plain_torch_keep_their_budget(name: str) -> None:
    """At 60 % of plain compile's peak, and at the least that is named; gradients are compared."""
    found = measured(name)
    assert found.status == "ok", (found.error, found.warned)
    assert found.at_least is not None

"""Seconds until steps are steady: what is compared, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import first_steps, seconds
from benchmarks.architectures.cases import with_loss
from benchmarks.nets.language import GPT
from benchmarks.seconds import Seconds, summary, table, until_steady
from benchmarks.training import IMPOSSIBLE_BYTES


def test_steady_steps_are_taken_off() -> None:
    assert until_steady({"steps": [10.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.2, 1.0, 1.0, 0.9]}) == 11.0


def test_ratios_are_to_plain_with_caches_in_the_same_state() -> None:
    row = Seconds("gpt12", plain_cold=[10, 20], cold=[15, 26], plain_warm=[4, 4], warm=[4.4, 5])
    row.refused = [30, 40]
    assert row.ratio("cold") == pytest.approx((1.5 + 1.3) / 2)
    assert row.ratio("warm") == pytest.approx((1.1 + 1.25) / 2)
    assert row.ratio("refused") == pytest.approx(2.5)
    assert Seconds("none").ratio("warm") is None
    assert "warm: median 1.18, worst 1.18" in summary([row, Seconds("none", error="no")])
    shown = table([row, Seconds("none", error="no"), Seconds("much", budget=10, peak=11)])
    assert "none: no" in shown
    assert "much: took 11 of 10 bytes" in shown


def test_a_model_is_measured_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def ask(model: str, way: str, cache: Path, budget: int | None = None) -> dict[str, object]:
        asked.append((way, cache.name, budget))
        if way == "refused":
            return {"seconds": 20.0, "least_bytes": 30}
        return {"steps": [11.0, *[1.0] * 9], "peak_bytes": 100}

    monkeypatch.setattr(seconds, "ask", ask)
    path = tmp_path / "seconds.json"
    seconds.main(["--models", "gpt12", "--json", str(path)])
    seconds.main(["--models", "gpt12", "--json", str(path)])
    assert asked == [
        ("plain", "plain", None),
        ("fxremat", "fxremat", 60),
        ("plain", "plain", None),
        ("fxremat", "fxremat", 60),
        ("refused", "refused", None),
    ]
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["cold"], row["refused"], row["least"]) == ([10.0], [20.0], 30)
    assert "took 100 of 60 bytes" in capsys.readouterr().out


def test_first_steps_and_a_refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = GPT(layers=1, width=32, heads=2, length=32, vocabulary=2000)
    batch = model.sample(2, torch.Generator().manual_seed(0))
    monkeypatch.setattr(first_steps, "made", lambda _: with_loss(model, *batch))
    first_steps.main(["gpt12", "refused"])
    refused = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert refused["least_bytes"] > IMPOSSIBLE_BYTES
    first_steps.main(["gpt12", "fxremat", str(refused["least_bytes"])])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(found["steps"]) == first_steps.FIRST + first_steps.STEADY

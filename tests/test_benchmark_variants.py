"""The ablation of variants, and training in lossy ones, at their smallest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import variants_convergence as convergence
from benchmarks.variants import parse_arguments
from fxremat.passes.variants.table import RULES

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.mark.slow
def test_two_steps_in_lossy_forms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {"exact", "saved_bf16", "scaled_norm_from_output"}
    chosen = [one for one in convergence.variants() if one.name in names]
    assert {one.name for one in chosen} == names
    monkeypatch.setattr(convergence, "variants", lambda: chosen)
    out = tmp_path / "curves.json"
    given = ["convergence", "--steps", "2", "--out", str(out)]
    assert convergence.run(parse_arguments(given)) == 0
    runs = json.loads(out.read_text())["runs"]
    trained = [one for one in runs if one["losses"]]
    assert all(len(one["losses"]) == 2 for one in trained)
    assert [one["variant"] for one in runs if not one["losses"]] == ["scaled_norm_from_output"]
    exact = {one["model"]: one for one in runs if one["variant"] == "exact"}
    for one in trained:
        base = exact[one["model"]]
        assert one["losses"][0] == pytest.approx(base["losses"][0], abs=1e-5)
        assert one is base or (one["sites"] and one["saved_bytes"] < base["saved_bytes"])
    drawn = out.with_suffix(".svg").read_text()
    assert drawn.count("<polyline") == 2 * len(trained)


def test_every_lossy_row_is_trained() -> None:
    trained = {one.rule.name for one in convergence.variants() if one.rule is not None}
    assert trained == {rule.name for rule in RULES if rule.lossy}

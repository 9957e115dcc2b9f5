"""What rules are worth, the loss beside torch's calls, and two results compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import compare, library_calls, rules, rules_measure
from benchmarks.rows import Row
from benchmarks.rules import At
from benchmarks.rules_models import MODELS, OF_RULE
from fxremat.passes.variants.table import RULES

pytestmark = pytest.mark.usefixtures("fresh")


def test_every_rule_has_models() -> None:
    assert list(OF_RULE) == [rule.name for rule in RULES]
    assert {model for models in OF_RULE.values() for model in models} <= {*MODELS}


def test_a_rule_that_pays(tmp_path: Path) -> None:
    out = tmp_path / "rules.json"
    words = ["--names", "sign_masks", "--sizes", "cpu", "--alone", "--seconds", "0.2"]
    assert rules.main([*words, "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    (row,) = data["rows"]
    assert row["least_with"] < row["least_without"]
    assert data["verdicts"] == {"sign_masks": "pays in bytes and seconds"}


def row_of(least_with: int, *budgets: At) -> rules.Row:
    """Of a rule without which the least peak is 100."""
    return rules.Row(
        "saved_8bit", True, "gpt", "cpu", "cpu", 4, 200, 100, least_with, 4, [*budgets]
    )


def test_verdicts() -> None:
    idle, faster = At("80%", 160, 0.1, 0.1, 0), At("60%", 120, 0.2, 0.15, 3)
    alone = At("least", 100, None, 0.3, 2)
    assert row_of(100, idle).verdict == "does not pay"
    assert replace(row_of(90), sites=0).verdict == "no site"
    assert row_of(90, idle).verdict == "pays in bytes"
    assert row_of(100, idle, faster).verdict == "pays in seconds"
    best = row_of(90, idle, faster, alone)
    assert best.verdict == "pays in bytes and seconds"
    assert best.best is alone
    assert "over" in rules.table([best])
    assert rules.verdicts([row_of(100, idle), best]) == {"saved_8bit": best.verdict}


def test_broken_promises_are_failures() -> None:
    over = rules_measure.Figures("a rule", "gpt", "with", budget_bytes=80, peak_bytes=81)
    assert list(over.failures()) == ["a rule, with: 81 bytes, budget 80"]
    wrong = rules_measure.Figures("a rule", "gpt", "with", gradient_error=0.1)
    assert len(list(wrong.failures())) == 1
    lossy = rules_measure.Figures(
        "a rule", "gpt", "with", True, gradient_error=0.1, report={"variants": {"a rule": 1}}
    )
    assert list(lossy.failures()) == []
    assert "the least is 1.00 MiB" in rules_measure.table(
        [rules_measure.Figures("a rule", "gpt", "without", least_bytes=1 << 20)]
    )


@pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="this torch has no such call"
)
def test_the_call_of_torch_computes_the_same() -> None:
    shape = library_calls.Shape(2, 8, 8, 300)
    gpt, arguments = library_calls.make(shape)
    expected = gpt(*arguments)
    torch.testing.assert_close(library_calls.WithCall(gpt)(*arguments), expected)


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

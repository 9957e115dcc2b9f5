"""The benchmarks of variants, at their smallest: a model for each row, lossy ones trained."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from benchmarks import variants_convergence as convergence
from benchmarks import variants_rows as rows
from benchmarks.variants import parse_arguments, ways
from benchmarks.variants_curves import draw, smoothed
from benchmarks.variants_models import MODELS, build
from fxremat.compiling.tracing import trace_step
from fxremat.core.alternatives import run_once, take
from fxremat.core.problem import Problem
from fxremat.passes.variants.rule import Rule
from fxremat.passes.variants.table import RULES
from fxremat.planner import solve
from tests.strategies import problems_with_alternatives


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_every_row_has_a_model() -> None:
    assert list(MODELS) == [rule.name for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_row_has_a_site_in_its_model(rule: Rule) -> None:
    model, arguments = build(rule.name)
    step = trace_step(rule.name, model, arguments, workspaces=True, rules=(rule,))
    assert step.found.problem.alternatives


@settings(deadline=None, max_examples=20)
@given(problems_with_alternatives(max_ops=6))
def test_in_turn_takes_the_better_forms(problem: Problem) -> None:
    """Those that need nothing to run again to fit, or those that save time."""
    once, plain = run_once(problem), take(problem, ())
    budget = (solve(plain, 0).peak_bytes + solve(plain, None).peak_bytes) // 2
    found = ways(problem, budget, "greedy")["in turn"]
    for limit in (budget, None):
        forms = take(problem, solve(once, limit, "greedy").variants)
        one = solve(forms, budget, "greedy")
        best = max(one.peak_bytes, budget), one.time_us
        assert (max(found.peak_bytes, budget), found.time_us) <= best


def figures(
    way: str, peak: int, budget: int | None, error: float = 0.0, forms: tuple[str, ...] = ()
) -> rows.Figures:
    """Of one way, in round numbers."""
    return rows.Figures(
        way, budget, budget, peak, error, forms, runs_again=0, step_seconds=[1.0, 3.0],
        cpu_seconds=[1.0, 3.0], ratios=[1.0, 2.0, 9.0], cpu_ratios=[1.0],
    )  # fmt: skip


def row(lossy: bool, *ways: rows.Figures) -> rows.Row:
    """A row of the ways given, beside torch.compile and fxremat without forms."""
    others = figures("compile", 100, None), figures("without", 80, 80)
    return rows.Row("a row", lossy, {one.way: one for one in (*others, *ways)})


def test_rows_that_take_no_form_say_so() -> None:
    text = rows.table([row(False, figures("with", 80, 80))])
    assert "0.0%" in text
    assert text.count("not taken") == 2
    text = rows.table([row(True, figures("with", 40, 40, forms=("x",)), figures("same", 70, 80))])
    assert "(inexact)" in text
    assert "50.0%" in text
    assert text.count("not taken") == 1


def test_broken_promises_are_failures() -> None:
    over = row(False, figures("with", 81, 80))
    assert list(over.failures()) == ["a row, with: 81 bytes, budget 80"]
    wrong = figures("with", 80, 80, error=0.1, forms=("x",))
    assert len(list(row(False, wrong).failures())) == 1
    assert list(row(True, wrong).failures()) == []


def test_names_of_rows() -> None:
    assert rows.rules_of("all") == list(RULES)
    assert [rule.name for rule in rows.rules_of("saved_8bit")] == ["saved_8bit"]
    with pytest.raises(SystemExit, match="nothing"):
        rows.rules_of("nothing")


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


def test_what_is_far() -> None:
    assert not convergence.is_far(1.1, 1.0)
    assert convergence.is_far(1.2, 1.0)
    assert convergence.is_far(math.nan, 1.0)


def test_a_line_for_each_variant(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    lines = {"exact": [2.0, 1.0], "one": [2.0, 1.5], "lost": [2.0, math.inf, math.nan]}
    draw({"gpt": lines, "cnn": {"exact": [1.0]}}, path)
    text = path.read_text()
    assert text.count("<polyline") == 2 * 4  # and one each in the legend
    assert all(f">{name}<" in text for name in (*lines, "gpt", "cnn"))
    assert "nan" not in text
    assert smoothed([4.0, 2.0, 0.0], 2) == [4.0, 3.0, 1.0]

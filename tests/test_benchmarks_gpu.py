"""What a run on a GPU says of its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import Group, parse_arguments, text
from benchmarks.rows import MIB, Row
from benchmarks.runner import Case, Timing


def group(folder: Path, *rows: Row) -> Group:
    """Rows as the processes have filled them."""
    made = Group(Case("gpt", "base", "cuda", "bfloat16", 0, 1), Timing(1, 1, 1), folder)
    made.rows = {row.variant: row for row in rows}
    return made


def measured(variant: str, kind: str, reserved: int, error: float = 0.0) -> Row:
    """A row with a budget of 100 MiB, of which 90 were allocated."""
    row = Row(variant, kind, peak_bytes=90 * MIB, reserved_bytes=reserved * MIB)
    row.gradient_error = error
    if kind == "fxremat":
        row.budget_bytes = 100 * MIB
        row.report = {
            "predicted_peak_bytes": 90 * MIB,
            "predicted_reserved_bytes": 99 * MIB,
            "time_overhead": 0.1,
        }
    return row


def test_budgets_count_reserved_bytes(tmp_path: Path) -> None:
    """Also where fewer were allocated."""
    broken = group(tmp_path, measured("fxremat50%", "fxremat", 110))
    assert broken.failures == ["gpt fxremat50%: the budget is not obeyed"]
    kept = group(tmp_path, measured("fxremat50%", "fxremat", 99))
    assert kept.failures == []
    assert "+0.00%" in text([kept])
    assert "-10.00%" in text([broken])


def test_the_first_step_counts_too(tmp_path: Path) -> None:
    row = measured("fxremat50%", "fxremat", 99)
    row.first_bytes = 101 * MIB
    assert group(tmp_path, row).failures == ["gpt fxremat50%: the budget is not obeyed"]


def test_gradients_that_are_off_are_a_failure(tmp_path: Path) -> None:
    """Ours alone: nobody promised the others'."""
    row = measured("fxremat50%", "fxremat", 99, error=0.07)
    repeated = measured("checkpoint", "checkpoint", 99, error=0.17)
    found = group(tmp_path, repeated, row).failures
    assert found == ["gpt fxremat50%: gradients are off by 7.0e-02"]


def test_a_refusal_is_no_failure(tmp_path: Path) -> None:
    row = Row("fxremat33%", "fxremat", budget_bytes=10 * MIB, minimum_bytes=20 * MIB, error="no")
    found = group(tmp_path, row)
    assert found.failures == []
    assert found.refusals == ["gpt fxremat33%: refused at 10.0 MiB, least 20.0 MiB"]


def test_the_models_allocator_stands_beside_the_record(tmp_path: Path) -> None:
    found = group(tmp_path, measured("compile", "compile", 99))
    found.recorded["compile"] = {"modelled_peak_bytes": 101, "recorded_peak_bytes": 100}
    assert "+1.00%" in text([found])


@pytest.mark.parametrize("arguments", [["--models", "gpt,x"], ["--ways", "x"]])
def test_unknown_names_end_the_run(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert "unknown" in capsys.readouterr().err

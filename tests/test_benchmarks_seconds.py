"""Planned against measured seconds: what is compared, and what is said of it."""

from __future__ import annotations

import pytest

from benchmarks.rows import Row
from benchmarks.seconds import _figures


def test_ratios_are_to_compile() -> None:
    base = Row("compile", "compile", peak_bytes=200, compile_seconds=10.0)
    base.step_seconds = [[2.0, 3.0], [2.5]]
    row = Row("fxremat50%", "fxremat", budget_bytes=100, peak_bytes=100, compile_seconds=15.0)
    row.report = {"time_overhead": 0.1, "seconds": {"plan": 1.0}, "predicted_peak_bytes": 100}
    row.step_seconds, row.time_ratios = [[3.0, 2.2], [4.0]], [1.1, 1.3]
    found = _figures("gpt6", row, base, warm=11.0)
    assert found.peak == 0.5
    assert found.obeyed
    assert found.planned == pytest.approx(1.1)
    assert found.measured == pytest.approx(1.2)
    assert found.best == pytest.approx(1.1)
    assert (found.cold, found.warm) == (1.5, 1.1)
    refused = _figures("gpt6", Row("fxremat33%", "fxremat", error="no"), base, warm=None)
    assert (refused.peak, refused.measured, refused.cold, refused.warm) == (None,) * 4
    assert refused.error == "no"

"""The examples of docs/examples that train models of Hugging Face: losses stay within a budget."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import fxremat

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.mark.parametrize(
    ("name", "framework", "budget"),
    [
        ("vit", "transformers", "24MiB"),
        ("lora", "peft", "16MiB"),
        ("qwen3", "transformers", "30MiB"),
    ],
)
def test_an_example_learns_the_same_within_its_budget(
    name: str, framework: str, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(framework)
    monkeypatch.syspath_prepend(EXAMPLES)
    main = importlib.import_module(name).main
    plain = main(steps=3)
    torch._dynamo.reset()
    assert main(steps=3, budget=budget) == pytest.approx(plain, rel=1e-3)
    reports = fxremat.reports()
    assert all(one.predicted_peak_bytes <= (one.budget_bytes or 0) for one in reports)
    assert any(report.recomputed for report in reports)

"""Published settings, trained and planned."""

from __future__ import annotations

import re

import pytest

from benchmarks import published
from benchmarks.nets.language import Llama
from benchmarks.published import GB, SETTINGS, Figure, Setting, measured, planned
from benchmarks.training import Peak


def tiny(length: int) -> Llama:
    """As wide as a head, and with as many words as make the loss large."""
    return Llama(
        layers=1, width=64, heads=4, kv_heads=2, hidden=128, length=length, vocabulary=2000,
        head_width=32, normed=True, tied=True, any_length=True,
    )  # fmt: skip


def setting(gigabytes: float) -> Setting:
    """One sequence, small enough for a CPU."""
    figure = Figure(published.CHECKPOINTS, gigabytes, 1000.0)
    return Setting("nobody", tiny, 1, 256, "adamw-8bit", (figure,))


@pytest.mark.slow
def test_a_setting_is_trained_within_its_bytes() -> None:
    """What is refused is told the least, and the least is enough."""
    refused = measured("tiny", setting(0.0015), setting(0.0015).figures[0], "fxremat", "cpu", 1)
    assert refused.peak is None
    assert not refused.is_broken
    least = re.fullmatch(r"refused, least (\d\.\d+) GB", refused.error or "")
    assert least is not None
    given = setting(float(least[1]) + 0.0001)  # it is rounded
    ours = measured("tiny", given, given.figures[0], "fxremat", "cpu", 1)
    assert ours.peak is not None, ours.error
    assert ours.budget_bytes is not None
    assert ours.peak.peak_bytes <= ours.budget_bytes
    assert not ours.is_broken
    assert ours.per_second > 0
    assert ours.cells()[-1] == ""


def test_more_than_its_budget_is_told() -> None:
    figure = Figure(published.CHECKPOINTS, 1.0)
    over = published.Measured("tiny", "fxremat", figure, GB, Peak(0, GB // 2, GB + 1), 1.0, 1.0)
    assert over.is_broken
    assert over.cells()[-1] == "over its budget"
    failed = published.Measured("tiny", "fxremat", figure, GB, error="RuntimeError: no")
    assert failed.is_broken
    by_hand = published.Measured("tiny", "checkpoints", figure, None, Peak(0, 2 * GB, 2 * GB))
    assert not by_hand.is_broken


@pytest.mark.slow
def test_tokens_in_published_bytes() -> None:
    pytest.importorskip("triton")
    row = planned("tiny", setting(0.2), setting(0.2).figures[0], "H100")
    assert row.fits["fxremat"] >= row.fits["torch.compile"] > 0
    assert row.per_second > 0
    assert len(row.cells()) == len(published.PLANNED)


@pytest.mark.parametrize(("name", "billions"), [("qwen3-8b-16k", 8.19), ("qwen3-4b-32k", 4.02)])
def test_models_have_their_published_sizes(name: str, billions: float) -> None:
    import torch

    with torch.device("meta"):
        model = SETTINGS[name].network(16)
    assert sum(p.numel() for p in model.parameters()) / GB == pytest.approx(billions, abs=0.005)

"""What one does by hand, and fxremat at the same bytes: what is compared, what is said of it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.by_hand import EIGHT, Interval, figures_of, summary, ways
from benchmarks.models import (
    MATMULS_AND_ATTENTION,
    build,
    uses_random_ops,
    with_checkpoint,
)
from benchmarks.rows import Row


def _row(name: str, kind: str, peak: int, ratios: list[float], budget: int | None = None) -> Row:
    return Row(name, kind, budget_bytes=budget, peak_bytes=peak, time_ratios=ratios)


def test_ours_is_compared_with_the_way_whose_bytes_it_has() -> None:
    ours = _row("fxremat@knob", "fxremat", 99, [1.1, 1.2, 1.3], budget=100)
    ours.report = {"time_overhead": 0.1, "predicted_peak_bytes": 100}
    rows = [
        _row("compile", "compile", 200, [1.0, 1.0, 1.0]),
        _row("knob0", "knob", 100, [1.2, 1.5, 1.3]),
        _row("knob0.5", "knob", 150, [1.0, 1.0, 1.0]),
        ours,
    ]
    found = {one.way: one for one in figures_of("gpt6", rows)}
    assert list(found) == ["compile", "knob0", "fxremat@knob"]
    one = found["fxremat@knob"]
    assert (one.rival, one.bytes, one.obeyed) == ("knob0", 99, True)
    assert one.against is not None
    assert one.against.median == pytest.approx(1.1 / 1.2)
    assert one.points == pytest.approx(10.0)
    assert "slower than by hand: 0 of 1" in summary(list(found.values()))


def test_ours_is_slower_where_the_whole_interval_is_above_one() -> None:
    rows = [
        _row("compile", "compile", 200, [1.0] * 9),
        _row("checkpoint", "checkpoint", 100, [1.0] * 9),
        _row("fxremat@checkpoint", "fxremat", 100, [1.1] * 9, budget=100),
    ]
    assert "1 of 1 gpt6 fxremat@checkpoint 1.100-1.100" in summary(figures_of("gpt6", rows))


def test_an_interval_holds_the_true_median_as_often_as_it_says() -> None:
    """Of 9 values the second and the eighth, which hold it with 96 %; of 5 no two hold it."""
    assert Interval.of([float(k) for k in range(9)]) == Interval(4.0, 1.0, 7.0)
    assert Interval.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Interval(3.0, 1.0, 5.0)
    assert Interval.of([]) is None
    draw = random.Random(0)
    found = (Interval.of([draw.expovariate(1.0) for _ in range(15)]) for _ in range(2000))
    held = [one.low <= 0.6931 <= one.high for one in found if one is not None]
    assert 0.95 <= sum(held) / len(held) <= 0.98


def test_every_way_that_is_matched_is_measured_before_fxremat_has_its_bytes() -> None:
    names = [one.name for one in ways([], bare=False)]
    assert names[:3] == ["checkpoint", "selective", "knob0"]
    assert names[-4:] == [
        f"fxremat@{kind}" for kind in ("compile", "knob", "checkpoint", "selective")
    ]
    assert "plain@knob" in [one.name for one in ways([], bare=True)]


def test_gradients_of_the_knob_can_be_compared() -> None:
    """They are wrong with dropout (`tests/test_torch_knob.py`)."""
    assert len(EIGHT.split(",")) == 8
    assert not any(uses_random_ops(build(name)[0]) for name in EIGHT.split(","))


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts how often matrices are multiplied."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.matmuls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.matmuls += func in MATMULS_AND_ATTENTION
        return func(*args, **(kwargs or {}))


def test_a_selective_checkpoint_multiplies_no_matrices_again() -> None:
    matmuls, gradients = [], []
    for selective in (None, False, True):
        model, arguments = build("gpt")
        model = model if selective is None else with_checkpoint(model, selective=selective)
        loss = model(*arguments)
        with _Counted() as counted:
            loss.backward()
        matmuls.append(counted.matmuls)
        gradients.append([p.grad for p in model.parameters()])
    assert matmuls[0] == matmuls[2] < matmuls[1]
    for plain, *others in zip(*gradients, strict=True):
        for other in others:
            torch.testing.assert_close(plain, other)

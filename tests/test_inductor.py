"""The same through Inductor: few and tiny, for each compiles for seconds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fxremat
from fxremat.backend import fxremat as backend
from tests.end_to_end import compiled_by_fxremat, measured
from tests.small import Stack, seeded, train

pytestmark = pytest.mark.usefixtures("fresh")


def test_budget_prediction_gradients_and_dropout() -> None:
    model, x = seeded(lambda: Stack(1, dropout=0.2), 1024, 32)
    other = copy.deepcopy(model)
    budget = int(0.7 * fxremat.explain(model, x).store_all_peak_bytes)
    options: dict[str, Any] = {"memory_budget": budget, "variants": "none"}
    call = torch.compile(model, backend=backend, options=options)
    peak = measured(model, call, (x,))
    report = fxremat.reports()[-1]
    assert report.recomputed
    assert peak <= budget
    assert abs(report.predicted_peak_bytes - peak) <= 0.01 * peak
    ours = train(model, x, call)
    theirs = train(other, x, torch.compile(other))
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its)


def test_caches_know_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same budget hits and still reports; another one never gets the cached graph."""
    model, x = seeded(lambda: Stack(1), 1024, 32)
    full = fxremat.explain(model, x).store_all_peak_bytes
    plans = []
    for fraction in (0.8, 0.8, 0.7):
        torch._dynamo.reset()
        measured(model, compiled_by_fxremat(model, memory_budget=int(fraction * full)), (x,))
        plans.append(fxremat.reports()[-1])
    assert [p.from_cache for p in plans] == [False, True, False]
    assert plans[0].plan == plans[1].plan
    assert plans[2].predicted_peak_bytes <= 0.7 * full


@pytest.mark.slow
@pytest.mark.usefixtures("vectors")
def test_the_users_inductor_options_and_passes_stay() -> None:
    """And the peak is what was predicted, with kernels as users have them."""
    seen = []

    def theirs(graph: torch.fx.Graph) -> None:
        seen.append(len(list(graph.nodes)))

    model, x = seeded(lambda: Stack(1), 64, 32)
    inductor = {"post_grad_custom_post_pass": theirs}
    call = compiled_by_fxremat(model, memory_budget="8MiB", inductor=inductor)
    peak = measured(model, call, (x,))
    assert seen
    assert peak == fxremat.reports()[-1].predicted_peak_bytes

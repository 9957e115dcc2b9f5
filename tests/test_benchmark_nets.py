"""The models and settings of the benchmarks, and what is said of each."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from benchmarks import arena, offload, published
from benchmarks import variants_convergence as convergence
from benchmarks.architectures.cases import checkpoint_blocks, repeated_blocks
from benchmarks.architectures.measuring import measured as measured_row
from benchmarks.architectures.rows import Row as MatrixRow
from benchmarks.by_hand import EIGHT, Interval, figures_of, summary
from benchmarks.models import (
    MATMULS_AND_ATTENTION,
    MODELS,
    build,
    find_config,
    uses_random_ops,
    with_checkpoint,
)
from benchmarks.nets.language import Llama
from benchmarks.nets.layers import Network
from benchmarks.published import GB, SETTINGS, Figure, Setting, measured, planned
from benchmarks.rows import Row
from benchmarks.training import Peak
from fxremat.compat.tensors import Watching
from fxremat.passes.variants.table import RULES

pytestmark = pytest.mark.usefixtures("fresh")


# --- models -------------------------------------------------------------------------------


NAMES = sorted(set(MODELS) - {"gpt16", "gpt6", "gpt48", "gpt50k", "llama32"})


def shallow(name: str) -> tuple[Network, tuple[Tensor, ...]]:
    """A model with two layers at most, where further ones are the same again, and its batch."""
    config = find_config(name)
    layers = config.arguments.get("layers")
    fewer = {} if layers is None else {"layers": min(layers, 2)}
    model = config.network(**{**config.arguments, **fewer}).train()
    return model, model.sample(config.batch, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
def test_dynamo_captures_one_graph(name: str) -> None:
    """Captured with its checkpoints, and not run."""
    graphs = []

    def keep(gm: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., tuple[Tensor]]:
        graphs.append(gm)
        return lambda *_: (torch.zeros(()),)

    torch._dynamo.reset()
    model, arguments = shallow(name)
    torch.compile(with_checkpoint(model), backend=keep, fullgraph=True)(*arguments)
    assert len(graphs) == 1


def test_only_models_with_dropout_draw_random_numbers() -> None:
    """None of those whose gradients with torch's knob are compared (`tests/test_torch_knob.py`)."""
    eight = EIGHT.split(",")
    drawing = {name for name in {*NAMES, *eight} if uses_random_ops(build(name)[0])}
    assert drawing == {"bert", "bert6", "dropout"}
    assert len(eight) == 8
    assert not drawing & {*eight}


# --- architectures ------------------------------------------------------------------------


def test_repeated_blocks_are_the_outermost_ones() -> None:
    """Of a list of blocks, each with a list inside, and one layer apart."""
    inner = [nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in "ab")) for _ in range(3)]
    head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = nn.ModuleDict({"blocks": nn.ModuleList(inner), "head": head})
    assert repeated_blocks(model) == inner
    assert checkpoint_blocks([model, nn.Linear(2, 2)]) == 3


def test_what_breaks_a_promise_is_bad() -> None:
    def row(status: str, **found: Any) -> MatrixRow:
        return MatrixRow({"name": "one", "status": status, **found})

    way = {"peaks": [90, 100]}
    assert all(row(status).is_bad for status in ("over", "failed", "inactive"))
    assert row("refused", budget=100, checkpointed=way).is_bad
    fine = row("ok"), row("inactive", warned=["no effect"]), row("refused", budget=99)
    assert not any(one.is_bad for one in (*fine, row("refused", budget=99, checkpointed=way)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gnn", "pinn"])
def test_architectures_in_plain_torch_keep_their_budget(name: str) -> None:
    """At 60 % of plain compile's peak, and at the least that is named; gradients are compared."""
    found = measured_row(name)
    assert found.status == "ok", (found.error, found.warned)
    assert found.at_least is not None


# --- published ----------------------------------------------------------------------------


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
    with torch.device("meta"):
        model = SETTINGS[name].network(16)
    assert sum(p.numel() for p in model.parameters()) / GB == pytest.approx(billions, abs=0.005)


# --- arena --------------------------------------------------------------------------------


def test_little_is_unused_in_recorded_steps() -> None:
    """The verifier has passed each layout."""
    rows = [arena.measured(name, run) for name, run in arena.recorded_runs()]
    assert len(rows) == 13
    unused = [row.unused for row in rows]
    assert min(unused) >= 0
    assert statistics.median(unused) <= 0.015
    assert max(unused) <= 0.03
    assert all(row.arena_bytes + row.pool_bytes < row.best_fit_bytes for row in rows)


# --- offload ------------------------------------------------------------------------------


@pytest.mark.slow
def test_plans_of_a_model_of_two_layers(tmp_path: Path) -> None:
    out = tmp_path / "plans.json"
    given = ["plans", "--models", "gpt2-medium", "--layers", "2", "--devices", "T4"]
    assert offload.main([*given, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["strategy"] for row in rows} == {"keep", "recompute", "offload", "both"}
    assert all(row["status"] in ("ok", "over", "infeasible") for row in rows)
    cases: dict[tuple[object, ...], dict[str, float]] = {}
    for row in rows:
        if row["status"] == "ok":
            case = (row["link"], row["budget"])
            cases.setdefault(case, {})[row["strategy"]] = row["time_us"]
    assert cases
    for times in cases.values():
        assert times["both"] <= min(times.values()) * (1 + 1e-9)


# --- variants -----------------------------------------------------------------------------


def test_every_lossy_row_is_trained() -> None:
    trained = {one.rule.name for one in convergence.variants() if one.rule is not None}
    assert trained == {rule.name for rule in RULES if rule.lossy}


# --- by hand ------------------------------------------------------------------------------


def _row(name: str, kind: str, peak: int, ratios: list[float], budget: int | None = None) -> Row:
    return Row(name, kind, budget_bytes=budget, peak_bytes=peak, time_ratios=ratios)


def test_ours_is_compared_with_the_way_whose_bytes_it_has() -> None:
    """It is slower where the whole interval is above one."""
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


def test_a_selective_checkpoint_multiplies_no_matrices_again() -> None:
    seen, matmuls, gradients = list[Any](), [], []
    for selective in (None, False, True):
        model, arguments = build("gpt")
        model = model if selective is None else with_checkpoint(model, selective=selective)
        loss = model(*arguments)
        with Watching(lambda op, *_: seen.append(op)):
            loss.backward()
        matmuls.append(sum(op in MATMULS_AND_ATTENTION for op in seen))
        seen.clear()
        gradients.append([p.grad for p in model.parameters()])
    assert matmuls[0] == matmuls[2] < matmuls[1]
    for plain, *others in zip(*gradients, strict=True):
        for other in others:
            torch.testing.assert_close(plain, other)

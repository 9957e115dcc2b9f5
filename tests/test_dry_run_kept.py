"""Dry runs kept on disk: the same as those made anew, and asked for by what decides them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fxremat
from fxremat.compat.configuration import inductor_config
from fxremat.compile.dry_run.dry_run import (
    DryRun,
    _dry_run_from_json,
    _dry_run_to_json,
    dry_run,
    dry_run_once,
)
from fxremat.core.timeline import Lifetime
from fxremat.whatif.explanation import Explanation
from tests.compat_graphs import Shared, half
from tests.small import Convolutions, Stack, seeded


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where dry runs are kept."""
    monkeypatch.setattr("fxremat.compile.search.candidates.cache_directory", lambda: str(tmp_path))
    return tmp_path / "fxremat" / "dry_runs"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[DryRun]:
    """The dry runs that were really made."""
    found = []

    def noting(*args: Any, **kwargs: Any) -> Any:
        found.append(dry_run(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr("fxremat.compile.dry_run.dry_run.dry_run", noting)
    return found


def explain(model: Any = None, rows: int = 512, **options: Any) -> Explanation:
    torch._dynamo.reset()
    made, x = seeded(model or (lambda: Stack(2)), rows, 32)
    return fxremat.explain(made, x, options={"memory_budget": "1.3MiB", **options})


def images() -> Explanation:
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"memory_budget": "1000kB", "variants": "none", "solver": "greedy"}
    return fxremat.explain(Convolutions(), torch.randn(4, 3, 32, 32), options=options)


def unchanging(explanation: Explanation) -> Any:
    """What does not depend on the clock."""
    report = explanation.graphs[0]
    assert explanation.plan is not None
    return (
        explanation.plan.steps,
        explanation.predicted_peak_bytes,
        report.dry_runs,
        report.at_peak,
    )


@pytest.mark.parametrize("ask", [explain, images])
def test_no_dry_run_is_made_twice(
    kept: Path, made: list[Any], ask: Callable[[], Explanation]
) -> None:
    first, count = ask(), len(made)
    assert 0 < len(list(kept.iterdir())) == count
    second = ask()
    assert len(made) == count
    assert unchanging(second) == unchanging(first)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("change", [{"rows": 448}, {"inductor": {"max_fusion_size": 2}}])
def test_another_batch_and_other_options_count_anew(made: list[Any], change: Any) -> None:
    explain(solver="greedy")
    count = len(made)
    explain(solver="greedy", **change)
    assert len(made) > count


@pytest.mark.parametrize(
    ("change", "threads", "count"),
    [
        ({}, 2, 1),
        ({"num_fwd_outputs": 2}, 2, 2),
        ({"device": "cuda"}, 2, 2),
        ({"card": "H100"}, 2, 2),
        ({}, 1, 2),
    ],
    ids=["nothing", "results", "device", "card", "threads"],
)
def test_the_same_graphs_are_counted_anew_where_something_else_differs(
    kept: Path, made: list[Any], change: dict[str, Any], threads: int, count: int
) -> None:
    def step(forward: Any, backward: Any) -> None:
        asked: dict[str, Any] = {"num_fwd_outputs": 1, "device": "cpu"}
        asked |= {"workspace": lambda *_: (), "directory": kept}
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(2)
            dry_run_once(forward, backward, **asked)
            torch.set_num_threads(threads)
            dry_run_once(forward, backward, **{**asked, **change})
        finally:
            torch.set_num_threads(before)

    half(Shared(), step)
    assert len(made) == count


SIZES = st.integers(0, 2**50)
DRY_RUNS = st.builds(
    DryRun,
    peak_bytes=SIZES,
    live_bytes=st.lists(SIZES).map(tuple),
    at_peak=st.lists(st.tuples(st.text(), SIZES)).map(tuple),
    scratch=st.dictionaries(st.text(), SIZES),
    lifetimes=st.lists(st.builds(Lifetime, st.text(), SIZES, SIZES, SIZES, st.booleans())).map(
        tuple
    ),
)


@given(DRY_RUNS)
def test_every_dry_run_is_read_back(shown: DryRun) -> None:
    assert _dry_run_from_json(json.loads(json.dumps(_dry_run_to_json(shown)))) == shown


@pytest.mark.parametrize(
    "damage",
    [
        {"peak_bytes": None},
        {"at_peak": [1, 2]},
        {"scratch": []},
        {"live_bytes": "much"},
        {"lifetimes": 3},
    ],
)
def test_what_is_no_dry_run_is_not_believed(damage: dict[str, Any]) -> None:
    answer = _dry_run_to_json(DryRun(1, (1,), (("x", 1),), {"x": 1}))
    assert _dry_run_from_json(answer) is not None
    assert _dry_run_from_json({**answer, **damage}) is None
    (name,) = damage
    del answer[name]
    assert _dry_run_from_json(answer) is None


def test_nothing_is_kept_where_caches_are_disabled(kept: Path, made: list[Any]) -> None:
    with inductor_config.patch(force_disable_caches=True):
        explain()
    assert made
    assert not kept.exists()

"""What `explain` writes of whole models, opened where people open it. ``make test-pages``.

``PAGE_PICTURES`` is a folder for pictures of what was seen.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch.cuda import _memory_viz

import fxremat
from benchmarks.explaining import CONFIGS
from benchmarks.models import find_config
from tests.browser import opened

pytestmark = pytest.mark.browser

MODELS = {"gpt": CONFIGS["gpt"], "unet": find_config("unet"), "llama32": CONFIGS["llama32"]}


@pytest.mark.parametrize("name", MODELS)
def test_page_trace_and_snapshot_of_a_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    config = MODELS[name]
    model = config.network(**config.arguments)
    batch = model.sample(config.batch, torch.Generator().manual_seed(0))
    whole = fxremat.explain(model, *batch).keep_all_peak_bytes
    told = fxremat.explain(model, *batch, memory_budget=whole * 6 // 10)
    [report] = told.graphs

    page = tmp_path / "step.html"
    told.save_page(page)
    for dark in (False, True):
        with opened(page, tmp_path / "profile", dark=dark) as tab:
            tab.settle()
            assert tab.evaluate("page.graph.count") == len(report.lifetimes)
            tab.evaluate("page.showPeak()")
            tab.settle()
            assert tab.complaints() == []
            folder = os.environ.get("PAGE_PICTURES")
            if folder:
                tab.picture(Path(folder) / f"{name}{'_dark' if dark else ''}.png")

    snapshot = tmp_path / "step.pickle"
    told.save_snapshot(snapshot)
    with snapshot.open("rb") as file:
        data = pickle.load(file)
    live = most = 0
    for event in data["device_traces"][0]:
        live += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        most = max(most, live)
    assert most == max(
        sum(one.nbytes for one in report.lifetimes if one.start <= step < one.stop)
        for step in range(len(report.timeline))
    )
    assert "memory" in _memory_viz.trace_plot(data).lower()  # type: ignore[no-untyped-call]

    trace = tmp_path / "step.json"
    told.save_trace(trace)
    ends = defaultdict[tuple[int, int], float](float)
    events = json.loads(trace.read_text())["traceEvents"]
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: float(e["ts"])):
        thread = event["pid"], event["tid"]
        assert event["ts"] >= ends[thread] - 1e-3  # microseconds: they do not overlap
        ends[thread] = event["ts"] + event["dur"]
    counted = [e["args"]["bytes"] for e in events if e["name"] == "bytes on the device"]
    assert max(counted) == report.plan.peak_bytes
    assert all(a["ts"] <= b["ts"] for a, b in itertools.pairwise(e for e in events if "ts" in e))

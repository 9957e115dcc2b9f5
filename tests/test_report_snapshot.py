"""The snapshot for memory_viz: its events, replayed the obvious way, and torch's own readers."""

from __future__ import annotations

import copy
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from fxremat.core.timeline import Lifetime
from fxremat.report.exports import memory_snapshot
from fxremat.report.report import Report, SourceLocation
from tests.step_reports import altered, counted, moving, planned, replayed, storage_bytes

READ_BY_THE_VIEWER = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT",
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "NONE", "NEWTRUE", "NEWFALSE",
    "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_LIST", "APPEND", "APPENDS", "LIST", "EMPTY_DICT",
    "SETITEM", "SETITEMS", "DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip
every_report = pytest.mark.parametrize("make", [planned, counted, moving])


@every_report
def test_events_replayed(make: Callable[[], Report]) -> None:
    report = make()
    snapshot = memory_snapshot([report])
    course, held = replayed(snapshot["device_traces"][0])
    added = storage_bytes(report)
    assert course == added[: len(course)]
    assert set(added[len(course) :]) <= {course[-1]}  # nothing changes any more
    assert max(course) == max(added)
    (segment,) = snapshot["segments"]
    active = {b["address"]: b["size"] for b in segment["blocks"] if b["state"] != "inactive"}
    assert active == held
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]


def test_it_is_the_timeline_of_the_kernels() -> None:
    report = counted()
    course, _ = replayed(memory_snapshot([report])["device_traces"][0])
    assert course == list(report.timeline[: len(course)])
    assert max(course) == max(report.timeline) == report.predicted_peak_bytes - report.held_bytes


@every_report
def test_torch_reads_it(make: Callable[[], Report], tmp_path: Path) -> None:
    """What torch offers for snapshots, but for pictures that need a download."""
    make().save_snapshot(tmp_path / "step.pickle")
    data = pickle.loads((tmp_path / "step.pickle").read_bytes())
    viz: Any = _memory_viz
    for plot in (viz.trace_plot, viz.segment_plot):
        assert "MemoryViz.js" in plot(data)
    assert "MemoryViz.js" in viz.trace_plot(copy.deepcopy(data), plot_segments=True)
    assert "MemoryViz.js" in viz.trace_plot(copy.deepcopy(data), filter_freed=True)
    assert "total_allocated" in viz.segsum(data)
    assert " = cudaMalloc(" in viz.trace(data)
    for flames in (viz.memory(data, str), viz.segments(data, str)):
        assert "active_allocated;" in flames
    assert viz.compare(data["segments"], [], str).startswith("only_before;")


def test_the_viewer_reads_the_file(tmp_path: Path) -> None:
    """It has a reader of its own, which does not know all of pickle."""
    counted().save_snapshot(tmp_path / "step.pickle")
    found = {op.name for op, _, _ in pickletools.genops((tmp_path / "step.pickle").read_bytes())}
    assert found <= READ_BY_THE_VIEWER
    events = memory_snapshot([counted()])["device_traces"][0]
    assert "unknown" in {event.get("category") for event in events}


def test_frames_and_categories() -> None:
    lifetimes = (
        Lifetime("weight", 8, 0, 4), Lifetime("saved", 16, 0, 3), Lifetime("early", 4, 0, 1),
        Lifetime("saved", 2, 1, 2, workspace=True), Lifetime("nothing", 0, 0, 4),
        Lifetime("gradient", 8, 3, 4),
    )  # fmt: skip
    locations = {"saved": SourceLocation("layers.1", "net.py", 12)}
    report = altered(
        planned(),
        lifetimes=lifetimes,
        live_bytes=(28, 26, 24, 16),
        forward_steps=2,
        locations=locations,
    )
    snapshot = memory_snapshot([report])
    made = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc"]
    assert [(e["frames"][0]["name"], e["size"], e["time_us"], e["category"]) for e in made] == [
        ("weight", 8, 0, "there all the time"),
        ("saved", 16, 0, "held for the backward"),
        ("early", 4, 0, "forward only"),
        ("scratch memory of saved", 2, 1, "scratch memory"),
        ("gradient", 8, 3, "backward only"),
    ]
    assert made[1]["frames"] == [
        {"name": "saved", "filename": "net.py", "line": 12},
        {"name": "module", "filename": "layers.1", "line": 0},
    ]
    assert snapshot["segments"][0]["total_size"] == 28


def test_graphs_are_devices() -> None:
    snapshot = memory_snapshot([planned(), moving()])
    assert [segment["device"] for segment in snapshot["segments"]] == [0, 1]
    for report, events in zip((planned(), moving()), snapshot["device_traces"], strict=True):
        assert replayed(events)[0][0] == storage_bytes(report)[0]


def test_a_step_without_storages() -> None:
    snapshot = memory_snapshot([altered(planned(), lifetimes=(), live_bytes=())])
    assert snapshot["device_traces"] == [[]]

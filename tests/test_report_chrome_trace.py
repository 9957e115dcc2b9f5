"""The Chrome trace of a planned step: what the format asks for, and that it tells the plan."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fxremat
from fxremat.core.timeline import replay
from fxremat.report.exports import OPS, TO_DEVICE, TO_HOST, chrome_trace, memory_snapshot
from fxremat.report.report import Report
from tests.small import Stack, seeded
from tests.step_reports import check_trace_format, counted, moving, planned

Event = dict[str, Any]
every_report = pytest.mark.parametrize("make", [planned, counted, moving])


def events_of(*reports: Report) -> list[Event]:
    found: list[Event] = json.loads(json.dumps(chrome_trace(reports)))["traceEvents"]
    return found


def complete(events: list[Event], thread: int) -> list[Event]:
    return [event for event in events if event["ph"] == "X" and event["tid"] == thread]


@every_report
def test_rules_of_the_format(make: Callable[[], Report]) -> None:
    check_trace_format(events_of(make()))


@every_report
def test_it_is_the_plan(make: Callable[[], Report]) -> None:
    report = make()
    events, timeline = events_of(report), replay(report.problem, report.plan.steps)
    counted = [e["args"]["bytes"] for e in events if e["name"] == "bytes on the device"]
    assert counted == list(timeline.live_bytes)
    assert max(counted) == report.plan.peak_bytes
    ops = [event for event in complete(events, OPS) if event["cat"] != "wait"]
    assert [event["name"] for event in ops] == list(report.plan.ops)
    again = [event["name"] for event in ops if event["args"]["runs again"]]
    assert len(again) == sum(report.plan.repeats().values())
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert max(ends) == pytest.approx(report.plan.time_us, abs=1e-2)


def test_where_ops_come_from() -> None:
    sources = {event["args"].get("source") for event in complete(events_of(planned()), OPS)}
    assert any(source and source.startswith("small.py:") for source in sources)
    first = complete(events_of(moving()), OPS)[0]
    assert (first["args"]["module"], first["args"]["source"]) == ("layers.0", "net.py:7")


def test_copies_have_threads_of_their_own() -> None:
    report = moving()
    events, timing = events_of(report), replay(report.problem, report.plan.steps).timing
    for thread, kind in ((TO_HOST, "to host"), (TO_DEVICE, "to device")):
        expected = [copy for copy in timing.transfers if copy.kind == kind]
        shown = complete(events, thread)
        assert expected
        assert [event["name"] for event in shown] == [copy.value for copy in expected]
        assert [event["ts"] for event in shown] == pytest.approx(
            [copy.start_us for copy in expected], abs=1e-3
        )
    waits = [event for event in complete(events, OPS) if event["cat"] == "wait"]
    assert sum(event["dur"] for event in waits) == pytest.approx(timing.stall_us, abs=1e-2)
    host = [e["args"]["bytes"] for e in events if e["name"] == "bytes moved to host memory"]
    assert max(host) == replay(report.problem, report.plan.steps).host_peak_bytes


def test_graphs_are_processes(tmp_path: Path) -> None:
    assert {event["pid"] for event in events_of(planned(), moving())} == {0, 3}
    planned().save_trace(tmp_path / "step.json")
    assert json.loads((tmp_path / "step.json").read_text()) == chrome_trace([planned()])


def test_an_explanation_has_all_its_graphs(tmp_path: Path) -> None:
    model, x = seeded(lambda: Stack(2, broken=True), 64, 32)
    options = {"executor": "aot_eager", "op_times": "roofline"}
    found = fxremat.explain(model, x, options=options)
    assert len(found.graphs) == 2
    found.save_trace(tmp_path / "step.json")
    found.save_snapshot(tmp_path / "step.pickle")
    assert json.loads((tmp_path / "step.json").read_text()) == chrome_trace(found.graphs)
    written = pickle.loads((tmp_path / "step.pickle").read_bytes())
    assert written == memory_snapshot(found.graphs)

"""Reports: the front of peak against time, the Chrome trace, the snapshot, and their plans."""

from __future__ import annotations

import copy
import json
import pickle
import pickletools
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from torch.cuda import _memory_viz

import fxremat
from fxremat import planner
from fxremat.compile.report_builder import by_the_bytes_of
from fxremat.core.json_data import from_data, to_data
from fxremat.core.problem import Problem
from fxremat.core.timeline import Lifetime, replay
from fxremat.planner.local import greedy
from fxremat.planner.solvers import SolverOptions
from fxremat.report.exports import OPS, TO_DEVICE, TO_HOST, chrome_trace, memory_snapshot
from fxremat.report.front import Front, Point, front_of, together, undominated
from fxremat.report.page import page_of
from fxremat.report.report import Report, SourceLocation
from tests import strategies
from tests.chains import homogeneous, phased_chain
from tests.conftest import Golden
from tests.small import Stack, seeded
from tests.step_reports import (
    altered,
    check_trace_format,
    counted,
    moving,
    planned,
    replayed,
    storage_bytes,
)

# --- front --------------------------------------------------------------------------------

EAGER = {"executor": "aot_eager", "solver": "greedy"}  # `front` is that of greedy
MIB = 2**20
FRONT = Front(
    "small",
    (Point(10 * MIB, 100.0, 0.0), Point(8 * MIB, 110.0, 0.1), Point(5 * MIB, 150.0, 0.5)),
    base_time_us=100.0,
    store_all_peak_bytes=10 * MIB,
    budget_bytes=9 * MIB,
    peak_bound_bytes=4 * MIB,
)


def texts(picture: str, tag: str = "text") -> list[str]:
    """What every text, or every other element of a kind, of an SVG picture says."""
    elements = ElementTree.fromstring(picture).iter()
    return [element.text or "" for element in elements if element.tag.endswith("}" + tag)]


def test_front_text(golden: Golden) -> None:
    too_small = replace(FRONT, budget_bytes=4_500_000)
    golden(f"{FRONT}\n\n{too_small}\n\n{replace(FRONT, budget_bytes=None, points=())}")


def test_front_json_text(golden: Golden) -> None:
    golden(json.dumps(FRONT.to_json(), indent=1))


def test_within() -> None:
    assert FRONT.within(10 * MIB) == FRONT.points[0]
    assert FRONT.within(8 * MIB) == FRONT.points[1]
    assert FRONT.within(8 * MIB - 1) == FRONT.points[2]
    assert FRONT.within(5 * MIB - 1) is None


def test_the_picture_marks_the_budget_and_the_bound() -> None:
    picture = FRONT.picture()
    assert {"small", "peak, MiB", "added time, %"} <= {*texts(picture)}
    assert "budget: 9.00 MiB" in texts(picture)
    assert "proven least: 4.00 MiB" in texts(picture)
    assert len(texts(picture, "circle")) == 3
    assert picture.count('class="mark"') == 2
    bare = replace(FRONT, budget_bytes=None, peak_bound_bytes=None).picture()
    assert 'class="mark"' not in bare
    assert len(texts(bare, "circle")) == 3


@pytest.mark.parametrize("name", ["<a> & b", ""])
@pytest.mark.parametrize("points", [(), FRONT.points[:1], (Point(0, 0.0, 0.0),)])
def test_any_front_is_drawn(name: str, points: tuple[Point, ...]) -> None:
    """Also with one point or none, and a name that XML has to escape."""
    picture = Front(name, points, 0.0, 0, budget_bytes=3).picture()
    assert len(texts(picture, "circle")) == len(points)
    assert name in texts(picture)


@given(strategies.problems())
def test_the_front_of_the_planner(problem: Problem) -> None:
    front = front_of(problem, planner.front(problem))
    for fast, slow in pairwise(front.points):
        assert fast.peak_bytes > slow.peak_bytes
        assert fast.time_us < slow.time_us
        assert fast.added < slow.added
    assert front.points[0].added == pytest.approx(0.0)
    assert front.points[0].peak_bytes <= front.store_all_peak_bytes
    assert front.peak_bound_bytes is None or (front.peak_bound_bytes <= front.points[-1].peak_bytes)
    assert together([front]) == front
    json.dumps(front.to_json())
    ElementTree.fromstring(front.picture())


def test_dominated_points_are_left_out() -> None:
    a, b, c = Point(5, 2.0, 0.0), Point(5, 1.0, 0.0), Point(4, 3.0, 0.0)
    assert undominated([a, c, b, replace(c, time_us=4.0)]) == (b, c)


def test_held_bytes_lie_under_every_point() -> None:
    problem = phased_chain(8)
    plans = planner.front(problem)
    plain, held = front_of(problem, plans), front_of(problem, plans, held_bytes=100)
    assert [p.peak_bytes + 100 for p in plain.points] == [p.peak_bytes for p in held.points]
    assert held.store_all_peak_bytes == plain.store_all_peak_bytes + 100
    assert plain.peak_bound_bytes is not None
    assert held.peak_bound_bytes == plain.peak_bound_bytes + 100


def test_graphs_together() -> None:
    """The higher one decides the peak; times add up; no point is below what all can reach."""
    one = Front("one", (Point(10, 1.0, 0.0), Point(6, 2.0, 1.0)), 1.0, 10, 9, 3)
    other = Front("other", (Point(8, 4.0, 0.0), Point(7, 5.0, 0.25), Point(2, 9.0, 1.25)), 4.0, 8)
    both = together([one, other])
    assert [(p.peak_bytes, p.time_us) for p in both.points] == [(10, 5.0), (8, 6.0), (7, 7.0),
                                                                 (6, 11.0)]  # fmt: skip
    assert both.points[-1].added == pytest.approx(11 / 5 - 1)
    assert (both.name, both.budget_bytes, both.peak_bound_bytes) == ("one, other", 9, 3)
    assert both.store_all_peak_bytes == 10


def test_pareto_of_an_explanation() -> None:
    """Also of one that is read from JSON."""
    model, x = seeded(lambda: Stack(2), 512, 32)
    full = fxremat.explain(model, x, options=EAGER).store_all_peak_bytes
    options = {**EAGER, "variants": "none", "memory_budget": full * 9 // 10}
    explained = fxremat.explain(model, x, options=options)
    front = explained.pareto()
    assert front.budget_bytes == explained.graphs[0].budget_bytes
    assert front.store_all_peak_bytes == explained.store_all_peak_bytes
    assert front.points[-1].peak_bytes == explained.minimum_peak_bytes
    assert front.budget_bytes is not None
    chosen = front.within(front.budget_bytes)
    assert chosen is not None
    assert explained.plan is not None
    assert chosen.peak_bytes == explained.plan.peak_bytes
    assert chosen.added == pytest.approx(explained.time_overhead)
    assert "budget: " in front.picture()
    again = from_data(Report, json.loads(json.dumps(to_data(explained.graphs[0]))))
    assert again == explained.graphs[0]
    assert replace(explained, graphs=(again,)).pareto() == front


def test_pareto_where_nothing_was_planned() -> None:
    found = fxremat.explain(lambda x: x + 1, seeded(Stack, 4, 32)[1], options=EAGER)
    assert found.graphs == ()
    assert found.pareto().points == ()
    ElementTree.fromstring(found.pareto().picture())


# --- chrome trace -------------------------------------------------------------------------

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
    """Each has its place in the front, the trace, the snapshot and the page."""
    model, x = seeded(lambda: Stack(2, broken=True), 64, 32)
    found = fxremat.explain(model, x, options={**EAGER, "memory_budget": "8MiB"})
    assert len(found.graphs) == 2
    front = found.pareto()
    assert front.store_all_peak_bytes == found.store_all_peak_bytes
    assert front.points[-1].peak_bytes >= found.minimum_peak_bytes  # the others stay as they are
    found.save_trace(tmp_path / "step.json")
    found.save_snapshot(tmp_path / "step.pickle")
    found.save_page(tmp_path / "step.html", front)
    assert json.loads((tmp_path / "step.json").read_text()) == chrome_trace(found.graphs)
    written = pickle.loads((tmp_path / "step.pickle").read_bytes())
    assert written == memory_snapshot(found.graphs)
    assert (tmp_path / "step.html").read_text(encoding="utf-8") == page_of(found.graphs, front)


# --- snapshot -----------------------------------------------------------------------------

READ_BY_THE_VIEWER = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT",
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "NONE", "NEWTRUE", "NEWFALSE",
    "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_LIST", "APPEND", "APPENDS", "LIST", "EMPTY_DICT",
    "SETITEM", "SETITEMS", "DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip


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


# --- builder ------------------------------------------------------------------------------


def with_more_scratch(problem: Problem, nbytes: int) -> Problem:
    ops = (replace(op, workspace_bytes=op.workspace_bytes + nbytes) for op in problem.ops)
    return replace(problem, ops=tuple(ops))


def test_a_plan_that_was_made_by_more_bytes() -> None:
    problem = homogeneous(6)
    told = with_more_scratch(problem, 100)
    made = replace(greedy.solve(told, 0, SolverOptions()), peak_bound_bytes=10**9)
    reported = by_the_bytes_of(problem, made)
    assert reported.peak_bytes == replay(problem, made.steps).peak_bytes < made.peak_bytes
    assert reported.peak_bound_bytes is None
    assert replace(reported, peak_bytes=made.peak_bytes, peak_bound_bytes=10**9) == made


def test_a_plan_of_the_same_problem_stays_as_it_is() -> None:
    problem = homogeneous(6)
    plan = greedy.solve(problem, 0, SolverOptions())
    assert by_the_bytes_of(problem, plan) is plan

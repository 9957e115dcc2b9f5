"""The step as a page, and the files of the option report."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import fxremat
from fxremat.compile.session import reports
from fxremat.core.json_data import from_data
from fxremat.core.timeline import Lifetime
from fxremat.errors import InvalidOption
from fxremat.report.front import front_from_json
from fxremat.report.page import KINDS, OUTSIDE, page_data, page_of, title_of
from fxremat.report.report import Report
from tests.pages import EVIL, MIB, large_report, live_bytes, small_front, small_report
from tests.ranks import least_named
from tests.small import Stack, seeded
from tests.step_reports import altered, counted

pytestmark = pytest.mark.usefixtures("fresh")

EMBEDDED = re.compile(r'<script id="data" type="application/json">(.*?)</script>', re.DOTALL)


def embedded(page: str) -> Any:
    """The data of a page, as a browser reads it."""
    (found,) = EMBEDDED.findall(page)
    return json.loads(found)


def sums(graph: Any) -> list[int]:
    """What is live at each step, by the storages."""
    columns = [graph["storages"][column] for column in ("bytes", "start", "stop")]
    lifetimes = [Lifetime("", *row) for row in zip(*columns, strict=True)]
    return list(live_bytes(lifetimes, len(graph["timeline"])))


def kinds_of(report: Report) -> list[tuple[str, str]]:
    """The name of each storage, and what it is there for."""
    (graph,) = page_data([report])["graphs"]
    columns, names = graph["storages"], graph["names"]["name"]
    kinds = list(KINDS)
    return [(names[n], kinds[k]) for n, k in zip(columns["name"], columns["kind"], strict=True)]


# --- the data -----------------------------------------------------------------------------


@pytest.mark.parametrize("report", [small_report(), large_report(4)], ids=["small", "large"])
def test_storages_add_up_to_the_timeline(report: Report) -> None:
    (graph,) = embedded(page_of([report]))["graphs"]
    assert sums(graph) == graph["timeline"]
    assert max(graph["timeline"]) == report.predicted_peak_bytes
    assert graph["timeline"] == [nbytes + report.held_bytes for nbytes in report.timeline]


def test_what_each_storage_is_there_for() -> None:
    assert kinds_of(small_report()) == [
        (OUTSIDE, "outside"),
        ("primals_1", "resident"),
        ("mm", "saved"),
        ("gelu", "forward"),
        ("view_moved_on", "forward"),
        ("gelu", "scratch"),
        ("mm_1", "end"),
        ("gelu_recompute", "again"),
        ("to_device_view_moved_on_moved", "moved"),
        ("mm_2", "backward"),
        ("mm_3", "end"),
    ]


def test_a_storage_that_is_taken_over_by_a_gradient_was_saved() -> None:
    """It is there from the forward to the end, and is no result of the forward."""
    report = small_report()
    longer = [replace(x, stop=8) if x.value == "mm" else x for x in report.lifetimes]
    assert kinds_of(altered(report, lifetimes=tuple(longer)))[2] == ("mm", "saved")


def test_a_plan_has_one_name_for_all_copies_of_a_value() -> None:
    """Where no dry run was made, storages have the names of the problem."""
    report = small_report()
    named = {"gelu_recompute": "gelu", "to_device_view_moved_on_moved": "view_moved_on"}
    planned = [replace(one, value=named.get(one.value, one.value)) for one in report.lifetimes]
    kinds = kinds_of(altered(report, lifetimes=tuple(planned)))
    assert kinds[7:9] == [("gelu", "again"), ("view_moved_on", "moved")]


def test_what_is_known_of_a_name() -> None:
    names = page_data([small_report()])["graphs"][0]["names"]
    row = names["name"].index("gelu_recompute")
    assert (names["value"][row], names["again"][row], names["moves"][row]) == ("gelu", 1, 0)
    assert names["modules"][names["module"][row]] == "layers.0"
    assert (names["files"][names["file"][row]], names["line"][row]) == ("model.py", 8)
    moved = names["name"].index("to_device_view_moved_on_moved")
    assert (names["value"][moved], names["moves"][moved]) == ("view_moved_on", 1)
    unknown = page_data([altered(small_report(), locations={})])["graphs"][0]["names"]
    assert sum(unknown["known"]) == 1  # what is held outside


def test_a_report_without_lifetimes() -> None:
    """As it is kept by an older version: the lines are there."""
    report = altered(small_report(), lifetimes=(), computed=(), locations={}, held_bytes=0)
    (graph,) = page_data([report])["graphs"]
    assert graph["storages"]["name"] == []
    assert graph["timeline"] == list(report.timeline)


# --- the text -----------------------------------------------------------------------------


def test_names_never_become_html() -> None:
    page = page_of([small_report()])
    assert EVIL in embedded(page)["graphs"][0]["names"]["modules"]
    assert "<img" not in page
    assert page.count("</script>") == 2


def test_a_name_that_looks_like_a_hole_of_the_page() -> None:
    report, module = small_report(), "{{script}}"
    locations = {
        key: replace(location, module=module) for key, location in report.step.locations.items()
    }
    page = page_of([altered(report, locations=locations)])
    assert module in embedded(page)["graphs"][0]["names"]["modules"]


def test_a_page_needs_no_network() -> None:
    page = page_of([small_report()], small_front())
    assert "default-src 'none'" in page
    addresses = set(re.findall(r"https?://[^\s\"']+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of SVG, which nobody fetches
    assert not re.search(r"<link|<script[^>]+src=|@import|url\(", page)


def test_a_page_of_two_thousand_steps_is_under_a_megabyte() -> None:
    report = large_report(100)
    assert len(report.timeline) >= 2000
    assert len(page_of([report]).encode()) < 10**6


def test_the_title_tells_the_graph_with_the_highest_peak() -> None:
    low = altered(small_report(1), predicted_peak_bytes=MIB)
    title = "fxremat: budget 12.00 MiB, peak 10.50 MiB, store-all 12.50 MiB, +6.2% time"
    assert title_of([low, small_report()]) == title
    assert f"<title>{title}</title>" in page_of([low, small_report()])
    assert "no budget" in title_of([altered(low, budget_bytes=None)])
    assert title_of([]) == "fxremat: no graph with a backward"


def test_graphs_and_front() -> None:
    data = embedded(page_of([small_report(), small_report(3)], small_front()))
    assert [graph["graph"] for graph in data["graphs"]] == [0, 3]
    assert front_from_json(data["front"]) == small_front()
    assert embedded(page_of([]))["graphs"] == []
    assert embedded(page_of([]))["front"] is None


# --- of a compiled step --------------------------------------------------------------------


def test_the_page_of_what_inductor_will_run() -> None:
    report = counted()
    (graph,) = embedded(page_of([report]))["graphs"]
    assert sums(graph) == graph["timeline"]
    assert max(graph["timeline"]) == report.predicted_peak_bytes
    assert 0 < graph["forward_steps"] < len(graph["timeline"])
    assert 0 < graph["store_all_forward_steps"] < len(graph["store_all_timeline"])
    assert max(graph["store_all_timeline"]) == report.store_all_peak_bytes


def test_copies_are_known_as_copies() -> None:
    """Those of values that are computed again; each is a copy of a value of the problem."""
    report = counted()
    again = {p.value for p in report.step.locations.values() if p.copy == "again"}
    assert again <= set(report.problem.bytes_of) | {op.name for op in report.problem.ops}
    assert again
    assert report.recomputed


# --- files --------------------------------------------------------------------------------

EAGER = {"executor": "aot_eager"}
FILES = [
    "graph_0.html",
    *(f"graph_0.{kind}.json" for kind in ("plan", "problem", "report")),
    "graph_0.snapshot.pickle",
    "graph_0.trace.json",
]


def compiled(folder: object, **more: Any) -> tuple[Callable[..., Any], torch.Tensor]:
    model, x = seeded(Stack, 64, 32)
    options: Any = {**EAGER, "report": folder, **more}
    return torch.compile(model, backend="fxremat", options=options), x


def test_files_of_a_compiled_graph(tmp_path: Path, run: Callable[..., Any]) -> None:
    folder = tmp_path / "new" / "folder"
    model, x = compiled(folder, memory_budget="8MiB")
    model(x).sum().backward()
    assert sorted(p.name for p in folder.iterdir()) == FILES
    written = written_report(folder)
    assert written == reports()[-1]
    assert (folder / "graph_0.html").read_text(encoding="utf-8") == page_of([written])
    _, checked, _ = run("check", folder / "graph_0.problem.json", folder / "graph_0.plan.json")
    assert f"{written.plan.peak_bytes:,}" in checked


def written_report(folder: Path, graph: int = 0) -> Report:
    return from_data(Report, json.loads((folder / f"graph_{graph}.report.json").read_text()))


def test_a_refused_budget_has_files(tmp_path: Path) -> None:
    model, x = compiled(tmp_path, memory_budget="1MiB", reserve="1000KiB")
    with pytest.raises(BackendCompilerFailed, match="cannot be trained") as refused:
        model(x)
    written = written_report(tmp_path)
    assert written.predicted_peak_bytes == least_named(refused.value)
    assert written.budget_bytes == 2**20


def test_every_graph_has_files(tmp_path: Path) -> None:
    model, x = seeded(lambda: Stack(broken=True), 64, 32)
    options: Any = {**EAGER, "report": tmp_path}
    torch.compile(model, backend="fxremat", options=options)(x).sum().backward()
    assert [written_report(tmp_path, n) for n in (0, 1)] == list(reports())


@pytest.mark.parametrize("broken", [False, True])
def test_explain_writes_too(broken: bool, tmp_path: Path) -> None:
    model, x = seeded(lambda: Stack(broken=broken), 64, 32)
    found = fxremat.explain(model, x, options={**EAGER, "report": tmp_path})
    assert found.minimum_peak_bytes > 0  # planned with other budgets, which leave the files alone
    assert tuple(written_report(tmp_path, n) for n in range(1 + broken)) == found.graphs


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model, x = compiled(tmp_path / "file")
    with pytest.raises(Exception, match="a folder that can be created") as failure:
        model(x)
    assert isinstance(getattr(failure.value, "inner_exception", failure.value), InvalidOption)


def test_a_disk_that_is_full_later_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    model, x = compiled(tmp_path)
    model(x).sum().backward()
    assert "could not be written" in caplog.text

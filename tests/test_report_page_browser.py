"""The page in a real browser: what it shows and finds, with pointer and keys. ``make test-pages``.

``PAGE_PICTURES`` is a folder for pictures of what was seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

import fxremat
from benchmarks.explaining import CONFIGS
from benchmarks.models import find_config
from fxremat.report.exports import chrome_trace, memory_snapshot
from fxremat.report.front import Front
from fxremat.report.page import page_of
from fxremat.report.report import Report
from tests.browser import Tab, opened
from tests.pages import EVIL, MIB, large_report, small_front, small_report
from tests.step_reports import altered, check_trace_format, replayed, storage_bytes

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
MODELS = {"gpt": CONFIGS["gpt"], "unet": find_config("unet"), "llama32": CONFIGS["llama32"]}


@pytest.fixture
def page(tmp_path: Path) -> Open:
    """Opens the page of reports, and looks for complaints when it is closed."""

    @contextmanager
    def open_page(
        *reports: Report, front: Front | None = None, fragment: str = "", dark: bool = False
    ) -> Iterator[Tab]:
        path = tmp_path / "step.html"
        path.write_text(page_of(reports, front), encoding="utf-8")
        with opened(path, tmp_path / "profile", fragment=fragment, dark=dark) as tab:
            yield tab
            tab.settle()
            assert tab.complaints() == []

    return open_page


def keep_picture(tab: Tab, name: str) -> None:
    folder = os.environ.get("PAGE_PICTURES")
    if folder:
        tab.picture(Path(folder) / f"{name}.png")


def text_of(tab: Tab, selector: str) -> str:
    return str(tab.evaluate(f"document.querySelector({selector!r}).innerText"))


def place_of(tab: Tab, step: int, name: str) -> tuple[float, float]:
    """Where in the window a storage is seen at a step."""
    found = tab.evaluate(
        f"""(() => {{
          const {{ graph, timeline }} = page, {{ owner, width, height }} = timeline.painted;
          const area = timeline.area, box = timeline.over.getBoundingClientRect();
          const column = Math.floor((area.x({step} + 0.5) - area.left) / area.width * width);
          const rows = [];
          for (let row = 0; row < height; row++) {{
            const one = owner[row * width + column];
            if (one >= 0 && graph.names.name[graph.name[one]] === {name!r}) rows.push(row);
          }}
          const row = rows[Math.floor(rows.length / 2)];
          return [box.left + area.x({step} + 0.5), box.top + area.top + row / height * area.height];
        }})()"""
    )
    return float(found[0]), float(found[1])


def view_of(tab: Tab) -> dict[str, float]:
    return dict(tab.evaluate("page.view"))


def test_hovering_tells_about_a_storage(page: Open) -> None:
    with page(small_report()) as tab:
        tab.point(*place_of(tab, 5, "gelu_recompute"))
        tip = text_of(tab, "#tip")
        for said in ("gelu_recompute", "recomputed", "Copy of", "layers.0", "model.py:8",
                     "1.00 MiB (1,048,576)", "steps 5 to 6 (2 of 8)", "1 time",
                     "Step 5, gelu: 9.00 MiB live"):  # fmt: skip
            assert said in tip
        tab.point(5, 5)
        assert tab.evaluate("document.querySelector('#tip').hidden")


def test_a_budget_far_above_is_told_in_words(page: Open) -> None:
    """The picture would be flat if it reached there."""
    with page(altered(small_report(), budget_bytes=100 * MIB)) as tab:
        assert "budget, 100.00 MiB: above" in text_of(tab, "#legend")
        assert view_of(tab)["high"] < 20 * MIB


def test_a_name_that_is_html_is_shown_as_text(page: Open) -> None:
    with page(small_report()) as tab:
        tab.point(*place_of(tab, 2, "view_moved_on"))
        assert EVIL in text_of(tab, "#tip")
        assert tab.evaluate("document.querySelectorAll('img').length") == 0


def test_figures_and_peak(page: Open) -> None:
    with page(small_report()) as tab:
        figures = text_of(tab, "#figures")
        for said in ("12.00 MiB", "10.50 MiB", "87.5 % of the budget", "+6.3 %", "12.50 MiB"):
            assert said in figures
        assert text_of(tab, "#live-title") == "Live at the peak, step 7: 10.50 MiB"
        live = text_of(tab, "#live").splitlines()
        names = [one for one in live if one.startswith(("prim", "mm"))]
        assert names == ["mm_3", "primals_1", "mm_1"]


def test_finding_by_module_and_source(page: Open) -> None:
    with page(small_report()) as tab:
        tab.evaluate("document.querySelector('#find').focus()")
        for key in "model.py:8":
            tab.press(key)
        assert "3 of 11 storages" in text_of(tab, "#found")
        assert text_of(tab, "#table-title") == "3 of 11 storages"
        assert tab.evaluate("page.table.rows.items.length") == 3


def test_the_address_brings_a_view_back(page: Open) -> None:
    fragment = "graph=1&find=mm&from=2&to=7&name=mm_1"
    with page(small_report(), small_report(1), fragment=fragment) as tab:
        assert tab.evaluate("page.graph.raw.graph") == 1
        assert (view_of(tab)["from"], view_of(tab)["to"]) == (2, 7)
        assert text_of(tab, "#selected .name") == "mm_1"
        assert "find=mm" in tab.evaluate("location.hash")


def test_several_graphs(page: Open) -> None:
    with page(small_report(), small_report(1)) as tab:
        assert tab.evaluate("document.querySelectorAll('#graph option').length") == 2
        tab.evaluate(
            "(() => { const s = document.querySelector('#graph'); s.value = '1';"
            "s.dispatchEvent(new Event('change')); })()"
        )
        assert text_of(tab, "#graph-name").startswith("graph 1")


def test_zoom_and_back(page: Open) -> None:
    with page(large_report(40)) as tab:
        whole = view_of(tab)
        x, y = 700, tab.evaluate("page.timeline.over.getBoundingClientRect().top + 200")
        tab.point(x, y, "mouseWheel", deltaX=0, deltaY=-300)
        nearer = view_of(tab)
        assert nearer["to"] - nearer["from"] < whole["to"] - whole["from"]
        assert nearer["high"] == whole["high"]
        tab.point(x, y, "mousePressed", button="left", clickCount=1)
        tab.point(x + 100, y, "mouseMoved", button="left", buttons=1)
        tab.point(x + 100, y, "mouseReleased", button="left", clickCount=1)
        stretch = view_of(tab)
        width = tab.evaluate("page.timeline.area.width")
        part = (nearer["to"] - nearer["from"]) * 100 / width
        assert stretch["to"] - stretch["from"] == pytest.approx(max(part, 4), rel=0.05)
        tab.evaluate("document.querySelector('#all').click()")
        tab.settle()
        assert view_of(tab) == whole


def test_with_keys_alone(page: Open) -> None:
    with page(small_report()) as tab:
        tab.evaluate("page.timeline.over.focus()")
        tab.press("p")
        tab.press("0")
        tab.press("ArrowUp")
        assert "held outside of the graph" in text_of(tab, "#tip")
        tab.press("ArrowUp")
        assert "primals_1" in tab.evaluate("document.querySelector('#said').textContent")
        tab.press("Enter")
        assert text_of(tab, "#selected .name") == "primals_1"
        tab.press("+")
        assert view_of(tab)["to"] - view_of(tab)["from"] < 8
        tab.press("Escape")
        assert "Click a storage" in text_of(tab, "#selected")


def test_clicking_in_a_list_selects(page: Open) -> None:
    with page(small_report(), front=small_front()) as tab:
        tab.evaluate("document.querySelector('#live .row').click()")
        tab.settle()
        assert text_of(tab, "#selected .name") == "mm_3"
        assert tab.evaluate("document.querySelectorAll('#table .row.selected').length") == 1
        assert tab.evaluate("document.querySelectorAll('#front circle').length") == 4
        front = "document.querySelector('#front').textContent"
        assert "budget 10.00 MiB" in tab.evaluate(front)
        keep_picture(tab, "small")


def test_the_table_is_sorted(page: Open) -> None:
    with page(small_report()) as tab:
        names = "page.table.rows.items.map(i => page.graph.names.name[page.graph.name[i]])"
        assert tab.evaluate(names)[:2] == ["mm_3", "primals_1"]
        tab.evaluate("page.table.sortBy(0)")
        assert tab.evaluate(names)[0] == "gelu"
        tab.evaluate("page.table.sortBy(0)")
        assert tab.evaluate(names)[0] == "view_moved_on"
        marked = "document.querySelector('#table [aria-sort]').getAttribute('aria-sort')"
        assert tab.evaluate(marked) == "descending"


def test_dark_and_light(page: Open) -> None:
    with page(small_report(), dark=True) as tab:
        colour = "getComputedStyle(document.body).backgroundColor"
        dark = tab.evaluate(colour)
        keep_picture(tab, "small_dark")
        tab.evaluate("document.querySelector('#theme').click()")
        tab.settle()
        assert tab.evaluate(colour) != dark
        assert text_of(tab, "#theme") == "Dark"


def test_twenty_thousand_storages_are_fast(page: Open) -> None:
    """A tenth of a second is felt as at once; the machine may be slow."""
    with page(large_report(500)) as tab:
        assert tab.evaluate("page.graph.count") > 20_000
        assert tab.evaluate("document.querySelectorAll('.row').length") < 100
        for act in ("page.timeline.draw()", "page.table.put()", "page.table.sortBy(0)",
                    "page.table.rows.draw()"):  # fmt: skip
            timed = f"const t = performance.now(); {act}; return performance.now() - t"
            assert tab.evaluate(f"(() => {{ {timed} }})()") < 500, act
        keep_picture(tab, "large")
        tab.evaluate("page.showPeak()")
        tab.settle()
        keep_picture(tab, "large_peak")


def test_a_step_without_graphs(page: Open) -> None:
    with page() as tab:
        assert "nothing to show" in text_of(tab, "#nothing")


@pytest.mark.parametrize("name", MODELS)
def test_files_of_a_model(
    name: str, page: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page, the snapshot and the trace that `explain` makes of a whole model."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    config = MODELS[name]
    model = config.network(**config.arguments)
    batch = model.sample(config.batch, torch.Generator().manual_seed(0))
    whole = fxremat.explain(model, *batch).store_all_peak_bytes
    [report] = fxremat.explain(model, *batch, memory_budget=whole * 6 // 10).graphs
    for dark in (False, True):
        with page(report, dark=dark) as tab:
            tab.settle()
            assert tab.evaluate("page.graph.count") == len(report.lifetimes)
            tab.evaluate("page.showPeak()")
            tab.settle()
            keep_picture(tab, f"{name}{'_dark' if dark else ''}")
    snapshot = memory_snapshot([report])
    assert max(replayed(snapshot["device_traces"][0])[0]) == max(storage_bytes(report))
    assert "memory" in _memory_viz.trace_plot(snapshot).lower()  # type: ignore[no-untyped-call]
    events = chrome_trace([report])["traceEvents"]
    check_trace_format(events)
    counted = [e["args"]["bytes"] for e in events if e["name"] == "bytes on the device"]
    assert max(counted) == report.plan.peak_bytes

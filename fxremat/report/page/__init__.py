"""The step as a page: one file of HTML that shows the memory of a step, without a network.

Text, style, scripts and data are put together here. Names come from the user's code, so they never
become HTML: the data is JSON in a script that is not run, with every ``<`` escaped, and the scripts
of the page put names in as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from fxremat.report.front import Front
from fxremat.report.page.data import page_data
from fxremat.report.report import Report
from fxremat.sizes import format_bytes

SCRIPTS = (
    "format.js", "graph.js", "painting.js", "axes.js", "timeline.js", "overview.js", "table.js",
    "lists.js", "front.js", "page.js",
)  # fmt: skip
"""The scripts in their order in the page: each uses those before it."""

_HOLE = re.compile(r"\{\{(\w+)\}\}")


def page_of(reports: Sequence[Report], front: Front | None = None) -> str:
    """The page of one step as HTML text; each report is one of its graphs."""
    parts = {
        "title": escape(title_of(reports)),
        "style": _file("page.css"),
        "data": json_in_html(page_data(reports, front)),
        "script": "\n".join(map(_file, SCRIPTS)),
    }
    return _HOLE.sub(lambda hole: parts[hole[1]], _file("page.html"))


def write_page(path: str | Path, reports: Sequence[Report], front: Front | None = None) -> None:
    """Write the page of these graphs into a file."""
    Path(path).write_text(page_of(reports, front), encoding="utf-8")


def title_of(reports: Sequence[Report]) -> str:
    """What was decided for the graph with the highest peak, in one line."""
    if not reports:
        return "fxremat: no graph with a backward"
    top = max(reports, key=lambda report: report.counted_peak_bytes)
    peak, plain = map(format_bytes, (top.counted_peak_bytes, top.keep_all_peak_bytes))
    budget = top.budget_bytes
    within = "no budget" if budget is None else f"budget {format_bytes(budget)}"
    return f"fxremat: {within}, peak {peak}, store-all {plain}, {top.time_overhead:+.1%} time"


def json_in_html(data: Any) -> str:
    """JSON that neither ends a script nor starts a comment, whatever its texts are."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")

"""The step as a page: one file of HTML that shows the memory of a step, without a network.

Text, style, scripts and data are put together here. Names come from the user's code, so they never
become HTML: the data is JSON in a script that is not run, with every ``<`` escaped, and the scripts
of the page put names in as text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from fxremat.core.timeline import Lifetime
from fxremat.report.front import Front
from fxremat.report.report import Report, SourceLocation
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
    peak, plain = map(format_bytes, (top.counted_peak_bytes, top.store_all_peak_bytes))
    budget = top.budget_bytes
    within = "no budget" if budget is None else f"budget {format_bytes(budget)}"
    return f"fxremat: {within}, peak {peak}, store-all {plain}, {top.time_overhead:+.1%} time"


def json_in_html(data: Any) -> str:
    """JSON that neither ends a script nor starts a comment, whatever its texts are."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


FORMAT = "fxremat-page/1"
OUTSIDE = "held outside of the graph"

KINDS = {
    "outside": OUTSIDE,
    "resident": "resident: there throughout",
    "saved": "saved for the backward",
    "forward": "in the forward only",
    "again": "recomputed",
    "moved": "back from host memory",
    "backward": "in the backward only",
    "end": "result: kept to the end",
    "scratch": "scratch memory of a call",
}
"""What a storage is there for, and the words for it, in the order of the legend."""

_FIGURES = (
    "graph", "nodes", "count", "order", "budget_bytes", "held_bytes", "resident_bytes",
    "planned_peak_bytes", "predicted_peak_bytes", "predicted_reserved_bytes", "counted_peak_bytes",
    "store_all_peak_bytes", "minimum_peak_bytes", "time_overhead", "recomputed_bytes",
    "moved_bytes", "saved_bytes",
)  # fmt: skip
"""Attributes of the report that the page shows as they are."""


def page_data(reports: Sequence[Report], front: Front | None = None) -> dict[str, Any]:
    """The data of the page of one step."""
    return {
        "format": FORMAT,
        "kinds": [{"key": key, "text": text} for key, text in KINDS.items()],
        "graphs": [_graph(report) for report in reports],
        "front": None if front is None else front.to_json(),
    }


def _graph(report: Report) -> dict[str, Any]:
    kinds, held, step = list(KINDS), report.held_bytes, report.step
    lifetimes = list(step.lifetimes)
    if held:
        lifetimes.insert(0, Lifetime(OUTSIDE, held, 0, len(step.live_bytes)))
    names = sorted({one.value for one in lifetimes} | {*step.computed} - {""})
    number = {name: index for index, name in enumerate(names)}
    return {
        **{key: getattr(report, key) for key in _FIGURES},
        "name": report.problem.name,
        "solver": report.plan.solver,
        "runs_again": sum(row.times for row in report.recomputed),
        "moves": sum(row.times for row in report.moved),
        "variants": [asdict(row) for row in report.variants],
        "timeline": [nbytes + held for nbytes in step.live_bytes],
        "forward_steps": step.forward_steps,
        "store_all_timeline": [nbytes + held for nbytes in step.store_all_live_bytes],
        "store_all_forward_steps": step.store_all_forward_steps,
        "computed": [number.get(name, -1) for name in step.computed],
        "names": _names(report, names),
        "storages": {
            "name": [number[one.value] for one in lifetimes],
            "kind": [kinds.index(kind) for kind in _kinds(report, lifetimes)],
            "bytes": [one.nbytes for one in lifetimes],
            "start": [one.start for one in lifetimes],
            "stop": [one.stop for one in lifetimes],
        },
    }


def _names(report: Report, names: Sequence[str]) -> dict[str, Any]:
    """The module, line and value of each name, and how often the value is recomputed or moved."""
    problem, repeats = report.problem, report.plan.repeats()
    again = {value: repeats[op.name] for op in problem.ops for value in op.writes}
    moves = Counter(move.value for move in report.plan.moves if move.kind == "to device")
    known = report.step.locations
    locations = [known.get(name, SourceLocation()) for name in names]
    values = [location.value or name for name, location in zip(names, locations, strict=True)]
    modules, files = _numbered(p.module for p in locations), _numbered(p.file for p in locations)
    return {
        "name": list(names),
        "value": values,
        "known": [int(name in known or name == OUTSIDE) for name in names],
        "again": [again.get(value, 0) for value in values],
        "moves": [moves[value] for value in values],
        "line": [location.line for location in locations],
        "module": [modules[location.module] for location in locations],
        "file": [files[location.file] for location in locations],
        "modules": list(modules),
        "files": list(files),
    }


def _numbered(texts: Iterable[str]) -> dict[str, int]:
    return {text: index for index, text in enumerate(dict.fromkeys(texts))}


def _kinds(report: Report, lifetimes: Sequence[Lifetime]) -> Iterator[str]:
    """The kind of each storage: of several that fit, the most specific one."""
    locations = report.step.locations
    border, end = report.step.forward_steps, len(report.timeline)
    results = set(report.problem.outputs)
    resident, until = set(report.problem.resident), dict[str, int]()
    repeats = report.plan.repeats()
    again = {value for op in report.problem.ops if repeats[op.name] for value in op.writes}
    moved = {move.value for move in report.plan.moves}
    for one in lifetimes:
        location = locations.get(one.value, SourceLocation())
        copy, value = location.copy, location.value or one.value
        if not copy and one.start >= until.get(one.value, end):  # by the plan: one name for copies
            copy = "again" if one.value in again else "moved" if one.value in moved else ""
        if one.value == OUTSIDE:
            yield "outside"
        elif one.workspace:
            yield "scratch"
        elif one.start == 0 and one.stop == end and one.value in resident:
            yield "resident"
        elif copy:
            yield copy
        elif one.stop == end and (one.start >= border or value in results):
            yield "end"
        elif one.start >= border:
            yield "backward"
        else:
            yield "saved" if one.stop > border else "forward"
        if not one.workspace:
            until[one.value] = one.stop

"""What the page shows of a report, as JSON data in columns. What is held outside is included.

A name stands once, with its module and source line; a storage refers to it by its number. What is
live at a step adds up to the ``timeline`` there, except as `lifetimes_of` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from fxremat.core.timeline import Lifetime
from fxremat.report.front import Front
from fxremat.report.report import Report
from fxremat.report.source_location import SourceLocation

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
    "keep_all_peak_bytes", "minimum_peak_bytes", "time_overhead", "recomputed_bytes", "moved_bytes",
    "saved_bytes",
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
        "keep_all_timeline": [nbytes + held for nbytes in step.keep_all_live_bytes],
        "keep_all_forward_steps": step.keep_all_forward_steps,
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
    """The distinct texts, each with its number."""
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

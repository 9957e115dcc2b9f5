"""The option ``report``: a folder with files of what was decided for each graph.

Graph n of the compilation gives ``graph_n.report.json`` (the whole report: timeline, rows, seconds,
plan and problem), ``graph_n.problem.json`` and ``graph_n.plan.json``, which ``python -m fxremat
check``, ``solve`` and ``pareto`` read, and ``graph_n.html``, a page that shows the memory of the
step. ``graph_n.trace.json`` is for ui.perfetto.dev, and ``graph_n.snapshot.pickle`` for
pytorch.org/memory_viz. A later compilation into the same folder writes over them.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from fxremat.core.json_data import to_data
from fxremat.core.plan import plan_to_json
from fxremat.core.problem import problem_to_json
from fxremat.errors import InvalidOption
from fxremat.report.page import write_page
from fxremat.report.report import Report

log = logging.getLogger(__name__)


def prepare_folder(path: str) -> None:
    """Make the folder before anything is planned; raises `InvalidOption` where it cannot be."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        expected = f"a folder that can be created ({error.strerror})"
        raise InvalidOption("report", path, expected) from error
    if not os.access(path, os.W_OK):
        raise InvalidOption("report", path, "a folder that can be written to")


def write_report(path: str, report: Report) -> None:
    """Write the files of one graph; a failure is a warning in the log, and the model compiles."""
    files: dict[str, dict[str, Any]] = {
        "problem": problem_to_json(report.problem),
        "plan": plan_to_json(report.plan),
        "report": to_data(report),
    }
    try:
        for name, data in files.items():
            target = Path(path) / f"graph_{report.graph}.{name}.json"
            target.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        report.save_trace(Path(path) / f"graph_{report.graph}.trace.json")
        report.save_snapshot(Path(path) / f"graph_{report.graph}.snapshot.pickle")
        write_page(Path(path) / f"graph_{report.graph}.html", [report])
    except OSError as error:
        log.warning("the report of graph %d could not be written: %s", report.graph, error)

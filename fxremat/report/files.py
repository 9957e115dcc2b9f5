"""Where reports go: the folder of the option ``report``, and torch's logs and trace.

Graph n of the compilation gives ``graph_n.report.json`` (the whole report: timeline, rows, seconds,
plan and problem), ``graph_n.problem.json`` and ``graph_n.plan.json``, which ``python -m fxremat
check``, ``solve`` and ``pareto`` read, and ``graph_n.html``, a page that shows the memory of the
step. ``graph_n.trace.json`` is for ui.perfetto.dev, and ``graph_n.snapshot.pickle`` for
pytorch.org/memory_viz. A later compilation into the same folder writes over them.

``TORCH_LOGS="fxremat,fxremat_plan"`` shows the report of each graph, ``fxremat_graph`` what the
compiler is given. With ``TORCH_TRACE`` each graph has files in the pages that tlparse makes.
Without these variables nothing is made.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import fx

from fxremat.compat.logs import GRAPH_LOG, PLAN_LOG, artifact_logger, trace_artifact
from fxremat.core.json_data import to_data
from fxremat.core.problem import problem_to_json
from fxremat.errors import InvalidOption
from fxremat.report.exports import chrome_trace
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
        "plan": to_data(report.plan),
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
        log.warning("fxremat: the report of graph %d could not be written: %s", report.graph, error)


plan_log = artifact_logger(PLAN_LOG)
graph_log = artifact_logger(GRAPH_LOG)


def tell_report(report: Report) -> None:
    """Log the report, its plan and problem, and the trace of the planned step."""
    plan_log.debug("%s", report)
    name = f"fxremat_graph_{report.graph}"
    trace_artifact(f"{name}_report", "string", lambda: str(report))
    trace_artifact(f"{name}_plan", "json", lambda: to_data(report.plan))
    trace_artifact(f"{name}_problem", "json", lambda: problem_to_json(report.problem))
    trace_artifact(f"{name}_timeline", "json", lambda: chrome_trace([report]))


def tell_halves(graph: int, halves: Iterable[fx.GraphModule]) -> None:
    """Log the code of forward and backward as they are compiled."""
    if not graph_log.isEnabledFor(logging.DEBUG):
        return
    for name, module in zip(("forward", "backward"), halves, strict=True):
        code = module.print_readable(print_output=False)
        graph_log.debug("graph %d, %s:\n%s", graph, name, code)

"""What was decided, in torch's own logs and trace.

``TORCH_LOGS="fxremat,fxremat_plan"`` shows the report of each graph, ``fxremat_graph`` what the
compiler is given. With ``TORCH_TRACE`` each graph has files in the pages that tlparse makes.
Without these variables nothing is made.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import fx

from fxremat.compat.logs import GRAPH_LOG, PLAN_LOG, artifact_logger, trace_artifact
from fxremat.core.plan import plan_to_json
from fxremat.core.problem import problem_to_json
from fxremat.report.chrome_trace import chrome_trace
from fxremat.report.report import Report

plan_log = artifact_logger(PLAN_LOG)
graph_log = artifact_logger(GRAPH_LOG)


def tell_report(report: Report) -> None:
    """Log the report, its plan and problem, and the trace of the planned step."""
    plan_log.debug("%s", report)
    name = f"fxremat_graph_{report.graph}"
    trace_artifact(f"{name}_report", "string", lambda: str(report))
    trace_artifact(f"{name}_plan", "json", lambda: plan_to_json(report.plan))
    trace_artifact(f"{name}_problem", "json", lambda: problem_to_json(report.problem))
    trace_artifact(f"{name}_timeline", "json", lambda: chrome_trace([report]))


def tell_halves(graph: int, halves: Iterable[fx.GraphModule]) -> None:
    """Log the code of forward and backward as they are compiled."""
    if not graph_log.isEnabledFor(logging.DEBUG):
        return
    for name, module in zip(("forward", "backward"), halves, strict=True):
        code = module.print_readable(print_output=False)
        graph_log.debug("graph %d, %s:\n%s", graph, name, code)

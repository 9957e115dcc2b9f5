"""torch's logs and its trace of compilations, in which fxremat has names of its own.

torch reads ``TORCH_LOGS`` at the end of its own import, and refuses a name that it does not know.
A name of a package has it import all packages in that one, this one too: a name of ours that
stands behind ``fxremat`` is known when torch comes to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch._logging import _internal as torch_logs

PLAN_LOG, GRAPH_LOG = "fxremat_plan", "fxremat_graph"
"""Artifacts: what is shown where it is asked for by this name."""

# With "+fxremat" alone they stay off: it shows a line for each graph, and what the passes do.
for name, what in (
    (PLAN_LOG, "The report of each graph that fxremat plans"),
    (GRAPH_LOG, "Forward and backward that fxremat gives to the compiler"),
):
    torch_logs.register_artifact(name, what, visible=True, off_by_default=True)
torch_logs.register_log("fxremat", "fxremat")


def artifact_logger(name: str) -> logging.Logger:
    """The logger of an artifact; it shows what is logged with ``debug`` where that is asked for."""
    logger: logging.Logger = torch_logs.getArtifactLogger("fxremat", name)
    return logger


def trace_artifact(name: str, encoding: str, payload: Callable[[], object]) -> None:
    """Put something beside the graph that is being compiled, where torch writes a trace.

    ``encoding`` is "string" or "json". Elsewhere ``payload`` is not called.
    """
    torch_logs.trace_structured_artifact(name, encoding, payload)

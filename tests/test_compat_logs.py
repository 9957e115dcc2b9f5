"""Names of ours in torch's logs, and what torch's trace of a compilation is given."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch._logging import _internal as torch_logs

from fxremat.compat.logs import GRAPH_LOG, PLAN_LOG, artifact_logger, trace_artifact


@pytest.mark.parametrize("name", [PLAN_LOG, GRAPH_LOG])
def test_artifact_logger(name: str) -> None:
    logger = artifact_logger(name)
    assert logger.name == f"fxremat.__{name}"
    known: Any = torch_logs.log_registry
    assert known.is_artifact(name)
    assert known.is_off_by_default(name)
    assert known.is_log("fxremat")
    assert not logger.propagate  # nobody has asked for it


def test_trace_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is to hold is made only where a trace is written."""
    written: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "artifact" in record.__dict__["metadata"]:  # others are parts of a call stack
                written.append(record)

    def never() -> object:
        raise AssertionError

    monkeypatch.setattr(torch_logs.trace_log, "handlers", [])
    trace_artifact("one", "json", never)
    monkeypatch.setattr(torch_logs.trace_log, "handlers", [Handler()])
    trace_artifact("two", "json", lambda: {"three": 4})
    (record,) = written
    metadata, payload = record.__dict__["metadata"], record.__dict__["payload"]
    assert metadata["artifact"] == {"name": "two", "encoding": "json"}
    assert payload.split() == ["{", '"three":', "4", "}"]

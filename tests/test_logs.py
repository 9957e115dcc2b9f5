"""What is logged, shown on a terminal and counted, and what an interrupt does."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import highspy
import pytest
import torch

import fxremat
from fxremat.compile import stage_times
from fxremat.compile.stage_times import CLEAR, StageTimes
from fxremat.core.plan import claim_from_json
from fxremat.core.problem import problem_from_json
from fxremat.core.timeline import replay
from fxremat.memory.measured_peak import MeasuredPeak
from fxremat.planner import SolverOptions, solve
from fxremat.planner.deadline import Deadline
from fxremat.planner.milp.highs import Milp
from fxremat.sizes import GIB
from tests.chains import blocks
from tests.step_reports import Terminal, altered, moving, planned

ROOT = Path(__file__).parent.parent
PROGRAM = """
{imports}
from tests.small import Stack, seeded

model, x = seeded(lambda: Stack(2), 64, 32)
options = {{"executor": "aot_eager", "memory_budget": "8MiB", "op_times": "roofline"}}
torch.compile(model, backend="fxremat", options=options)(x).backward()
"""


def run(logs: str, imports: str = "import torch", **environment: str) -> list[str]:
    """What a training step writes to standard error, but for what others write there."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(imports=imports)],
        env={**os.environ, "TORCH_LOGS": logs, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    ours = re.compile(r"[ /]fxremat/(\w+/)*\w+\.py:\d+\] ")
    return [line for line in done.stderr.splitlines() if ours.search(line)]


def artifacts(folder: Path) -> dict[str, str]:
    """The artifacts in the file that torch writes, by name: a line of JSON, then indented lines."""
    (file,) = folder.glob("dedicated_log_torch_trace_*.log")
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("\t"):
            lines.append(line[1:])
            continue
        record = json.loads(line[line.index("] {") + 2 :])
        lines = []
        if "artifact" in record:
            assert "stack" not in record, "it belongs to no compilation"
            found[record["artifact"]["name"]] = lines
    return {name: "\n".join(lines) for name, lines in found.items()}


def test_plan_and_code_in_the_logs_and_a_trace(tmp_path: Path) -> None:
    """Whichever is imported first."""
    asked = "+fxremat,fxremat_plan,fxremat_graph"
    shown = run(asked, "import fxremat; import torch", TORCH_TRACE=str(tmp_path))
    lines = [line for line in shown if "fxremat: graph 0: " in line]
    assert len(lines) == 2  # that of each graph, and the first one of the report
    plan = [line for line in shown if "[__fxremat_plan]" in line]
    assert any("saved for the backward" in line for line in plan)
    code = [line for line in shown if "[__fxremat_graph]" in line]
    assert [line.split("] ")[-1] for line in code if "graph 0, " in line] == [
        "graph 0, forward:",
        "graph 0, backward:",
    ]
    assert any("torch.ops.aten.gelu_backward" in line for line in code)
    found = artifacts(tmp_path)
    ours = {name: text for name, text in found.items() if name.startswith("fxremat_")}
    kinds = ("plan", "problem", "report", "timeline")
    assert sorted(ours) == [f"fxremat_graph_0_{kind}" for kind in kinds]
    assert ours["fxremat_graph_0_report"].startswith("fxremat: graph 0: ")
    problem = problem_from_json(json.loads(ours["fxremat_graph_0_problem"]))
    made: dict[str, Any] = json.loads(ours["fxremat_graph_0_plan"])
    assert replay(problem, claim_from_json(made).steps).peak_bytes == made["peak_bytes"]
    assert json.loads(ours["fxremat_graph_0_timeline"])["traceEvents"]


# --- interrupts ---------------------------------------------------------------------------


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, also where the tests run in the background of a shell: that ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def programme() -> Milp:
    """Of two columns that are 0 or 1, one at least is 1."""
    milp = Milp()
    first, second = milp.binary(1.0), milp.binary(2.0)
    milp.row([(first, 1.0), (second, 1.0)], 1.0, 2.0)
    return milp


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_does_not_wait_for_a_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it runs without looking up."""
    ended = threading.Event()
    monkeypatch.setattr(highspy.Highs, "run", lambda self: ended.wait(30))
    begun = time.perf_counter()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        programme().solve(Deadline(None))
    ended.set()
    assert time.perf_counter() - begun < 2


def test_any_thread_may_ask() -> None:
    with ThreadPoolExecutor() as pool:
        assert pool.submit(programme().solve, Deadline(None)).result().objective == 1.0


def test_what_the_solver_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: highspy.Highs) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(highspy.Highs, "run", fail)
    with pytest.raises(MemoryError, match="no more"):
        programme().solve(Deadline(None))


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_planning_within_two_seconds() -> None:
    """A problem that takes much longer; nothing is caught on the way."""
    problem = blocks(400)
    budget = problem.resident_bytes + 1
    begun = time.perf_counter()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        solve(problem, budget, "auto", SolverOptions(time_limit_s=60))
    assert time.perf_counter() - begun < 2.5


def test_a_long_stage_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stage_times, "LONG_S", 0.1)
    times = StageTimes({"trace": 7.0})
    with caplog.at_level(logging.INFO, logger=stage_times.__name__):
        with times.stage("verify"):
            pass
        with times.stage("plan"):
            time.sleep(0.4)
    assert [record.getMessage() for record in caplog.records] == ["still planning; 7 s so far"]


# --- progress line ------------------------------------------------------------------------


def written(
    monkeypatch: pytest.MonkeyPatch,
    stream: io.StringIO,
    level: int = logging.WARNING,
    most_waits: int = 0,
) -> str:
    """What planning that takes long writes to standard error.

    On a busy machine the thread that writes may come late: it is waited for so often.
    """
    monkeypatch.setattr(stage_times, "LONG_S", 0.1)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(stage_times.log, "level", level)
    stage_times.log.manager._clear_cache()  # type: ignore[attr-defined]
    times = StageTimes({"trace": 7.0})
    with times.stage("plan"), times.stage("verify"):
        time.sleep(0.3)
        for _ in range(most_waits):
            if not stream.getvalue():
                time.sleep(0.1)
    return stream.getvalue()


def test_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(monkeypatch, Terminal(), most_waits=100)
    assert text.startswith(f"{CLEAR}fxremat: verifying a plan; 7 s so far")
    assert text.endswith(CLEAR)
    assert "\n" not in text


@pytest.mark.parametrize("why", ["no terminal", "another rank", "the log says it"])
def test_where_no_line_is_shown(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "another rank":
        monkeypatch.setenv("LOCAL_RANK", "1")
    stream = io.StringIO() if why == "no terminal" else Terminal()
    level = logging.INFO if why == "the log says it" else logging.WARNING
    assert CLEAR not in written(monkeypatch, stream, level)


# --- logged metrics -----------------------------------------------------------------------

ALLOCATOR = {
    "active_bytes.all.peak": 3 * GIB, "reserved_bytes.all.peak": 4 * GIB,
    "num_alloc_retries": 1, "num_ooms": 2,
}  # fmt: skip


def test_what_was_planned() -> None:
    """For one graph, for several without a budget, and for none."""
    report = altered(
        planned(), budget_bytes=4 * GIB, predicted_peak_bytes=3 * GIB, count="allocated"
    )
    found = fxremat.metrics(reports=[report])
    assert found["fxremat/predicted_peak(GiB)"] == 3
    assert found["fxremat/budget(GiB)"] == 4
    assert found["fxremat/budget_used(%)"] == 75
    assert found["fxremat/time_overhead(%)"] == pytest.approx(100 * report.time_overhead)
    assert found["fxremat/saved(GiB)"] == report.saved_bytes / GIB
    assert found["fxremat/graphs"] == 1
    assert not any(name.startswith("memory/") for name in found)
    assert all(isinstance(value, (int, float)) for value in found.values())
    graphs = [altered(one, budget_bytes=None) for one in (planned(), moving())]
    found = fxremat.metrics(reports=graphs)
    assert found["fxremat/graphs"] == 2
    assert found["fxremat/saved(GiB)"] == sum(g.saved_bytes for g in graphs) / GIB
    assert not any("budget" in name for name in found)
    torch._dynamo.reset()
    assert fxremat.metrics() == {}


def test_what_was_measured() -> None:
    found = {"memory/max_active(GiB)": 2}
    assert fxremat.metrics(MeasuredPeak(2 * GIB, GIB, GIB, "cpu"), reports=[]) == found
    on_cuda = MeasuredPeak(2 * GIB, GIB, GIB, "cuda:0", 3 * GIB)
    assert fxremat.metrics(on_cuda, reports=[]) == {**found, "memory/max_reserved(GiB)": 3}


def test_what_the_allocator_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torchtitan's names; the next call counts from here on only if that is asked for."""
    resets: list[Any] = []

    class Properties:
        total_memory = 8 * GIB

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: ALLOCATOR)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    assert fxremat.metrics(reports=[]) == {
        "memory/max_active(GiB)": 3,
        "memory/max_active(%)": 37.5,
        "memory/max_reserved(GiB)": 4,
        "memory/max_reserved(%)": 50,
        "memory/num_alloc_retries": 1,
        "memory/num_ooms": 2,
    }
    assert resets == []
    fxremat.metrics(reports=[], reset=True)
    assert resets == [None]

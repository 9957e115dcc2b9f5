"""TORCH_LOGS and TORCH_TRACE, each in a process of its own: torch reads them once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from fxremat.core.plan import steps_from_json
from fxremat.core.problem import problem_from_json
from fxremat.core.timeline import replay

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
    _look_at_trace(artifacts(tmp_path))


def _look_at_trace(found: dict[str, str]) -> None:
    ours = {name: text for name, text in found.items() if name.startswith("fxremat_")}
    kinds = ("plan", "problem", "report", "timeline")
    assert sorted(ours) == [f"fxremat_graph_0_{kind}" for kind in kinds]
    assert ours["fxremat_graph_0_report"].startswith("fxremat: graph 0: ")
    problem = problem_from_json(json.loads(ours["fxremat_graph_0_problem"]))
    plan: dict[str, Any] = json.loads(ours["fxremat_graph_0_plan"])
    assert replay(problem, steps_from_json(plan)).peak_bytes == plan["peak_bytes"]
    assert json.loads(ours["fxremat_graph_0_timeline"])["traceEvents"]

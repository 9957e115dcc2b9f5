"""`trace` on the command line: the problem of a step of a model, and the whole way from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fxremat
from fxremat.cli import main
from fxremat.core.check import check
from fxremat.core.problem import Problem, load_problem, problem_to_json
from tests.chains import phased_chain
from tests.small import Stack, seeded

ROOT = Path(__file__).parent.parent

MODELS = """
import torch
from torch import nn
from tests.small import Convolutions, Stack

not_callable = 3

def stack():
    return Stack(), torch.randn(64, 32)

def linear():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), (torch.randn(4, 8),)

class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x, scale):
        y = self.layer(x) * scale
        return {"result": y, "loss": y.mean(), "choice": y.argmax(), "nothing": None}

def several():
    return Several(), [torch.randn(4, 8), torch.tensor(3.0)]

def half():
    return nn.Linear(8, 8).to(torch.bfloat16), torch.randn(4, 8, dtype=torch.bfloat16)

def convolutions():
    return Convolutions(), torch.randn(2, 3, 8, 8)

def large():
    layers = [nn.Linear(1 << 16, 1 << 16) for _ in range(4)]
    return nn.Sequential(*layers), torch.randn(8, 1 << 16)

def frozen():
    return nn.Linear(8, 8).requires_grad_(False), torch.randn(4, 8)

def broken():
    return Stack(broken=True), torch.randn(4, 32)

def only_a_model():
    return nn.Linear(8, 8)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of models that is imported anew by each test."""
    (tmp_path / "cli_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cli_models", raising=False)
    torch._dynamo.reset()
    return "cli_models"


def traced(models: str, name: str, tmp_path: Path, *more: str) -> Problem:
    out = tmp_path / f"{name}.json"
    assert main(["trace", f"{models}:{name}", "--out", str(out), *more]) == 0
    return load_problem(str(out))


@pytest.mark.parametrize("mode", ["aot_eager", "inductor"])
def test_trace_gives_the_problem_that_is_planned(
    models: str, tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (graph,) = fxremat.explain(*seeded(Stack, 64, 32), options={"executor": mode}).graphs
    found = traced(models, "stack", tmp_path, "--mode", mode, "--workspaces")
    assert found.name == "cli_models:stack"
    assert replace(found, name="") == replace(graph.problem, name="")
    printed = capsys.readouterr().out
    assert f"{len(found.ops)} ops" in printed
    assert "store-all " in printed


@pytest.mark.parametrize("name", ["linear", "several", "half", "convolutions"])
def test_trace_takes_models_of_all_sorts(models: str, tmp_path: Path, name: str) -> None:
    found = traced(models, name, tmp_path)
    assert {"forward", "backward"} <= {op.phase for op in found.ops}
    assert check(found, found.base_steps()).ok


def test_half_takes_half(models: str, tmp_path: Path) -> None:
    assert traced(models, "half", tmp_path).resident_bytes == 2 * (8 * 8 + 8 + 4 * 8)


REFUSED_MODELS = {
    "frozen": "nothing in the model needs a gradient",
    "broken": "cannot be traced as one graph",
    "only_a_model": "must return (model, inputs), not Linear",
    "not_callable": "there is no function 'not_callable'",
    "stak": "did you mean 'stack'?",
}


@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_trace_refuses(
    models: str, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert main(["trace", f"{models}:{name}", "--out", str(out)]) == 2
    assert REFUSED_MODELS[name] in capsys.readouterr().err
    assert not out.exists()


def test_a_module_that_fails_to_import_says_why(
    models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, as all errors are; the traceback is there for whoever asks."""
    (tmp_path / "cli_failing.py").write_text("import no_such_thing_at_all")
    assert main(["trace", "cli_failing:f", "--out", "x"]) == 2
    error = capsys.readouterr().err
    assert "ModuleNotFoundError: No module named 'no_such_thing_at_all'" in error
    assert error.count("\n") == 1
    with pytest.raises(ModuleNotFoundError, match="no_such_thing_at_all"):
        main(["--traceback", "trace", "cli_failing:f", "--out", "x"])


# --- the whole way -------------------------------------------------------------------------

SMALL_MEMORY = """
import sys
from fxremat.cli import main
status = main(sys.argv[1:])
memory = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(memory)
sys.exit(status)
"""


def python(tmp_path: Path, *arguments: str) -> str:
    """What a Python of its own prints; it finds the models, and this repository."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.slow
def test_the_commands_one_after_the_other(models: str, tmp_path: Path) -> None:
    """A model of 64 GiB is traced in little memory, and planned."""
    trace = ["trace", f"{models}:large", "--out", "large.json", "--mode", "aot_eager"]
    printed = python(tmp_path, "-c", SMALL_MEMORY, *trace)
    found = load_problem(str(tmp_path / "large.json"))
    assert found.resident_bytes > 64 * 2**30
    assert int(printed.split()[-2]) * 1024 < 2**30
    solve = ["solve", "large.json", "--budget", "100%", "--out", "plan.json"]
    assert "solver    " in python(tmp_path, "-m", "fxremat", *solve)
    checked = python(tmp_path, "-m", "fxremat", "check", "large.json", "plan.json")
    assert checked.startswith("ok: ")


def test_only_trace_needs_torch(tmp_path: Path) -> None:
    problem = tmp_path / "problem.json"
    problem.write_text(json.dumps(problem_to_json(phased_chain(3))))
    code = "import sys; from fxremat.cli import main; main(sys.argv[1:]); print(sys.modules.keys())"
    modules = python(tmp_path, "-c", code, "pareto", str(problem)).splitlines()[-1]
    assert "'fxremat.planner'" in modules
    assert "'torch'" not in modules

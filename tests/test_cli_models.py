"""Commands on models: steps that are traced, steps of configs, and scripts that are bisected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from fxremat.cli import main
from fxremat.cli.arguments import UsageError, read_problem
from fxremat.cli.bisect import ALL_OFF, PARTS
from fxremat.cli.step import KINDS, OF_CONFIGS, step_of_config
from fxremat.compat.tensors import fake_tensors
from fxremat.core.check import check
from fxremat.core.problem import Problem, problem_to_json
from tests.chains import phased_chain
from tests.small import Stack, seeded

# --- trace --------------------------------------------------------------------------------


ROOT = Path(__file__).parent.parent

Run = Callable[..., tuple[int, str, str]]
Refused = Callable[..., str]
Written = Callable[[Any], str]
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
    return read_problem(str(out))


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
    if name == "half":
        assert found.resident_bytes == 2 * (8 * 8 + 8 + 4 * 8)


REFUSED_MODELS = {
    "frozen": "nothing in the model needs a gradient",
    "broken": "cannot be traced as one graph",
    "only_a_model": "must return (model, inputs), not Linear",
    "not_callable": "there is no function 'not_callable'",
    "stak": "did you mean 'stack'?",
}


@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_trace_refuses(models: str, tmp_path: Path, name: str, refused: Refused) -> None:
    out = tmp_path / "out.json"
    assert REFUSED_MODELS[name] in refused("trace", f"{models}:{name}", "--out", out)
    assert not out.exists()


@pytest.mark.usefixtures("models")
def test_a_module_that_fails_to_import_says_why(tmp_path: Path, refused: Refused) -> None:
    """In one line, as all errors are; the traceback is there for whoever asks."""
    (tmp_path / "cli_failing.py").write_text("import no_such_thing_at_all")
    missing = "ModuleNotFoundError: No module named 'no_such_thing_at_all'"
    assert missing in refused("trace", "cli_failing:f", "--out", "x")
    with pytest.raises(ModuleNotFoundError, match="no_such_thing_at_all"):
        main(["--traceback", "trace", "cli_failing:f", "--out", "x"])


# --- the whole way ------------------------------------------------------------------------

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
    found = read_problem(str(tmp_path / "large.json"))
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


# --- configs ------------------------------------------------------------------------------


TEXT = {"model_type": "tiny", "architectures": ["TinyForCausalLM"], "max_position_embeddings": 16}
IMAGE = {"model_type": "tiny", "architectures": ["TinyForImageClassification"], "image_size": 8}


class Tiny(nn.Module):
    """Takes tokens or pixels by their names, and has a loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=dtype)
        self.tied = False

    def tie_weights(self) -> None:
        self.tied = True

    def forward(
        self, labels: Any, input_ids: Any = None, pixel_values: Any = None
    ) -> SimpleNamespace:
        given = input_ids if pixel_values is None else pixel_values
        x = self.layer(given.to(self.layer.weight.dtype).unsqueeze(-1).expand(*given.shape, 8))
        return SimpleNamespace(loss=x.float().mean() + labels.float().mean())


class Auto:
    """An Auto class: it knows what it was asked for."""

    asked: dict[str, Any]

    @classmethod
    def from_pretrained(cls, path: str, **keywords: Any) -> SimpleNamespace:
        assert keywords == {"local_files_only": True, "trust_remote_code": False}
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        if not file.exists():
            raise OSError("not in the cache\nand there is no network")
        return SimpleNamespace(**json.loads(file.read_text()))

    @classmethod
    def from_config(cls, config: Any, *, dtype: Any = torch.float32, **keywords: Any) -> Tiny:
        if keywords.get("attn_implementation") == "none":
            raise ValueError("there is no such attention\nin this model")
        cls.asked = {"config": config, **keywords}
        return Tiny(dtype)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Written]:
    """Writes a config where a stand-in for transformers reads it."""
    transformers: Any = ModuleType("transformers")
    transformers.AutoConfig = Auto
    for name in KINDS:
        setattr(transformers, name, Auto)
    log: Any = ModuleType("transformers.utils.logging")
    log.warning_once = log.info_once = print
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setitem(sys.modules, "transformers.utils.logging", log)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    logged = set(torch._dynamo.config.ignore_logging_functions)

    def write(data: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(data))
        return str(tmp_path)

    with torch._dynamo.config.patch(ignore_logging_functions=logged):
        yield write


def wanted(**given: Any) -> Namespace:
    """What a command line leaves open of a config, and what it says."""
    return Namespace(**{**dict.fromkeys(OF_CONFIGS), **given})


def shapes(inputs: tuple[Any, ...]) -> list[tuple[int, ...]]:
    return [tuple(one.shape) for one in inputs]


def test_a_language_model_has_a_label_for_each_token(config: Written) -> None:
    folder = config(TEXT)
    with fake_tensors():
        step = step_of_config(folder, wanted(batch=4, length=8, dtype="bf16", attention="eager"))
    assert shapes(step.inputs) == [(4, 8), (4, 8)]
    assert {one.dtype for one in step.inputs} == {torch.int64}
    assert step.sizes == {"batch": [(0, 0), (1, 0)], "length": [(0, 1), (1, 1)]}
    assert Auto.asked["attn_implementation"] == "eager"
    assert Auto.asked["config"].use_cache is False
    assert isinstance(step.model, nn.Module)
    assert step.model.get_submodule("model").tied
    assert {one.dtype for one in step.model.parameters()} == {torch.bfloat16}
    assert step.model(*step.inputs).shape == ()
    with fake_tensors():
        assert shapes(step_of_config(folder, wanted()).inputs) == [(1, 16), (1, 16)]
        with pytest.raises(UsageError, match="more than max_position_embeddings, 16"):
            step_of_config(folder, wanted(length=17))  # lengths end where the model does


def test_a_classifier_of_texts_has_a_label_for_each(config: Written) -> None:
    asked = wanted(batch=4, auto_class="AutoModelForSequenceClassification")
    with fake_tensors():
        step = step_of_config(config(TEXT), asked)
        one_number = step_of_config(config({**TEXT, "num_labels": 1}), asked)
    assert shapes(step.inputs) == [(4, 16), (4,)]
    assert step.sizes == {"batch": [(0, 0), (1, 0)], "length": [(0, 1)]}
    assert one_number.inputs[1].dtype == torch.float32
    assert Auto.asked["config"].problem_type == "regression"


def test_a_classifier_of_images_takes_pixels(config: Written) -> None:
    folder = config(IMAGE)
    with fake_tensors():
        step = step_of_config(folder, wanted(batch=2, dtype="bf16"))
        with pytest.raises(UsageError, match="--length is for text"):
            step_of_config(folder, wanted(length=8))
    assert shapes(step.inputs) == [(2, 3, 8, 8), (2,)]
    assert step.inputs[0].dtype == torch.bfloat16
    assert step.sizes == {"batch": [(0, 0), (1, 0)]}


@pytest.mark.parametrize(
    ("data", "more", "said"),
    [
        ({**TEXT, "architectures": ["TinyForPreTraining"]}, [], "how a TinyForPreTraining is"),
        (TEXT, ["--class", "AutoModelForCausalM"], "did you mean 'AutoModelForCausalLM'?"),
        (TEXT, ["--dtype", "int8"], "--dtype int8 is none of bf16"),
        (TEXT, ["--attention", "none"], "transformers says: there is no such attention"),
    ],
)
def test_configs_are_refused_in_one_line(
    data: Any, more: list[str], said: str, config: Written, refused: Refused
) -> None:
    assert said in refused("explain", config(data), "--device", "cpu", *more)


def test_the_step_of_a_config_is_planned(
    config: Written, monkeypatch: pytest.MonkeyPatch, run: Run, refused: Refused
) -> None:
    """Without transformers it is asked for."""
    monkeypatch.setenv("FXREMAT_VARIANTS", "none")
    monkeypatch.setenv("FXREMAT_SOLVER", "greedy")
    status, printed, _ = run("explain", config(TEXT), "--device", "cpu", "--budget", "1MiB")
    assert status == 0
    assert "of 1.00 MiB" in printed
    monkeypatch.setitem(sys.modules, "transformers", None)
    line = refused("explain", config(TEXT), "--device", "cpu")
    assert "pip install 'fxremat[transformers]'" in line


# --- bisect -------------------------------------------------------------------------------


HEAD = "import os, sys\ndef on(name, value): return os.environ.get('FXREMAT_' + name) != value\n"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """Writes a script, for which nothing is set."""
    for name in [name for name in os.environ if name.startswith("FXREMAT_")]:
        monkeypatch.delenv(name)

    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(HEAD + text, encoding="utf-8")
        return str(path)

    return write


def test_the_part_whose_absence_mends_it_is_named(script: Written, run: Run) -> None:
    fails = "sys.exit(3 if on('VARIANTS', 'none') and on('DISABLE', '1') else 0)"
    status, out, _ = run("bisect", script(fails))
    assert status == 0
    assert out.count("exit status 3") == len(PARTS)
    assert "found: operator variants (FXREMAT_VARIANTS=none)" in out
    assert out.count("found:") == 1


def test_numbers_are_compared_where_they_are_asked_for(script: Written, run: Run) -> None:
    """Also with arguments of the script's own, and more than one part."""
    text = (
        "print('loss 9')\n"
        "wrong = on('SOLVER', 'greedy') and on('OP_TIMES', 'roofline') and on('DISABLE', '1')\n"
        "print('loss', 2.5 + wrong * float(sys.argv[2]))\n"
    )
    status, out, _ = run("bisect", "--measure", r"loss (\S+)", script(text), "--by", "0.5")
    assert status == 0
    assert "found: measured times" in out
    assert "found: the best of all solvers" in out
    assert out.count("found:") == 2


def test_it_says_where_nothing_or_no_single_part_differs(script: Written, run: Run) -> None:
    for text, said in (
        ("sys.exit(1)", "fxremat makes no difference"),
        ("if on('DISABLE', '1'): sys.exit('it broke')", "no single part makes the difference"),
    ):
        status, out, _ = run("bisect", script(text))
        assert status == 1
        assert said in out
    assert out.endswith("it broke\n")


@pytest.mark.parametrize("pattern", ["loss", "(", "(x)", None])
def test_wrong_usage_is_one_line(script: Written, refused: Refused, pattern: str | None) -> None:
    given = ["no_such_script.py"] if pattern is None else ["--measure", pattern, script("pass")]
    refused("bisect", *given)


@pytest.mark.usefixtures("script")
def test_each_part_is_an_option_that_takes_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxremat.options import disabled, parse_options

    for setting in PARTS.values():
        name, _, value = setting.partition("=")
        default = parse_options({}, device_total_bytes=None)
        monkeypatch.setenv(f"FXREMAT_{name}", value)
        given = getattr(parse_options({}, device_total_bytes=None), name.lower())
        assert given != getattr(default, name.lower()) or given is False
        monkeypatch.delenv(f"FXREMAT_{name}")
    monkeypatch.setenv(*f"FXREMAT_{ALL_OFF}".split("="))
    assert disabled()

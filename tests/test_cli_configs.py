"""Steps of configs: what a model of Hugging Face is trained on, by a stand-in."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fxremat.cli import main
from fxremat.cli.arguments import UsageError
from fxremat.cli.step import KINDS, Wanted, step_of_config
from fxremat.compat.tensors import fake_tensors

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
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], str]]:
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


def shapes(inputs: tuple[Any, ...]) -> list[tuple[int, ...]]:
    return [tuple(one.shape) for one in inputs]


def test_a_language_model_has_a_label_for_each_token(config: Callable[[Any], str]) -> None:
    folder = config(TEXT)
    with fake_tensors():
        step = step_of_config(folder, Wanted(batch=4, length=8, dtype="bf16", attention="eager"))
    assert shapes(step.inputs) == [(4, 8), (4, 8)]
    assert {one.dtype for one in step.inputs} == {torch.int64}
    assert step.sizes == {"batch": [(0, 0), (1, 0)], "length": [(0, 1), (1, 1)]}
    assert Auto.asked["attn_implementation"] == "eager"
    assert Auto.asked["config"].use_cache is False
    assert isinstance(step.model, nn.Module)
    assert step.model.get_submodule("model").tied
    assert {one.dtype for one in step.model.parameters()} == {torch.bfloat16}
    assert step.model(*step.inputs).shape == ()


def test_lengths_end_where_the_model_does(config: Callable[[Any], str]) -> None:
    folder = config(TEXT)
    with fake_tensors():
        assert shapes(step_of_config(folder, Wanted()).inputs) == [(1, 16), (1, 16)]
        with pytest.raises(UsageError, match="more than max_position_embeddings, 16"):
            step_of_config(folder, Wanted(length=17))


def test_a_classifier_of_texts_has_a_label_for_each(config: Callable[[Any], str]) -> None:
    asked = Wanted(batch=4, auto_class="AutoModelForSequenceClassification")
    with fake_tensors():
        step = step_of_config(config(TEXT), asked)
        one_number = step_of_config(config({**TEXT, "num_labels": 1}), asked)
    assert shapes(step.inputs) == [(4, 16), (4,)]
    assert step.sizes == {"batch": [(0, 0), (1, 0)], "length": [(0, 1)]}
    assert one_number.inputs[1].dtype == torch.float32
    assert Auto.asked["config"].problem_type == "regression"


def test_a_classifier_of_images_takes_pixels(config: Callable[[Any], str]) -> None:
    folder = config(IMAGE)
    with fake_tensors():
        step = step_of_config(folder, Wanted(batch=2, dtype="bf16"))
        with pytest.raises(UsageError, match="--length is for text"):
            step_of_config(folder, Wanted(length=8))
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
def test_refused_in_one_line(
    data: Any, more: list[str], said: str, config: Callable[[Any], str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main(["explain", config(data), "--device", "cpu", *more]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_transformers_is_asked_for(
    config: Callable[[Any], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["explain", config(TEXT), "--device", "cpu"]) == 2
    assert "pip install 'fxremat[transformers]'" in capsys.readouterr().err


def test_the_step_of_a_config_is_planned(
    config: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("FXREMAT_VARIANTS", "none")
    monkeypatch.setenv("FXREMAT_SOLVER", "greedy")
    assert main(["explain", config(TEXT), "--device", "cpu", "--budget", "1MiB"]) == 0
    assert "of 1.00 MiB" in capsys.readouterr().out

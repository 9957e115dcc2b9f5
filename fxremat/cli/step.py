"""The step that a command is about: of a function that makes a model, or of a model's config.

Its tensors have sizes but no memory, and the device need not be in this machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxremat.cli.arguments import UsageError, read_count, read_json
from fxremat.errors import nearest

if TYPE_CHECKING:
    from fxremat.whatif.explanation import Explanation


@dataclass(frozen=True)
class Step:
    """``model(*inputs)``; ``sizes`` are what may vary: of each, inputs and their dimensions."""

    name: str
    model: Callable[..., Any]
    inputs: tuple[Any, ...]
    sizes: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)


OF_CONFIGS = ("batch", "length", "dtype", "attention", "auto_class")


def add_step(parser: Any, *, or_reports: bool = False) -> None:
    """Add what the step is of: ``given.step``, and what a config leaves open."""
    reports = "; or files GRAPH.report.json, as the option `report` writes them"
    parser.add_argument(
        "step",
        metavar="STEP",
        nargs="+" if or_reports else None,
        help="MODULE:FUNCTION that returns (model, inputs), a tuple of inputs or one tensor; the "
        "loss is the result, its `loss`, or the sum of its tensors; or the config.json of a model "
        "of Hugging Face, a folder that has one, or a name whose config is cached: nothing is "
        f"downloaded{reports if or_reports else ''}",
    )
    config = parser.add_argument_group("a step of a config")
    config.add_argument("--batch", metavar="N", type=read_count, help="samples; by default 1")
    config.add_argument(
        "--length",
        metavar="N",
        type=read_count,
        help="tokens of each; by default 2048, or as many as the model takes",
    )
    config.add_argument("--dtype", metavar="TYPE", help="of the weights, such as bf16")
    config.add_argument("--attention", metavar="NAME", help="such as sdpa or eager")
    config.add_argument(
        "--class", metavar="NAME", dest="auto_class", help="such as AutoModelForCausalLM"
    )


def add_plan(parser: Any) -> None:
    """Add what the step is planned for."""
    parser.add_argument("--device", metavar="NAME", help="a card, such as H100, or cpu")
    parser.add_argument(
        "--budget", metavar="SIZE", help="bytes at most, such as 60GiB; by default the whole card"
    )
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        default="adamw",
        help="the optimizer whose states are held, or none; by default adamw",
    )


def planned_for(device: str | None) -> AbstractContextManager[Any]:
    """Inside, tensors have no memory, and steps are planned for the device of that name."""
    from fxremat.compat.tensors import fake_tensors
    from fxremat.whatif.device import absent

    if device is None:
        raise UsageError("--device is missing: a card, such as --device H100, or cpu")
    return fake_tensors() if device.lower() == "cpu" else absent(device)


def step_of(text: str, given: argparse.Namespace) -> Step:
    """The step that is named, on tensors without memory, as it is inside of `planned_for`."""
    if ":" not in text or Path(text).exists():
        return step_of_config(text, given)
    for name in OF_CONFIGS:
        if getattr(given, name) is not None:
            option = name.removeprefix("auto_")
            raise UsageError(f"--{option} is for a config; {text!r} makes its own model and inputs")
    return Step(text, *model_and_inputs(text, find_function(text)()))


def explained(step: Step, given: argparse.Namespace) -> Explanation:
    """The plan for what `add_plan` was given."""
    from fxremat.compile.tracing import WithLoss
    from fxremat.whatif.explanation import explain

    options = {"optimizer": given.optimizer}
    model = WithLoss(step.model)
    found = explain(model, *step.inputs, memory_budget=given.budget, options=options)
    if not found.graphs:
        raise UsageError(f"{step.name}: nothing in the model needs a gradient; there is no step")
    return found


def find_function(text: str) -> Callable[[], Any]:
    """The function named ``package.module:function``."""
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise UsageError(f"{text!r}: write MODULE:FUNCTION, such as 'models:small'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise UsageError(f"{text!r}: there is no module {error.name!r} here") from error
    found = getattr(module, name, None)
    if not callable(found):
        close = nearest(name, [n for n, value in vars(module).items() if callable(value)])
        hint = f"; did you mean {close!r}?" if close else ""
        raise UsageError(f"{text!r}: there is no function {name!r} in {module_name}{hint}")
    return found  # type: ignore[no-any-return]


def model_and_inputs(where: str, made: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise UsageError(f"{where}: must return (model, inputs), not {type(made).__name__}")
    model, inputs = made
    return model, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)


DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
LENGTH = 2048
IMAGE_SIZE = 224  # of models that take any


@dataclass(frozen=True)
class Kind:
    """What an Auto class is trained on, and how architectures end that it makes."""

    endings: tuple[str, ...]
    takes: str
    label_of: str


KINDS = {
    "AutoModelForCausalLM": Kind(("ForCausalLM", "LMHeadModel"), "text", "token"),
    "AutoModelForMaskedLM": Kind(("ForMaskedLM",), "text", "token"),
    "AutoModelForTokenClassification": Kind(("ForTokenClassification",), "text", "token"),
    "AutoModelForSequenceClassification": Kind(("ForSequenceClassification",), "text", "sample"),
    "AutoModelForImageClassification": Kind(("ForImageClassification",), "image", "sample"),
}


def is_config(path: str) -> bool:
    """Whether a file or a folder is a config, and not a report of ours."""
    file = Path(path)
    if file.is_dir() or not file.exists():
        return file.is_dir()
    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and "model_type" in data


def step_of_config(text: str, wanted: argparse.Namespace) -> Step:
    """The step of the config that lies there, or is cached by that name, as it is trained on.

    The model has no weights, only their sizes, and nothing is downloaded. ``wanted`` has what
    `add_step` asks for a config; None where it was not given.
    """
    import torch

    from fxremat.training.whole_graphs import keep_graphs_whole

    transformers, config = _config(text)
    auto_class = wanted.auto_class or _auto_class(text, config)
    if auto_class not in KINDS:
        close = nearest(auto_class, KINDS)
        hint = f"; did you mean {close!r}?" if close else ""
        raise UsageError(f"--class {auto_class} is none of {', '.join(KINDS)}{hint}")
    kind = KINDS[auto_class]
    config.use_cache = False  # of keys and values, for generation
    more: dict[str, Any] = {}
    if wanted.dtype is not None:
        more["dtype"] = getattr(torch, DTYPES.get(wanted.dtype, wanted.dtype), None)
        if not isinstance(more["dtype"], torch.dtype) or not more["dtype"].is_floating_point:
            raise UsageError(f"--dtype {wanted.dtype} is none of {', '.join(DTYPES)}")
    if wanted.attention is not None:
        more["attn_implementation"] = wanted.attention
    shape, names = _shape(text, config, kind, wanted)
    is_number = kind.label_of == "sample" and _is_one_number(config)
    try:
        with torch.device("meta"):  # where no weight is drawn
            model = getattr(transformers, auto_class).from_config(config, **more)
    except (ImportError, KeyError, TypeError, ValueError) as error:
        raise _refused(text, error) from error
    model.to_empty(device="cpu").train()
    model.tie_weights()  # what was one weight is one again
    keep_graphs_whole([model], importlib.import_module("transformers.utils.logging"))
    weights = next(model.parameters()).dtype
    of_labels = shape if kind.label_of == "token" else shape[:1]
    inputs = (
        torch.zeros(shape, dtype=weights if kind.takes == "image" else torch.long),
        torch.zeros(of_labels, dtype=weights if is_number else torch.long),
    )
    places = {
        name: [(k, at) for k, one in enumerate(inputs) if at < one.dim()]
        for at, name in enumerate(names)
    }
    first = "pixel_values" if kind.takes == "image" else "input_ids"
    return Step(text, _by_position(model, (first, "labels")), inputs, places)


def _config(text: str) -> tuple[Any, Any]:
    """The module transformers, and the config."""
    path = Path(text)
    if path.is_file():
        data = read_json(text)
        if not (isinstance(data, dict) and "model_type" in data):
            raise UsageError(f"{text}: no config of a model: field 'model_type' is missing")
    elif path.is_dir() and not (path / "config.json").is_file():
        raise UsageError(f"{text}: there is no config.json in this folder")
    nowhere = (
        f"{text!r}: neither MODULE:FUNCTION, such as 'models:small', nor a config.json or a folder "
        "with one, nor a name whose config is in the cache of transformers"
    )
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        if not path.exists():
            raise UsageError(nowhere) from error
        raise UsageError(
            f"{text}: configs need transformers: pip install 'fxremat[transformers]'"
        ) from error
    try:
        read = transformers.AutoConfig.from_pretrained
        return transformers, read(text, local_files_only=True, trust_remote_code=False)
    except OSError as error:
        raise UsageError(nowhere) from error
    except Exception as error:
        raise _refused(text, error) from error


def _refused(text: str, error: Exception) -> UsageError:
    """The first line of what transformers has against it."""
    said = str(error).strip().splitlines()
    return UsageError(f"{text}: transformers says: {said[0] if said else type(error).__name__}")


def _auto_class(text: str, config: Any) -> str:
    """What makes the architecture that the config names."""
    named = (getattr(config, "architectures", None) or ["ForCausalLM"])[0]
    for auto_class, kind in KINDS.items():
        if named.endswith(kind.endings):
            return auto_class
    raise UsageError(
        f"{text}: how a {named} is trained is not known here; name one of {', '.join(KINDS)} by "
        "--class, or write a function that returns the model and its inputs"
    )


def _shape(
    text: str, config: Any, kind: Kind, wanted: argparse.Namespace
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The shape of the first input, and the names of those of its dimensions that may vary."""
    batch = wanted.batch or 1
    if kind.takes == "image":
        if wanted.length is not None:
            raise UsageError(f"{text}: --length is for text; images have the size of the config")
        size = getattr(config, "image_size", None) or IMAGE_SIZE
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return (batch, getattr(config, "num_channels", 3), height, width), ("batch",)
    most = getattr(config, "max_position_embeddings", None)
    length = wanted.length or min(LENGTH, most or LENGTH)
    if most is not None and length > most:
        raise UsageError(f"{text}: --length {length} is more than max_position_embeddings, {most}")
    return (batch, length), ("batch", "length")


def _is_one_number(config: Any) -> bool:
    """Whether each sample's label is a number; says in the config what the model would find out."""
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # decoders look for the last token before the padding
    is_number = getattr(config, "num_labels", 2) == 1
    config.problem_type = "regression" if is_number else "single_label_classification"
    return is_number


def _by_position(model: Any, names: tuple[str, ...]) -> Any:
    """The model's loss, of inputs by their position."""
    from torch import nn

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: Any) -> Any:
            return self.model(**dict(zip(names, inputs, strict=True))).loss

    return Loss()

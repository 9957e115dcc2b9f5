"""The training step of a config of Hugging Face: the model, and inputs as it is trained on.

The model has no weights, only their sizes, and nothing is downloaded.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxremat.cli import files
from fxremat.cli.arguments import Step, UsageError
from fxremat.errors import nearest

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
LENGTH = 2048
IMAGE_SIZE = 224  # of models that take any


@dataclass(frozen=True)
class Wanted:
    """What a config leaves open; None where it was not given."""

    batch: int | None = None
    length: int | None = None
    dtype: str | None = None
    attention: str | None = None
    auto_class: str | None = None


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


def step_of_config(text: str, wanted: Wanted) -> Step:
    """The step of the config that lies there, or is cached by that name."""
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
    with torch.device("meta"):  # where no weight is drawn
        model = _told(text, lambda: getattr(transformers, auto_class).from_config(config, **more))
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
        data = files.read_json(text)
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
    said = str(error).strip().splitlines()
    return UsageError(f"{text}: transformers says: {said[0] if said else type(error).__name__}")


def _told(text: str, make: Callable[[], Any]) -> Any:
    """What is made, or the first line of what transformers has against it."""
    try:
        return make()
    except (ImportError, KeyError, TypeError, ValueError) as error:
        raise _refused(text, error) from error


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
    text: str, config: Any, kind: Kind, wanted: Wanted
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

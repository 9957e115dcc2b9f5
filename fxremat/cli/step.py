"""The step that a command is about: of a function that makes a model, or of a model's config.

Its tensors have sizes but no memory, and the device need not be in this machine.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxremat.cli.arguments import Step, UsageError, read_count
from fxremat.errors import nearest

if TYPE_CHECKING:
    from fxremat.whatif.explanation import Explanation

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
        from fxremat.cli.configs import Wanted, step_of_config

        return step_of_config(text, Wanted(*(getattr(given, name) for name in OF_CONFIGS)))
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

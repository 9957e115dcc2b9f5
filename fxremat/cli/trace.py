"""``trace``: a training step as a problem file, without a byte of the model in memory.

The named function makes the model and its inputs on tensors that have sizes and devices but no
memory, and the step is traced on them just as the backend would: the problem is the one that
`torch.compile(..., backend="fxremat")` plans, but for the scratch memory of library calls, which
``--workspaces`` measures by running each distinct call.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fxremat.cli import files
from fxremat.cli.arguments import Commands, UsageError, add_function, store_all_peak
from fxremat.core.constants import CALL_US
from fxremat.core.problem import Copies, problem_to_json
from fxremat.errors import NotTraceable, nearest
from fxremat.sizes import exact_bytes

if TYPE_CHECKING:
    from fxremat.cost.device import DeviceSpec

MODES = ("inductor", "aot_eager")


def add(commands: Commands) -> None:
    parser = commands.add_parser("trace", help="write the problem of a model's training step")
    add_function(parser)
    parser.add_argument("--out", metavar="PROBLEM.json", required=True, help="write it here")
    parser.add_argument(
        "--mode", choices=MODES, default="inductor", help="what would run the graphs"
    )
    parser.add_argument(
        "--workspaces",
        action="store_true",
        help="measure the scratch memory of library calls by running them",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="the device whose rates give the times, such as H100; by default the one here",
    )
    parser.add_argument(
        "--copies",
        action="store_true",
        help="with --device: values may move to host memory and back, at that device's rate",
    )
    parser.add_argument(
        "--variants",
        metavar="NAMES",
        default="none",
        help="operator variants to choose from: 'all', or names with commas (see: variants)",
    )
    parser.add_argument(
        "--allow-lossy", action="store_true", help="include lossy variants in 'all'"
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    from fxremat.compat.tensors import fake_tensors
    from fxremat.compile.tracing import trace_step

    make, spec = find_function(given.function), _spec(given.device)
    if given.copies and spec is None:
        raise UsageError("--copies needs --device: its rates give the times of copies")
    with fake_tensors():
        model, inputs = model_and_inputs(given.function, make())
        try:
            step = trace_step(
                given.function,
                model,
                inputs,
                mode=given.mode,
                workspaces=given.workspaces,
                spec=spec,
                rules=_rules(given),
            )
        except NotTraceable as error:
            raise UsageError(str(error)) from error
    problem = step.found.problem
    if given.copies and spec is not None:
        rate = spec.host_bytes_per_s / 1e6
        problem = replace(problem, copies=Copies(rate, rate, CALL_US))
    print(f"problem   {problem.name}: {len(problem.ops)} ops, {len(problem.values)} values")
    if problem.variants:
        print(f"variants  {len(problem.variants)} variants of ops")
    print(f"resident  {exact_bytes(problem.resident_bytes)}")
    print(f"store-all {exact_bytes(store_all_peak(problem))} at the peak")
    files.write_json(given.out, problem_to_json(problem))
    return 0


def _rules(given: argparse.Namespace) -> Sequence[Any]:
    from fxremat.errors import InvalidOption
    from fxremat.option_values import Given, read_variants
    from fxremat.passes.variants.table import ALL, rules_named

    try:
        names = read_variants(Given("variants", given.variants, None, None, None))
    except InvalidOption as error:
        raise UsageError(" ".join(str(error).split())) from error
    return rules_named(names, allow_lossy=given.allow_lossy or (bool(names) and names != (ALL,)))


def _spec(name: str | None) -> DeviceSpec | None:
    from fxremat.cost.device import spec_named

    try:
        return None if name is None else spec_named(name)
    except KeyError as error:
        raise UsageError(str(error.args[0])) from error


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

"""``trace``: a training step as a problem file, without a byte of the model in memory.

The model and its inputs are made on tensors that have sizes and devices but no memory, and the step
is traced on them just as the backend would: the problem is the one that
`torch.compile(..., backend="fxremat")` plans, but for the scratch memory of library calls, which
``--workspaces`` measures by running each distinct call.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fxremat.cli.arguments import Commands, UsageError, write_json
from fxremat.cli.step import add_step, step_of
from fxremat.core.constants import CALL_US
from fxremat.core.problem import Copies, problem_to_json
from fxremat.core.timeline import store_all_peak
from fxremat.option_values import Given, read_variants
from fxremat.sizes import exact_bytes

if TYPE_CHECKING:
    from fxremat.cost.device import DeviceSpec

MODES = ("inductor", "aot_eager")


def add(commands: Commands) -> None:
    parser = commands.add_parser("trace", help="write the problem of a model's training step")
    add_step(parser)
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

    spec = _spec(given.device)
    if given.copies and spec is None:
        raise UsageError("--copies needs --device: its rates give the times of copies")
    with fake_tensors():
        named = step_of(given.step, given)
        step = trace_step(
            named.name,
            named.model,
            named.inputs,
            mode=given.mode,
            workspaces=given.workspaces,
            spec=spec,
            rules=_rules(given),
        )
    problem = step.found.problem
    if given.copies and spec is not None:
        rate = spec.host_bytes_per_s / 1e6
        problem = replace(problem, copies=Copies(rate, rate, CALL_US))
    print(f"problem   {problem.name}: {len(problem.ops)} ops, {len(problem.values)} values")
    if problem.variants:
        print(f"variants  {len(problem.variants)} variants of ops")
    print(f"resident  {exact_bytes(problem.resident_bytes)}")
    print(f"store-all {exact_bytes(store_all_peak(problem))} at the peak")
    write_json(given.out, problem_to_json(problem))
    return 0


def _rules(given: argparse.Namespace) -> Sequence[Any]:
    from fxremat.passes.variants.table import ALL, rules_named

    names = read_variants(Given("variants", given.variants, None, None))
    return rules_named(names, allow_lossy=given.allow_lossy or (bool(names) and names != (ALL,)))


def _spec(name: str | None) -> DeviceSpec | None:
    from fxremat.cost.device import spec_named

    try:
        return None if name is None else spec_named(name)
    except KeyError as error:
        raise UsageError(str(error.args[0])) from error

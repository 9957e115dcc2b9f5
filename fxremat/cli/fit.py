"""``fit``: the largest batch, or the longest sequence, that trains on a card within a budget.

The named function makes the model and its inputs, on tensors that have sizes but no memory. The
card does not have to be in this machine.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from fxremat.cli import files
from fxremat.cli.arguments import Commands, UsageError, add_function
from fxremat.cli.trace import find_function, model_and_inputs
from fxremat.errors import FxrematError
from fxremat.sizes import format_bytes

if TYPE_CHECKING:
    from fxremat.whatif.fit import Fit

Vary = tuple[str, tuple[tuple[int, int], ...]]


def add(commands: Commands) -> None:
    parser = commands.add_parser("fit", help="the largest batch or sequence that trains on a card")
    add_function(parser)
    parser.add_argument("--device", metavar="NAME", required=True, help="a card, such as H100")
    parser.add_argument(
        "--budget", metavar="SIZE", help="bytes at most, such as 60GiB; by default the whole card"
    )
    parser.add_argument(
        "--vary",
        metavar="NAME=INPUT:DIMENSION,...",
        action="append",
        type=read_vary,
        required=True,
        help="a size, and the dimensions of the inputs that have it: batch=0:0,1:0",
    )
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        default="none",
        help="the optimizer whose states are held, such as adamw",
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="plan all blocks of the model instead of extrapolating from a few",
    )
    parser.add_argument("--json", metavar="FIT.json", help="write the figures here")
    parser.add_argument("--picture", metavar="FIT.svg", help="draw peak and throughput here")
    parser.set_defaults(run=run)


def read_vary(text: str) -> Vary:
    """``batch=0:0,1:0``: a name, and pairs of an input and a dimension."""
    name, _, places = text.partition("=")
    try:
        pairs = [tuple(map(int, place.split(":"))) for place in places.split(",")]
        found = tuple((argument, dimension) for argument, dimension in pairs)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write a name and pairs of an input and a dimension, as 'batch=0:0,1:0'"
        ) from error
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} has no name; write 'batch={places}'")
    return name, found


def run(given: argparse.Namespace) -> int:
    """Trace, plan, print, write."""
    from fxremat.whatif.device import absent
    from fxremat.whatif.fit import fit

    make = find_function(given.function)
    try:
        with absent(given.device):
            model, inputs = model_and_inputs(given.function, make())
            found = fit(
                model,
                inputs,
                vary=dict(given.vary),
                memory_budget=given.budget,
                optimizer=given.optimizer,
                whole=given.whole,
            )
    except FxrematError as error:
        raise UsageError(str(error)) from error
    print(table(found))
    if given.json is not None:
        files.write_json(given.json, asdict(found))
    if given.picture is not None:
        files.write_text(given.picture, found.picture())
    return 0 if any(row.size for row in found.rows) else 1


def table(found: Fit) -> str:
    """The bytes that are held, then a line for each size and way to train."""
    states = format_bytes(found.optimizer.states)
    lines = [
        f"{found.device}: {format_bytes(found.budget_bytes)}; weights "
        f"{format_bytes(found.weights_bytes)}, optimizer {states}, "
        f"held outside of the graph {format_bytes(found.held_bytes)}, "
        f"for tuning kernels in the first step {format_bytes(found.tuning_bytes)}",
        f"{'varies':<10} {'way':<20} {'largest':>10} {'peak':>12} {'step':>12} {'a second':>12} "
        f"{'at most':>18}",
    ]
    for row in found.rows:
        step = f"{row.time_us / 1e3:,.1f} ms" if row.size else "-"
        rate = f"{row.per_second:,.1f}" if row.size else "-"
        peak = format_bytes(row.peak_bytes + found.held_bytes) if row.size else "-"
        best = found.fastest(row.what, row.way)
        most = f"{best.per_second:,.1f} with {best.size:,}" if row.size else "-"
        lines.append(
            f"{row.what:<10} {row.way:<20} {row.size:>10,} {peak:>12} {step:>12} {rate:>12} "
            f"{most:>18}"
        )
    for row in found.rows:
        ours = found.at(row.what, row.size) if row.way == "checkpointed blocks" else None
        if ours is not None:
            lines.append(
                f"{row.what} {row.size:,}, the largest of {row.way}: {row.per_second:,.1f} "
                f"a second, fxremat {ours.per_second:,.1f}"
            )
    others = ", ".join(f"{name} {size}" for name, size in found.traced.items())
    lines.append(f"Each size with the others as given ({others}). Times are planned, not measured.")
    if found.studied_blocks != (found.blocks,):
        few = " and ".join(map(str, found.studied_blocks))
        lines.append(
            f"Peaks and times are extrapolated from steps with {few} of {found.blocks} blocks."
        )
    return "\n".join(lines)

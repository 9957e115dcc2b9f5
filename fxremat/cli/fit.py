"""``fit``: whether a step fits a card, and the largest batch or the longest sequence that does.

The card does not have to be in this machine, and no byte of the model is in memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fxremat.cli.arguments import Commands, UsageError, write_text
from fxremat.cli.step import Step, add_plan, add_step, explained, planned_for, step_of
from fxremat.errors import InfeasibleBudget
from fxremat.sizes import format_bytes

if TYPE_CHECKING:
    from fxremat.whatif.fit import Fit

Places = Sequence[tuple[int, int]]
AN_EXAMPLE = "write a name and pairs of an input and a dimension, as 'batch=0:0,1:0'"


@dataclass(frozen=True)
class AsGiven:
    """The step of the sizes that were given: the least it can take, and its plan if that fits."""

    least_bytes: int | None
    planned_bytes: int | None = None
    step_us: float | None = None


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "fit", help="whether a step fits a card, and the largest that does"
    )
    add_step(parser)
    add_plan(parser)
    parser.add_argument(
        "--vary",
        metavar="NAME[=INPUT:DIMENSION,...]",
        action="append",
        type=read_vary,
        help="a size, and the dimensions of the inputs that have it: batch=0:0,1:0; for a config: "
        "batch, which is the default, or length",
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="plan all blocks of the model instead of extrapolating from a few",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--picture", metavar="FIT.svg", help="draw peak and throughput here")
    parser.set_defaults(run=run)


def read_vary(text: str) -> tuple[str, Places]:
    """``batch=0:0,1:0``: a name, and pairs of an input and a dimension; or the name alone."""
    name, _, places = text.partition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} has no name; write 'batch={places}'")
    if name == text:
        return name, ()
    try:
        pairs = [tuple(map(int, place.split(":"))) for place in places.split(",")]
        return name, tuple((argument, dimension) for argument, dimension in pairs)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {AN_EXAMPLE}") from error


def run(given: argparse.Namespace) -> int:
    """Trace, plan, print, write."""
    from fxremat.whatif.fit import fit, optimizer_us

    with planned_for(given.device):
        step = step_of(given.step, given)
        found = fit(
            step.model,
            step.inputs,
            vary=_vary(step, given.vary),
            memory_budget=given.budget,
            optimizer=given.optimizer,
            whole=given.whole,
        )
        planned = _as_given(step, given, optimizer_us(found.optimizer))
    if given.json:
        print(json.dumps(_figures(step, found, planned)))
    else:
        print(_line_as_given(found, planned), table(found), sep="\n")
    if given.picture is not None:
        write_text(given.picture, found.picture())
    return 1 if planned.planned_bytes is None else 0


def _vary(step: Step, asked: Sequence[tuple[str, Places]] | None) -> dict[str, Places]:
    """What varies, with its places; of a config they are known."""
    names = asked or [(name, ()) for name in step.sizes][:1]
    if not names:
        raise UsageError(f"--vary says which dimensions of the inputs may vary: {AN_EXAMPLE}")
    for name, places in names:
        if not places and name not in step.sizes:
            known = f", or {' or '.join(step.sizes)}" if step.sizes else ""
            raise UsageError(f"--vary {name!r}: {AN_EXAMPLE}{known}")
    return {name: places or step.sizes[name] for name, places in names}


def _as_given(step: Step, given: argparse.Namespace, optimizer_us: float) -> AsGiven:
    """Plan the step as it is."""
    try:
        plan = explained(step, given)
    except InfeasibleBudget as refused:
        return AsGiven(refused.minimum_bytes)
    peak = max(graph.counted_peak_bytes for graph in plan.graphs)
    step_us = sum(graph.plan.time_us for graph in plan.graphs) + optimizer_us
    least = plan.minimum_peak_bytes
    return AsGiven(least, max(peak, least), step_us)  # graphs may take less than the optimizer


def _figures(step: Step, found: Fit, planned: AsGiven) -> dict[str, Any]:
    return {
        "step": step.name,
        "fits": planned.planned_bytes is not None,
        "least_bytes": planned.least_bytes,
        "planned_bytes": planned.planned_bytes,
        "step_ms": None if planned.step_us is None else planned.step_us / 1e3,
        **{f"largest_{row.what}": row.size for row in found.rows if row.way == "fxremat"},
        **asdict(found),
    }


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
        name = f"{row.what:<10} {row.way:<20} {row.size:>10,}"
        lines.append(f"{name} {peak:>12} {step:>12} {rate:>12} {most:>18}")
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
        some = f"{' and '.join(map(str, found.studied_blocks))} of {found.blocks} blocks"
        lines.append(f"Peaks and times are extrapolated from steps with {some}.")
    return "\n".join(lines)


def _line_as_given(found: Fit, planned: AsGiven) -> str:
    least, plain = (
        "not known" if nbytes is None else format_bytes(nbytes)
        for nbytes in (planned.least_bytes, found.plain_bytes)
    )
    others = f"least {least}, torch.compile {plain}"
    if planned.planned_bytes is None or planned.step_us is None:
        return f"does not fit into {format_bytes(found.budget_bytes)}: {others}"
    took = f"{format_bytes(planned.planned_bytes)}, {planned.step_us / 1e3:,.1f} ms a step"
    return f"fits: planned {took}; {others}"

"""Moving values to host memory: what it is worth in plans, and measured training steps.

    python -m benchmarks.offload plans --out benchmarks/results/offload_plans.json
    python -m benchmarks.offload plans --models llama-7b --layers 4 --links 12,25,55
    python -m benchmarks.offload measure --out benchmarks/results/offload_cpu.json

`plans` simulates: the training steps of large language models, traced without a byte of them, on
devices that are not here (`benchmarks.offload_plans`). By default a step has to fit its device with
the link that this has and, for the claims, in half of what store-all needs with one of 25 GB/s; the
whole takes about half an hour. With `--links` each link meets each budget.

`measure` trains a small model for real, with torch.compile, recomputing, and with moves as well
(`benchmarks.offload_measure`), and draws the streams of one step. On the CPU, which has no link,
copies are slowed down to one. `--device cuda` runs the same there; nobody has done so yet.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fxremat.planner import SOLVERS

from . import offload_measure, offload_plans
from .commands import parser_for, write_json
from .machine import describe_machine
from .models import MODELS, SIZES
from .offload_problems import ARCHITECTURES, DEVICES
from .offload_table import Row, claims_of, claims_text, overview, row_from_json
from .planner import describe, split


def known_rows(path: Path | None, add: bool) -> list[Row]:
    """What the file has, if it is to be added to."""
    if path is None or not add or not path.exists():
        return []
    return [row_from_json(row) for row in json.loads(path.read_text())["rows"]]


def plans_to_json(rows: Sequence[Row]) -> dict[str, Any]:
    """What the plans come to, and the plans."""
    return {"claims": asdict(claims_of(rows)), "rows": [row.to_json() for row in rows]}


def plans(options: argparse.Namespace) -> int:
    """All cases asked for; 1 where a plan fails the check, or both together are slower."""
    head = {"machine": describe(), "solver": options.solver} if options.out else {}
    rows = known_rows(options.out, options.add)
    devices = [its for its in DEVICES if its.name in options.devices]
    for architecture in (its for its in ARCHITECTURES if its.name in options.models):
        asked = offload_plans.questions(
            architecture, devices, options.layers, options.links, options.budgets
        )
        for question in asked:
            new = offload_plans.run(question, options.solver, options.select)
            rows = [row for row in rows if row.case.key != question.case.key] + new
            if options.out:
                write_json(options.out, {**head, **plans_to_json(rows)})
    claims = claims_of(rows)
    print(overview(rows))
    print(claims_text(claims))
    failed = sum(row.status == "FAILED" for row in rows)
    if failed:
        print(f"\nFAILED: {failed} of {len(rows)} rows")
    return int(bool(failed or claims.slower))


def measure(options: argparse.Namespace) -> int:
    """The measured steps; 1 where a promise is broken."""
    found = offload_measure.run(offload_measure.settings_of(options))
    print(offload_measure.text(found))
    if options.out:
        machine = describe_machine(options.device, options.threads)
        write_json(options.out, {"machine": machine, **offload_measure.to_json(found)})
        offload_measure.draw(found, options.out.with_suffix(".svg"))
    return int(bool(found.failures))


# -- the command line ------------------------------------------------------------------------


def _add_plans(commands: Any) -> None:
    parser = commands.add_parser("plans", help="simulated steps of large models")
    add, names = parser.add_argument, [its.name for its in ARCHITECTURES]
    devices, budgets = [its.name for its in DEVICES], [*offload_plans.BUDGETS]
    add("--models", type=split, default=names, help=f"of {', '.join(names)}")
    add("--devices", type=split, default=devices, help=f"of {', '.join(devices)}")
    add("--layers", type=int, help="of each model; default: as many as it has")
    add("--links", type=split, help="GB/s, as in 12,25,55; default: see above")
    add("--budgets", type=split, default=budgets, help="of device, 50%% (of store-all's peak)")
    add("--solver", choices=sorted(SOLVERS), default="greedy")
    add("--select", action="store_true", help="also choose which weights live in host memory")
    add("--out", type=Path, help="JSON file")
    add("--add", action="store_true", help="keep what the file has of other cases")
    parser.set_defaults(run=plans)


def _add_measure(commands: Any) -> None:
    parser = commands.add_parser("measure", help="measured steps of a small model")
    add = parser.add_argument
    add("--model", choices=sorted(MODELS), default="gpt")
    add("--size", choices=SIZES, default="small")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", default="float32")
    add("--executor", choices=("inductor", "aot_eager"), default="inductor")
    add("--budget", type=int, default=36, metavar="PERCENT", help="of torch.compile's peak; 36")
    add("--bandwidth", type=int, default=800, metavar="MB/S", help="of copies on the CPU; 800")
    add("--solver", choices=sorted(SOLVERS), default="greedy")
    add("--rounds", type=int, default=9, help="rounds of timed steps, variants in turn")
    add("--steps", type=int, default=3, help="timed steps of each variant in a round")
    add("--threads", type=int, default=1, help="that compute; 1")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="JSON file; a picture is written beside it")
    parser.set_defaults(run=measure)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for("benchmarks.offload", __doc__)
    commands = parser.add_subparsers(required=True, metavar="plans | measure")
    _add_plans(commands)
    _add_measure(commands)
    options = parser.parse_args(arguments)
    if options.run is plans:
        _check_names(parser, options)
    return options


def _check_names(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    known = {
        "models": [its.name for its in ARCHITECTURES],
        "devices": [its.name for its in DEVICES],
        "budgets": [*offload_plans.BUDGETS],
    }
    for name, choices in known.items():
        if unknown := sorted(set(getattr(options, name)) - set(choices)):
            parser.error(f"unknown {name} {unknown}; there are {', '.join(choices)}")
    if options.links is not None:
        try:
            options.links = [offload_plans.link_of(text) for text in options.links]
        except ValueError:
            parser.error(f"--links {','.join(options.links)}: write GB/s, as in 12,25,55")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and write."""
    options = parse(arguments)
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())

"""Compare fxremat with eager, torch.compile, its knob and checkpointing, side by side.

    python -m benchmarks --models gpt,vit --size small --rounds 5 --out results/cpu.json

writes the figures as JSON and, beside it, a picture (SVG). With `--check-steps 20` nothing is
timed: every variant trains for 20 steps, and its losses and gradients are compared with compile's.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .checking import agreement_table, check_case
from .commands import parser_for, write_json
from .machine import describe_machine, live_workers
from .models import MODELS, SIZES
from .picture import Point, draw, points_of
from .rows import table
from .runner import Case, Timing, run_case
from .ways import VARIANTS, choose_variants


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = parser_for("benchmarks", __doc__)
    add = parser.add_argument
    add("--models", default="gpt", help=f"of {', '.join(MODELS)}; or all")
    add("--size", choices=SIZES, default="small")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", help="default: float32, for size gpu bfloat16")
    add(
        "--variants",
        default="all",
        help="names or kinds, of " + ", ".join(VARIANTS).replace("%", "%%"),
    )
    add("--rounds", type=int, default=5, help="rounds of timed steps")
    add("--steps", type=int, default=3, help="timed steps of each variant in a round")
    add("--live", type=int, help="workers alive at once; default: what memory allows")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--seed", type=int, default=0)
    add("--warm-caches", action="store_true", help="share Inductor's cache: quicker")
    add("--out", type=Path, help="JSON file; a picture is written beside it")
    add("--check-steps", type=int, metavar="N", help="compare N training steps, time nothing")
    add("--optimizer", choices=("sgd", "adamw"), default="sgd", help="for --check-steps")
    return parser.parse_args()


def cases(options: argparse.Namespace) -> list[Case]:
    """The models asked for."""
    names = list(MODELS) if options.models == "all" else options.models.split(",")
    unknown = set(names) - set(MODELS)
    if unknown:
        raise SystemExit(f"unknown models {sorted(unknown)}; there are {', '.join(MODELS)}")
    dtype = options.dtype or ("bfloat16" if options.size == "gpu" else "float32")
    return [
        Case(name, options.size, options.device, dtype, options.seed, options.threads)
        for name in names
    ]


def main() -> None:
    """Run, print, and write."""
    options = parse_arguments()
    if options.check_steps:
        check(options)
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Peaks and times of all variants on all models."""
    live = options.live or live_workers(options.device)
    timing = Timing(options.rounds, options.steps, live, options.warm_caches)
    variants = choose_variants(options.variants)
    result: dict[str, Any] = {
        "machine": describe_machine(options.device, options.threads),
        "timing": asdict(timing),
        "results": [],
    }
    panels: dict[str, list[Point]] = {}
    for case in cases(options):
        rows = run_case(case, variants, timing)
        print(
            f"\n{case.model} ({case.size}, {case.device}, {case.dtype})\n{table(rows)}", flush=True
        )
        result["results"].append({**asdict(case), "rows": [row.to_json() for row in rows]})
        panels[title(case)] = points_of(rows)
        if options.out:
            write(options.out, result, panels)


def title(case: Case) -> str:
    """Of a panel."""
    return f"{case.model}, {case.size}, {case.dtype} on {case.device}"


def write(path: Path, result: dict[str, Any], panels: dict[str, list[Point]]) -> None:
    """The JSON file, and the picture beside it."""
    write_json(path, result)
    draw({name: points for name, points in panels.items() if points}, path.with_suffix(".svg"))


def check(options: argparse.Namespace) -> None:
    """Training steps against compile's; exits with 1 if fxremat disagrees anywhere."""
    failed = False
    variants = choose_variants(options.variants)
    for case in cases(options):
        agreements = check_case(case, variants, options.check_steps, options.optimizer)
        print(
            f"\n{case.model} ({case.size}, {case.device}, {case.dtype}), {options.check_steps} ",
            end="",
        )
        print(f"steps of {options.optimizer}\n{agreement_table(agreements)}", flush=True)
        failed |= any(not a.agrees for a in agreements if VARIANTS[a.variant].kind == "fxremat")
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()

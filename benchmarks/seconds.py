"""Seconds: planned against measured, at what peak, and what compiling takes.

    python -m benchmarks.seconds --models gpt6,llama,resnet --rounds 9 --out results/seconds.json

For every model: `torch.compile`; torch's own knob at all its values; fxremat at parts of
`torch.compile`'s peak, with and without operator variants, and at the knob's lowest peak. A
planned time is relative to store-all's, a measured one to `torch.compile`'s in the same round.
Compiling is timed with empty caches ("cold") and again in a new process ("warm").
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fxremat.report.pictures import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    draw_captions,
    draw_grid,
    draw_line,
    draw_text,
    make_axis,
    svg,
)

from .machine import describe_machine, live_workers
from .models import MODELS, SIZES
from .rows import Row, format_table
from .runner import Case, Runner, Timing
from .ways import FXREMAT_FRACTIONS, VARIANTS, Variant

PARTS = tuple(f"{fraction:.0%}" for fraction in FXREMAT_FRACTIONS)
HEAD = ["model", "way", "peak", "obeyed", "planned", "measured", "best", "points", "cold", "warm"]


@dataclass(frozen=True)
class Figures:
    """One way to run one model; ratios are to `torch.compile`'s, ``planned`` is to store-all's."""

    model: str
    way: str
    kind: str
    peak: float | None
    obeyed: bool | None
    planned: float | None
    measured: float | None
    best: float | None
    cold: float | None
    warm: float | None
    stages: Mapping[str, float]
    error: str | None

    @property
    def points(self) -> float | None:
        """By how many points of a hundred the measured time is above the planned one."""
        if self.planned is None or self.measured is None:
            return None
        return 100 * (self.measured - self.planned)


class SecondsRunner(Runner):
    """Compares ways, and compiles each a second time with the caches of the first."""

    def figures(self, variants: list[Variant]) -> list[Figures]:
        """Of all ways; compile's among them."""
        rows = self.compare(variants)
        base = self.rows["compile"]
        return [_figures(self.case.model, row, base, self._warm_seconds(row)) for row in rows]

    def _warm_seconds(self, row: Row) -> float | None:
        if row.peak_bytes is None or self.timing.warm_caches:
            return None
        with self.start(VARIANTS[row.variant]) as worker:
            answer = worker.ask("prepare", budget=row.budget_bytes)
        seconds: float | None = answer.get("compile_seconds")
        return seconds


def _figures(model: str, row: Row, base: Row, warm: float | None) -> Figures:
    def part(mine: float | None, of: float | None) -> float | None:
        return mine / of if mine is not None and of else None

    best = min(map(min, row.step_seconds)) if row.step_seconds else None
    return Figures(
        model=model,
        way=row.variant,
        kind=row.kind,
        peak=part(row.peak_bytes, base.peak_bytes),
        obeyed=row.obeyed,
        planned=row.planned_ratio,
        measured=row.time_ratio,
        best=part(best, min(map(min, base.step_seconds)) if base.step_seconds else None),
        cold=part(row.compile_seconds, base.compile_seconds),
        warm=part(warm, base.compile_seconds),
        stages=row.report["seconds"] if row.report else {},
        error=row.error,
    )


def ways(parts: Sequence[str], *, knob: bool, bare: bool) -> list[Variant]:
    """What is compared: parts of the peak, the knob and its lowest peak, and without variants."""
    names = [f"fxremat{part}" for part in parts]
    names += [f"plain{part}" for part in parts] if bare else []
    chosen = [VARIANTS[name] for name in names]
    if knob:
        knobs = [variant for variant in VARIANTS.values() if variant.kind == "knob"]
        chosen = [*knobs, *chosen, VARIANTS["fxremat@knob"]]
    return chosen


def table(figures: Iterable[Figures]) -> str:
    """All figures, one way a line."""

    def number(value: float | None, form: str = ".3f") -> str:
        return "" if value is None else format(value, form)

    def line(one: Figures) -> list[str]:
        obeyed = {None: "", True: "yes", False: "NO"}[one.obeyed]
        times = map(number, (one.planned, one.measured, one.best))
        compiling = [number(one.cold, ".2f"), number(one.warm, ".2f")]
        points = number(one.points, "+.1f")
        return [one.model, one.way, number(one.peak, ".2f"), obeyed, *times, points, *compiling]

    return format_table([HEAD, *map(line, figures)])


def summary(figures: Sequence[Figures]) -> str:
    """What the promise comes to: how true seconds are, and what a step and compiling take."""
    ours = [one for one in figures if one.kind == "fxremat"]
    off = [abs(one.points) for one in ours if one.points is not None]
    lines = []
    if off:
        worst = f"worst {max(off):.1f}"
        lines.append(f"planned against measured: median {median(off):.1f} points, {worst}")
    groups = sorted({one.way for one in ours})
    for way in groups:
        times = [one.measured for one in ours if one.way == way and one.measured]
        cold = [one.cold for one in ours if one.way == way and one.cold]
        if times:
            lines.append(
                f"{way}: step {_mean(times):.3f} (worst {max(times):.3f}), "
                f"compile {_mean(cold):.2f} (worst {max(cold):.2f}) of torch.compile's"
            )
    return "\n".join(lines)


def _mean(ratios: Sequence[float]) -> float:
    """The geometric mean."""
    return exp(sum(map(log, ratios)) / len(ratios)) if ratios else float("nan")


def picture(figures: Sequence[Figures]) -> str:
    """Planned against measured step time, one mark for each way of fxremat."""
    marks = [
        (one, one.planned, one.measured)
        for one in figures
        if one.planned is not None and one.measured is not None
    ]
    values = [value for _, planned, measured in marks for value in (planned, measured)]
    across = make_axis(values, LEFT, WIDTH - RIGHT)
    up = make_axis(values, HEIGHT - BOTTOM, TOP)
    low, high = min(values), max(values)
    parts = [*draw_grid(across, up), *draw_captions("Step time", "planned", "measured")]
    parts.append(draw_line("leader", across(low), up(low), across(high), up(high)))
    for one, planned, measured in marks:
        x, y = across(planned), up(measured)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="#0072b2"/>')
        parts.append(draw_text(x + 6, y + 4, f"{one.model} {one.way}", 'class="label"'))
    return svg(["\n".join(parts)])


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.seconds", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--models", default="gpt6", help=f"of {', '.join(MODELS)}; or all")
    add("--size", choices=SIZES, default="small")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", default="float32")
    add(
        "--parts",
        default="80%,50%,33%",
        help=f"of torch.compile's peak: {', '.join(PARTS)}".replace("%", "%%"),
    )
    add("--knob", action="store_true", help="torch's own knob too, and fxremat at its lowest peak")
    add("--bare", action="store_true", help="also without operator variants")
    add("--rounds", type=int, default=9, help="rounds of timed steps")
    add("--steps", type=int, default=1, help="timed steps of each way in a round")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--seed", type=int, default=0)
    add("--warm-caches", action="store_true", help="share Inductor's cache: compiling is not timed")
    add("--out", type=Path, help="JSON file; a picture is written beside it")
    options = parser.parse_args(arguments)
    unknown = set(options.parts.split(",")) - set(PARTS)
    if unknown:
        raise SystemExit(f"unknown parts {sorted(unknown)}; there are {', '.join(PARTS)}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and write."""
    options = parse_arguments(arguments)
    names = list(MODELS) if options.models == "all" else options.models.split(",")
    unknown = set(names) - set(MODELS)
    if unknown:
        raise SystemExit(f"unknown models {sorted(unknown)}; there are {', '.join(MODELS)}")
    timing = Timing(
        options.rounds, options.steps, live_workers(options.device), options.warm_caches
    )
    chosen = ways(options.parts.split(","), knob=options.knob, bare=options.bare)
    found: list[Figures] = []
    for name in names:
        case = Case(
            name, options.size, options.device, options.dtype, options.seed, options.threads
        )
        with tempfile.TemporaryDirectory(prefix="fxremat-benchmark-") as folder:
            found += SecondsRunner(case, timing, Path(folder)).figures(chosen)
        print(f"\n{table(found)}\n\n{summary(found)}", flush=True)
        if options.out:
            write(options.out, found, timing, describe_machine(options.device, options.threads))


def write(path: Path, found: Sequence[Figures], timing: Timing, machine: Mapping[str, Any]) -> None:
    """The JSON file, and the picture beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figures = [{**asdict(one), "points": one.points} for one in found]
    data = {"machine": machine, "timing": asdict(timing), "figures": figures}
    path.write_text(json.dumps(data, indent=1) + "\n")
    if any(one.points is not None for one in found):
        path.with_suffix(".svg").write_text(picture(found))


if __name__ == "__main__":
    main()

"""By hand: is a step ever slower than what one would write oneself, at the same bytes?

    python -m benchmarks.by_hand --models gpt12,llama8 --json results/by_hand.json

For every model: `torch.compile`; each block checkpointed; a checkpoint of each block that saves
what matmuls and attention give; torch's own knob at all its values, of which the one of least peak
counts; and fxremat at the bytes of each of these. With `--parts` also at parts of
`torch.compile`'s peak, with `--bare` at each budget without operator variants as well.

A measured time is relative to `torch.compile`'s in the same round, a planned one to store-all's;
``against`` is that of fxremat over that of the way whose bytes it was given. Intervals hold the
median with 95 %, whatever the distribution. Gradients are compared with `torch.compile`'s; those of
the knob are wrong where a model has dropout: none of the eight models has any.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fxremat.report.front import (
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

from .commands import parser_for, write_json
from .machine import describe_machine, live_workers
from .models import MODELS, SIZES
from .rows import Row, format_table, mib, number, yes_no
from .runner import Case, Timing, run_case
from .ways import FXREMAT_FRACTIONS, VARIANTS, Variant

EIGHT = "gpt12,gpt6,llama8,vit,encdec,mixer,resnet,unet"
PARTS = tuple(f"{fraction:.0%}" for fraction in FXREMAT_FRACTIONS)
HEAD = ["model", "way", "MiB", "obeyed", "planned", "measured", "interval", "against", "interval"]
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A median, and the order statistics that hold the true one with `CONFIDENCE`."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval | None:
        """None of nothing. With fewer than six values it is all of them."""
        if not values:
            return None
        ordered, n = sorted(values), len(values)
        left_out = max(
            (k for k in range((n + 1) // 2) if 2 * _tail(n, k) <= 1 - CONFIDENCE), default=0
        )
        return cls(median(ordered), ordered[left_out], ordered[n - 1 - left_out])


def _tail(n: int, k: int) -> float:
    """The probability that at most ``k`` of ``n`` values are below their median."""
    return float(sum(comb(n, below) for below in range(k + 1)) / 2**n)


@dataclass(frozen=True)
class Figures:
    """One way to run one model. ``rival`` names the way whose bytes fxremat was given."""

    model: str
    way: str
    kind: str
    bytes: int | None
    budget: int | None
    obeyed: bool | None
    planned: float | None
    measured: Interval | None
    rival: str | None
    against: Interval | None
    gradient_error: float | None
    error: str | None

    @property
    def points(self) -> float | None:
        """By how many points of a hundred the measured time is above the planned one."""
        if self.planned is None or self.measured is None:
            return None
        return 100 * (self.measured.median - self.planned)


def figures_of(model: str, rows: Sequence[Row]) -> list[Figures]:
    """Of all ways; the knob's at other values than that of its least peak are left out."""
    rival_of = _rivals(rows)
    knobs = [row for row in rows if row.kind == "knob"]
    left_out = {row.variant for row in knobs} - {rival_of.get("knob")}
    by_name = {row.variant: row for row in rows}
    found = []
    for row in rows:
        rival = rival_of.get(VARIANTS[row.variant].at or "")
        against = None
        if rival is not None and row.time_ratios:
            pairs = zip(row.time_ratios, by_name[rival].time_ratios, strict=True)
            against = Interval.of([ours / theirs for ours, theirs in pairs])
        if row.variant not in left_out:
            found.append(_figures(model, row, rival, against))
    return found


def _rivals(rows: Sequence[Row]) -> dict[str, str]:
    """Of each kind of way, the one of least peak, which fxremat is given the bytes of."""
    measured = [row for row in rows if row.counted_bytes is not None and row.kind != "fxremat"]
    ordered = sorted(measured, key=lambda row: row.counted_bytes or 0, reverse=True)
    return {row.kind: row.variant for row in ordered}


def _figures(model: str, row: Row, rival: str | None, against: Interval | None) -> Figures:
    return Figures(
        model=model,
        way=row.variant,
        kind=row.kind,
        bytes=row.counted_bytes,
        budget=row.budget_bytes,
        obeyed=row.obeyed,
        planned=row.planned_ratio,
        measured=Interval.of(row.time_ratios),
        rival=rival,
        against=against,
        gradient_error=row.gradient_error,
        error=row.error,
    )


def ways(parts: Sequence[str], *, bare: bool) -> list[Variant]:
    """What is compared: all that one does by hand, and fxremat at the bytes of each."""
    by_hand = [v for v in VARIANTS.values() if v.kind in ("checkpoint", "selective", "knob")]
    matched = [v for v in VARIANTS.values() if v.at in ("compile", *{v.kind for v in by_hand})]
    asked = [VARIANTS[f"fxremat{part}"] for part in parts]
    asked += [VARIANTS[f"plain{part}"] for part in parts if bare]
    return [*by_hand, *(v for v in matched if bare or not v.options), *asked]


def table(figures: Iterable[Figures]) -> str:
    """All figures, one way a line."""

    def cells(found: Interval | None) -> list[str]:
        return ["", ""] if found is None else [number(found.median, ".3f"), _range(found)]

    def line(one: Figures) -> list[str]:
        times = [number(one.planned, ".3f"), *cells(one.measured), *cells(one.against)]
        return [one.model, one.way, mib(one.bytes), yes_no(one.obeyed), *times]

    return format_table([HEAD, *map(line, figures)])


def _range(found: Interval) -> str:
    return f"{found.low:.3f}-{found.high:.3f}"


def summary(figures: Sequence[Figures]) -> str:
    """Whether fxremat is slower anywhere, and how true planned times are."""
    matched = [(one, one.against) for one in figures if one.against is not None]
    slower = [f"{one.model} {one.way} {_range(it)}" for one, it in matched if it.low > 1]
    lines = [f"slower than by hand: {len(slower)} of {len(matched)} {'; '.join(slower)}".rstrip()]
    for kind in dict.fromkeys(VARIANTS[one.way].at for one, _ in matched):
        times = [it.median for one, it in matched if VARIANTS[one.way].at == kind]
        lines.append(f"at the bytes of {kind}: median {median(times):.3f}, worst {max(times):.3f}")
    off = [one.points for one in figures if one.kind == "fxremat" and one.points is not None]
    if off:
        lines.append(
            f"measured above planned: median {median(off):+.1f} points, "
            f"from {min(off):+.1f} to {max(off):+.1f}"
        )
    return "\n".join(lines)


def picture(figures: Sequence[Figures]) -> str:
    """Planned against measured step time, one mark for each way of fxremat."""
    marks = [
        (one, one.planned, one.measured.median)
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
    parser = parser_for("benchmarks.by_hand", __doc__)
    add = parser.add_argument
    add("--models", default=EIGHT, help=f"of {', '.join(MODELS)}")
    add("--size", choices=SIZES, default="small")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", default="float32")
    add(
        "--parts",
        default="",
        help=f"of torch.compile's peak, too: {', '.join(PARTS)}".replace("%", "%%"),
    )
    add("--bare", action="store_true", help="also without operator variants")
    add("--rounds", type=int, default=9, help="rounds of timed steps")
    add("--steps", type=int, default=1, help="timed steps of each way in a round")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--seed", type=int, default=0)
    add("--json", type=Path, help="JSON file; a picture is written beside it")
    options = parser.parse_args(arguments)
    options.parts = [part for part in options.parts.split(",") if part]
    options.models = options.models.split(",")
    for words, known in ((options.parts, PARTS), (options.models, MODELS)):
        unknown = set(words) - set(known)
        if unknown:
            parser.error(f"no {sorted(unknown)}; there are {', '.join(known)}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and write."""
    options = parse_arguments(arguments)
    live, together = live_workers(options.device), options.threads
    timing = Timing(options.rounds, options.steps, live, together=together)
    found: list[Figures] = []
    for name in options.models:
        case = Case(
            name, options.size, options.device, options.dtype, options.seed, options.threads
        )
        found += figures_of(name, run_case(case, ways(options.parts, bare=options.bare), timing))
        print(f"\n{table(found)}\n\n{summary(found)}", flush=True)
        if options.json:
            write(options.json, found, timing, describe_machine(options.device, options.threads))


def write(path: Path, found: Sequence[Figures], timing: Timing, machine: Mapping[str, Any]) -> None:
    """The JSON file, and the picture beside it."""
    figures = [{**asdict(one), "points": one.points} for one in found]
    data = {"machine": machine, "timing": asdict(timing), "figures": figures}
    write_json(path, data)
    if any(one.points is not None for one in found):
        path.with_suffix(".svg").write_text(picture(found))


if __name__ == "__main__":
    main()

"""Seconds: how long until steps are steady, and until a budget that cannot be met is refused?

    python -m benchmarks.seconds --models gpt12,resnet --json results/seconds.json

For every model, in processes of their own and in turn: plain `torch.compile`, fxremat at a part of
plain's peak, and fxremat under an impossible budget. First with empty caches ("cold"), then plain
and fxremat again in new processes with what those have left behind ("warm"). Seconds are those of
the first five steps together, less five steady ones. Ratios are to plain's in the same round and
with caches in the same state, a refusal's to plain's cold seconds.

Models of other libraries need what the extra `architectures` installs. Rows are written as they
end, and a model that the file has is not measured again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from .commands import parser_for, write_json
from .first_steps import FIRST, MODELS
from .machine import describe_machine
from .rows import format_table, number
from .runner import ROOT, environment

HEAD = ["model", "plain s", "cold s", "cold", "plain s", "warm s", "warm", "refused s", "refused"]


@dataclass
class Seconds:
    """What one model took, by round; ``budget`` and peaks in bytes.

    ``error`` is the first thing that went wrong; what was measured before it is kept.
    """

    model: str
    budget: int | None = None
    peak: int | None = None
    least: int | None = None
    plain_cold: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    plain_warm: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    error: str | None = None

    def ratio(self, ours: str) -> float | None:
        """Of ``cold``, ``warm`` or ``refused`` to plain's, the median over rounds."""
        plain = self.plain_warm if ours == "warm" else self.plain_cold
        pairs = list(zip(getattr(self, ours), plain, strict=False))
        return median(mine / theirs for mine, theirs in pairs) if pairs else None


def until_steady(answer: Mapping[str, Any]) -> float:
    """Seconds of the first steps beyond as many steady ones."""
    steps: list[float] = answer["steps"]
    return sum(steps[:FIRST]) - FIRST * median(steps[FIRST:])


class Failed(Exception):
    """A process ended without an answer."""


def ask(model: str, way: str, cache: Path, budget: int | None = None) -> dict[str, Any]:
    """What a process of its own says. Raises `Failed`."""
    command = [sys.executable, "-m", "benchmarks.first_steps", model, way]
    command += [] if budget is None else [str(budget)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(cache), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Failed(f"{way}: {' '.join(done.stderr.strip().splitlines()[-1:])}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if "error" in answer:
        raise Failed(f"{way}: {answer['error']}")
    return answer


def measure(model: str, part: float, rounds: int) -> Seconds:
    """Each way in turn, round by round."""
    found = Seconds(model)
    try:
        for _ in range(rounds):
            with tempfile.TemporaryDirectory(prefix="fxremat-benchmark-") as folder:
                _round(found, part, Path(folder))
    except Failed as failed:
        found.error = str(failed)
    return found


def _round(found: Seconds, part: float, folder: Path) -> None:
    model, plain_cache, cache = found.model, folder / "plain", folder / "fxremat"
    plain = ask(model, "plain", plain_cache)
    found.plain_cold.append(until_steady(plain))
    found.budget = found.budget or int(part * plain["peak_bytes"])
    ours = ask(model, "fxremat", cache, found.budget)
    found.cold.append(until_steady(ours))
    found.peak = max(found.peak or 0, ours["peak_bytes"])
    found.plain_warm.append(until_steady(ask(model, "plain", plain_cache)))
    found.warm.append(until_steady(ask(model, "fxremat", cache, found.budget)))
    refused = ask(model, "refused", folder / "refused")
    found.refused.append(refused["seconds"])
    found.least = refused["least_bytes"]


def table(rows: Sequence[Seconds]) -> str:
    """One model a line: seconds, each the median over rounds, and ratios to plain's."""

    def line(row: Seconds) -> list[str]:
        cells = [row.model]
        for plain, ours in ((row.plain_cold, "cold"), (row.plain_warm, "warm")):
            mine = getattr(row, ours)
            cells += [number(median(x) if x else None, ".1f") for x in (plain, mine)]
            cells.append(number(row.ratio(ours), ".2f"))
        refused = median(row.refused) if row.refused else None
        return [*cells, number(refused, ".1f"), number(row.ratio("refused"), ".2f")]

    remarks = [f"  {row.model}: {row.error}" for row in rows if row.error]
    remarks += [
        f"  {row.model}: took {row.peak} of {row.budget} bytes"
        for row in rows
        if row.peak is not None and row.budget is not None and row.peak > row.budget
    ]
    return "\n".join([format_table([HEAD, *map(line, rows)]), *remarks])


def summary(rows: Sequence[Seconds]) -> str:
    """Median and worst ratio of each kind."""
    lines = []
    for kind in ("cold", "warm", "refused"):
        ratios = [ratio for row in rows if (ratio := row.ratio(kind)) is not None]
        if ratios:
            lines.append(f"{kind}: median {median(ratios):.2f}, worst {max(ratios):.2f} of plain's")
    return "\n".join(lines)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for("benchmarks.seconds", __doc__)
    add = parser.add_argument
    add("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    add("--part", type=float, default=0.6, help="of plain's peak: the budget")
    add("--rounds", type=int, default=1)
    add("--json", type=Path, help="the file for the rows")
    options = parser.parse_args(arguments)
    options.models = options.models.split(",")
    unknown = set(options.models) - set(MODELS)
    if unknown:
        parser.error(f"no {sorted(unknown)}; there are {', '.join(MODELS)}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and write."""
    options = parse_arguments(arguments)
    rows: dict[str, Seconds] = {}
    if options.json and options.json.exists():
        known = json.loads(options.json.read_text())["rows"]
        rows = {each["model"]: Seconds(**each) for each in known}
    for name in options.models:
        if name in rows and not rows[name].error:
            continue
        rows[name] = measure(name, options.part, options.rounds)
        found = list(rows.values())
        print(f"\n{table(found)}\n\n{summary(found)}", flush=True)
        if options.json:
            machine = describe_machine("cpu", torch.get_num_threads())
            data = {"machine": machine, "rows": [asdict(row) for row in found]}
            write_json(options.json, data)


if __name__ == "__main__":
    main()

"""Whole training loops on a GPU, the most telling first, until the minutes are over.

    python -m benchmarks.gpu [MODULE:FUNCTION or FILE.py:FUNCTION ...] --out FILE [--minutes 9]
                             [--ways NAME,...] [--together 6] [--plans FOLDER]

The models are those of `benchmarks.loops`. Each row trains one of them for six steps with fused
AdamW, in a process of its own: plain torch.compile, fxremat at a part of what that reserves, each
block checkpointed, fxremat at the peak of that, checkpoints that save matmuls and attention, and
torch's own option. Rows compile together; then each is timed alone. They are written as they end,
and those that are in FILE already are not run again: a run that was stopped goes on.

FOLDER has plans that were made without a GPU (`make gpu-plans`): budgets, and the caches.

    python -m benchmarks.gpu --table FILE [--into docs/benchmarks.md]

prints the table of such a file, or puts it between the marks of a document. Exits with 1 if a
budget was not obeyed or a row failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any

import torch

from .commands import parser_for, write_json
from .loops.rows import models_asked
from .machine import describe_machine
from .readme_table import put_into
from .rows import format_table, mib, number
from .runner import Process

WAYS = ("plain", "fxremat60%", "checkpoint", "fxremat@checkpoint", "save_matmuls", "knob")
"""In the order of their importance."""
ROUNDS = 10
"""Of timed steps."""
MARKS = "<!-- gpu loops: begin -->", "<!-- gpu loops: end -->"
HEAD = ["model", "way", "status", "budget", "promised", "reserved", "allocated", "step ms", "time",
        "planned", "first step s"]  # fmt: skip

Row = dict[str, Any]


@dataclass
class Rows:
    """What is known, by model and way; written to a file with each row that ends."""

    head: dict[str, Any]
    out: Path | None
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)

    def read(self) -> None:
        """Know what an earlier run has written, but for what failed or was not timed."""
        if self.out is not None and self.out.exists():
            for row in json.loads(self.out.read_text())["rows"]:
                if row["status"] == "refused" or row.get("step_ms"):
                    self.rows[row["model"], row["way"]] = row

    def keep(self, row: Row) -> None:
        """One more."""
        self.rows[row["model"], row["way"]] = row
        if self.out is not None:
            write_json(self.out, {**self.head, "rows": list(self.rows.values())})

    def budget(self, model: str, way: str, planned: dict[str, int]) -> int | None:
        """Bytes of a row; None for a way without one. Raises `KeyError` where not known yet."""
        if not way.startswith("fxremat"):
            return None
        if way == "fxremat@checkpoint":
            return int(self.rows[model, "checkpoint"]["reserved"])
        if model in planned:
            return planned[model]
        part = float(way.removeprefix("fxremat").removesuffix("%")) / 100
        return int(part * self.rows[model, "plain"]["reserved"])


def cells(row: Row, plain: Row | None) -> list[str]:
    """A line of the table; bytes in MiB."""
    ms = median(row["step_ms"]) if row.get("step_ms") else None
    other = median(plain["step_ms"]) if plain and plain.get("step_ms") else None
    return [
        row["model"],
        row["way"],
        row["status"],
        mib(row["budget"]),
        mib(row.get("promised") or row.get("least")),
        mib(row.get("reserved")),
        mib(row.get("allocated")),
        number(ms, ".1f"),
        number(ms / other if ms and other else None, ".3f"),
        number(row.get("planned"), ".3f"),
        number(row.get("first_step_seconds"), ".0f"),
    ]


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """Of the table: models together, in the order of their first rows."""
    plain = {row["model"]: row for row in rows if row["way"] == "plain"}
    models = list(dict.fromkeys(row["model"] for row in rows))
    ordered = sorted(rows, key=lambda row: (models.index(row["model"]), WAYS.index(row["way"])))
    return [HEAD, *(cells(row, plain.get(row["model"])) for row in ordered)]


def markdown(found: dict[str, Any]) -> str:
    """The table of a document, and where it comes from."""
    head, *body = lines(found["rows"])
    table = [head, ["---"] * len(head), *body]
    machine = found["machine"]
    origin = f"{machine['device']}, {machine['date'][:10]}, torch {machine['torch']}; bytes in MiB."
    return "\n".join([origin, "", *("| " + " | ".join(line) + " |" for line in table), ""])


@dataclass
class Benchmark:
    """The rows that are still to run, and how."""

    rows: Rows
    options: argparse.Namespace
    ends: float
    folder: Path
    planned: dict[str, int] = field(default_factory=dict)
    tried: set[tuple[str, str]] = field(default_factory=set)

    def run(self) -> None:
        """Groups of rows until the time, or the work, is over."""
        while time.monotonic() < self.ends and (group := self._next_group()):
            self._run_group(group)

    def _next_group(self) -> list[Row]:
        """The first rows that can run: those whose budget is known."""
        found: list[Row] = []
        for way in self.options.ways:
            for model in self.options.models:
                if (model, way) in {*self.rows.rows, *self.tried}:
                    continue
                try:
                    budget = self.rows.budget(model, way, self.planned)
                except (KeyError, TypeError):
                    continue  # what it is a part of has not run, or failed
                found.append({"model": model, "way": way, "budget": budget})
        return found[: self.options.together]

    def _run_group(self, group: Sequence[Row]) -> None:
        """Compile and train together, then time one after the other."""
        self.tried |= {(row["model"], row["way"]) for row in group}
        with ExitStack() as stack, ThreadPoolExecutor(len(group)) as pool:
            workers = [stack.enter_context(self._start(row)) for row in group]
            stop = Timer(self.ends - time.monotonic(), _kill(workers))
            stop.start()
            stack.callback(stop.cancel)
            pairs = zip(workers, group, strict=True)
            asked = {pool.submit(worker.ask, "train"): row for worker, row in pairs}
            for answer in as_completed(asked):
                row = asked[answer]
                if time.monotonic() < self.ends:
                    row |= {"status": "failed", **answer.result()}
                    self.rows.keep(row)
                    print("  ".join(filter(None, cells(row, None))), flush=True)
            for row, worker in zip(group, workers, strict=True):
                if row.get("status") in ("ok", "over") and time.monotonic() < self.ends:
                    timed = worker.ask("time", rounds=ROUNDS)
                    if time.monotonic() < self.ends:
                        self.rows.keep(row | timed)
                worker.process.kill()

    def _start(self, row: Row) -> Process:
        settings = {**row, "device": self.options.device, "op_times": "auto"}
        cache: Path | None = self.folder / f"{row['model'].replace('/', '_')}.{row['way']}"
        if self.options.plans is not None:  # they were made with times that are computed
            settings["op_times"], cache = "roofline", self.options.plans / "cache"
        log = self.folder / f"{len(self.tried)}.{row['way']}.{id(row)}.log"
        return Process("benchmarks.gpu_worker", settings, cache, log)


def _kill(workers: Sequence[Process]) -> Callable[[], None]:
    def kill() -> None:
        for worker in workers:
            worker.process.kill()

    return kill


def budgets_of(folder: Path | None) -> dict[str, int]:
    """Of the plans in a folder, by model."""
    if folder is None:
        return {}
    rows = json.loads((folder / "loops.json").read_text())["rows"]
    return {row["model"]: row["budget"] for row in rows if row["loop"] == "adamw_fused"}


def failures(rows: Sequence[Row]) -> Iterator[str]:
    """What is wrong, in words; a refusal is not."""
    for row in rows:
        name = f"{row['model']} {row['way']}"
        if row["status"] == "over":
            yield f"{name}: {mib(row['reserved'])} MiB are over the budget of {mib(row['budget'])}"
        elif row["status"] == "failed" or row.get("error"):
            yield f"{name}: {row.get('error')}"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for("benchmarks.gpu", __doc__)
    add = parser.add_argument
    add("models", nargs="*", help="MODULE:FUNCTION or FILE.py:FUNCTION")
    add("--ways", default=",".join(WAYS), help="names, with commas")
    add("--device", default="cuda")
    add("--minutes", type=float, default=9.0)
    add("--together", type=int, default=6, help="rows that compile at the same time")
    add("--plans", type=Path, help="folder of plans that were made without a GPU")
    add("--out", type=Path, help="JSON file")
    add("--table", type=Path, help="print the table of such a file")
    add("--into", type=Path, help="put it into this document")
    asked = parser.parse_args(arguments)
    asked.models = models_asked(asked.models, parser)
    asked.ways = asked.ways.split(",")
    if others := sorted(set(asked.ways) - set(WAYS)):
        parser.error(f"no ways {others}; there are {', '.join(WAYS)}")
    return asked


def _cudnn() -> int | None:
    version: Callable[[], int | None] = torch.backends.cudnn.version
    return version()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write; or make a table."""
    begin, options = time.monotonic(), parse_arguments(arguments)
    if options.table is not None:
        text = markdown(json.loads(options.table.read_text()))
        if options.into is None:
            print(text, end="")
        else:
            options.into.write_text(put_into(options.into.read_text(), text, MARKS))
        return 0
    head = {
        "machine": describe_machine(options.device, torch.get_num_threads()),
        "versions": {"cuda": torch.version.cuda, "cudnn": _cudnn()},
        "rounds": ROUNDS,
    }
    rows = Rows(head, options.out)
    rows.read()
    with tempfile.TemporaryDirectory(prefix="fxremat-gpu-") as folder:
        ends, planned = begin + 60 * options.minutes, budgets_of(options.plans)
        Benchmark(rows, options, ends, Path(folder), planned).run()
    found = list(rows.rows.values())
    print(format_table(lines(found)), *failures(found), sep="\n", flush=True)
    return int(any(True for _ in failures(found)))


if __name__ == "__main__":
    sys.exit(main())

"""On a GPU: predicted against measured bytes and seconds, over many models at once.

    python -m benchmarks.gpu --models gpt,vit,resnet --size base --out benchmarks/results/gpu.json

For each model: `torch.compile`, per-block checkpointing, and fxremat at parts of what
`torch.compile` reserves, each in a process of its own. Up to `--together` processes compile at the
same time, and share the processor meanwhile; steps are timed afterwards, one process at a time, in
rounds. Each process also trains two steps while torch records what its allocator does, and compares
the record with fxremat's model of the allocator. Exits with 1 if a budget was not obeyed, a
process failed, or a gradient of fxremat's is off. The JSON file is written as soon as bytes are
known, and again after each model is timed: a run that is stopped leaves what it has.

With ``--absent H100`` no GPU is needed: the same models are planned for that card, at parts of what
keeping everything reserves, and what is said of them is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fxremat.cost.cards import card_named
from fxremat.errors import UnknownDevice

from . import gpu_absent
from .machine import describe_machine
from .models import MODELS, SIZES
from .rows import Row, format_table, mib, number, yes_no
from .runner import Case, Runner, Timing, WorkerProcess
from .ways import REFERENCE, VARIANTS, Variant

DEFAULT_MODELS = "gpt,bert,llama,vit,resnet,regnet,unet,encdec"
DEFAULT_WAYS = "checkpoint,fxremat80%,fxremat50%,fxremat33%"
MOST_ERROR = 5e-2
"""Of a gradient in bfloat16, in parts of its largest entry."""
HEAD = ["model", "way", "budget", "allocated", "said", "reserved", "said", "obeyed", "first step",
        "model of it", "step ms", "time", "planned", "compile s", "gradients"]  # fmt: skip


class Group(Runner):
    """The ways to run one model, each in a process that lives until all are timed."""

    def __init__(self, case: Case, timing: Timing, folder: Path) -> None:
        super().__init__(case, timing, folder)
        self.recorded: dict[str, dict[str, Any]] = {}
        self.ready: list[WorkerProcess] = []
        folder.mkdir(parents=True, exist_ok=True)

    def prepare_one(self, variant: Variant, stack: ExitStack) -> None:
        """Start, compile, measure, and let the allocator be recorded."""
        worker = stack.enter_context(self.start(variant))
        if self.prepare(worker):
            if self.case.device == "cuda":
                answer = worker.ask("recorded")
                self.recorded[variant.name] = answer.get("allocator", {})
                self.rows[variant.name].error = answer.get("error")
            self.ready.append(worker)
        cells = self._line(self.rows[variant.name])
        self._say(
            ", ".join(f"{head} {cell}" for head, cell in zip(HEAD, cells, strict=True) if cell)
        )

    def time(self) -> None:
        """Steps of all, in rounds."""
        by_name = {worker.variant.name: worker for worker in self.ready}
        if REFERENCE.name in by_name:
            self._time(by_name.pop(REFERENCE.name), [*by_name.values()])

    def lines(self) -> list[list[str]]:
        """Of the table."""
        return [self._line(row) for row in self.rows.values()]

    def _line(self, row: Row) -> list[str]:
        found = self.recorded.get(row.variant, {})
        modelled = ""
        if "modelled_peak_bytes" in found:
            modelled = f"{found['modelled_peak_bytes'] / found['recorded_peak_bytes'] - 1:+.2%}"
        first = None if row.budget_bytes is None else row.first_bytes
        return [
            self.case.model,
            row.variant,
            mib(row.budget_bytes),
            mib(row.peak_bytes),
            _off(row.predicted_bytes, row.peak_bytes),
            mib(row.reserved_bytes),
            _off(row.predicted_reserved_bytes, row.reserved_bytes),
            yes_no(row.obeyed),
            mib(first),
            modelled,
            number(row.step_ms, ".1f"),
            number(row.time_ratio, ".3f"),
            number(row.planned_ratio, ".3f"),
            number(row.compile_seconds, ".0f"),
            number(row.gradient_error, ".1e"),
        ]

    @property
    def failures(self) -> list[str]:
        """What is wrong, in words; a refused budget is not."""
        found = []
        for row in self.rows.values():
            name = f"{self.case.model} {row.variant}"
            if row.error and row.minimum_bytes is None:
                found.append(f"{name}: {row.error}")
            if row.obeyed is False:
                found.append(f"{name}: the budget is not obeyed")
            error = row.gradient_error if row.kind == "fxremat" else None
            if error is not None and not error <= MOST_ERROR:
                found.append(f"{name}: gradients are off by {error:.1e}")
        return found

    @property
    def refusals(self) -> list[str]:
        """Budgets that were refused, and what was named instead."""
        return [
            f"{self.case.model} {row.variant}: refused at {mib(row.budget_bytes)} MiB, "
            f"least {mib(row.minimum_bytes)} MiB"
            for row in self.rows.values()
            if row.minimum_bytes is not None
        ]

    def to_json(self) -> dict[str, Any]:
        """The case, the rows, and what the model of the allocator said."""
        rows = [row.to_json() for row in self.rows.values()]
        return {**asdict(self.case), "rows": rows, "recorded": self.recorded}


def _off(said: int | None, measured: int | None) -> str:
    return "" if said is None or not measured else f"{said / measured - 1:+.2%}"


def run(
    cases: Sequence[Case],
    variants: Sequence[Variant],
    timing: Timing,
    logs: Path,
    keep: Callable[[Sequence[Group]], None],
) -> list[Group]:
    """Compile all at once, then time one model after the other; ``keep`` gets what there is."""
    groups = [Group(case, timing, logs / case.model) for case in cases]
    with ExitStack() as stack, ThreadPoolExecutor(timing.live) as pool:
        list(pool.map(lambda group: group.prepare_one(REFERENCE, stack), groups))
        jobs = [(group, variant) for group in groups for variant in variants]
        list(pool.map(lambda job: job[0].prepare_one(job[1], stack), jobs))
        keep(groups)
        for group in groups:
            group.time()
            keep(groups)
    return groups


def text(groups: Sequence[Group]) -> str:
    """The table, refusals and failures."""
    lines = [HEAD, *(line for group in groups for line in group.lines())]
    said = [line for group in groups for line in (*group.refusals, *group.failures)]
    return "\n".join([format_table(lines), *said])


def cudnn_version() -> int | None:
    """As torch found it."""
    ask: Any = torch.backends.cudnn.version
    found: int | None = ask()
    return found


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--models", default=DEFAULT_MODELS, help=f"of {', '.join(MODELS)}")
    add("--size", choices=SIZES, default="base")
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--absent", metavar="CARD", help="plan for a card that is not here; nothing is measured")
    add("--dtype", default="bfloat16")
    add("--ways", default=DEFAULT_WAYS, help="of the variants of `python -m benchmarks`")
    add("--together", type=int, default=8, help="processes that compile at the same time")
    add("--rounds", type=int, default=5, help="rounds of timed steps")
    add("--steps", type=int, default=5, help="timed steps of each way in a round")
    add("--threads", type=int, default=4)
    add("--seed", type=int, default=0)
    add("--logs", type=Path, help="folder of what the processes say; default: a temporary one")
    add("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.models.split(",")) - set(MODELS)):
        parser.error(f"unknown models {unknown}; there are {', '.join(MODELS)}")
    if unknown := sorted(set(options.ways.split(",")) - set(VARIANTS)):
        parser.error(f"unknown ways {unknown}; there are {', '.join(VARIANTS)}")
    if options.absent:
        try:
            card_named(options.absent)
        except UnknownDevice as error:
            parser.error(str(error))
    without = [name for name in options.ways.split(",") if VARIANTS[name].at != "fraction"]
    if options.absent and without:
        parser.error(f"{without} are no parts of what plain reserves: --absent leaves them out")
    return options


def _write(out: Path | None, result: dict[str, Any]) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write."""
    options = parse_arguments(arguments)
    variants = [VARIANTS[name] for name in options.ways.split(",")]
    timing = Timing(options.rounds, options.steps, options.together)
    cases = [
        Case(name, options.size, options.device, options.dtype, options.seed, options.threads)
        for name in options.models.split(",")
    ]
    if options.absent:
        said = gpu_absent.run(cases, variants, options.absent)
        _write(options.out, {"card": options.absent, "said": said})
        return 0
    head = {
        "machine": describe_machine(options.device, options.threads),
        "versions": {"cuda": torch.version.cuda, "cudnn": cudnn_version()},
        "timing": asdict(timing),
    }

    def keep(groups: Sequence[Group]) -> None:
        _write(options.out, {**head, "results": [group.to_json() for group in groups]})

    with tempfile.TemporaryDirectory(prefix="fxremat-gpu-") as folder:
        groups = run(cases, variants, timing, options.logs or Path(folder), keep)
    print(text(groups), flush=True)
    return int(any(group.failures for group in groups))


if __name__ == "__main__":
    sys.exit(main())

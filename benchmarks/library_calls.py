"""The loss over a large vocabulary: fxremat's chunks beside what torch has for it by now.

    python -m benchmarks.library_calls [--out benchmarks/results/library_calls.json]

A GPT of one layer with 50,257 words takes real training steps on the CPU in these ways:

    plain           torch.compile, `cross_entropy(linear(x))`
    call            torch.compile, `torch.nn.functional.linear_cross_entropy` in chunks
    auto chunker    torch.compile with Inductor's `auto_chunker`
    fxremat         `chunked_loss` alone, at the least bytes that any of the others takes
    fxremat, least  the same at the least budget that fxremat names, with `--least`

Peaks are bytes above nothing: parameters, gradients and batch are in them. Rounds of steps are
interleaved, and times are parts of plain's in the same round. Gradients are compared with plain's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxremat.compat.configuration import inductor_config

from .commands import parser_for, write_json
from .machine import describe_machine
from .nets.language import GPT
from .offload_steps import compiled
from .rows import MIB, counts, format_table
from .training import Training, gradient_error, infeasible_budget, report_fields

PLAIN, CALL, CHUNKER, OURS, LEAST = "plain", "call", "auto chunker", "fxremat", "fxremat, least"
WORDS = 50_257
MOST_ERROR = 1e-4
"""Of a gradient, in parts of its largest entry."""
HEAD = ["way", "peak MiB", "of plain", "budget", "step ms", "time", "planned", "gradients", ""]


class WithCall(nn.Module):
    """A GPT whose head and loss are torch's call, in chunks."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        head = self.gpt.head
        x = head.norm(self.gpt.features(inputs)).flatten(0, 1)
        options = nn.LinearCrossEntropyOptions(allow_retain_graph=True)
        return F.linear_cross_entropy(x, head.linear.weight, targets.flatten(), options=options)


@dataclass
class Row:
    """One way; ``error`` says why it has no figures, ``report`` has fxremat's facts."""

    way: str
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    gradient_error: float | None = None
    step_seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    report: dict[str, Any] | None = None
    error: str | None = None

    def cells(self, plain: Row) -> list[str]:
        """A line of the table."""
        if self.peak_bytes is None or plain.peak_bytes is None or self.gradient_error is None:
            return [self.way, *[""] * (len(HEAD) - 2), self.error or ""]
        planned = f"{1 + self.report['time_overhead']:.2f}" if self.report else ""
        return [
            self.way,
            f"{self.peak_bytes / MIB:.1f}",
            f"{self.peak_bytes / plain.peak_bytes:.0%}",
            "" if self.budget_bytes is None else f"{self.budget_bytes / MIB:.1f}",
            f"{1e3 * median(self.step_seconds):.0f}",
            f"{median(self.ratios):.2f}",
            planned,
            f"{self.gradient_error:.1e}",
            counts(self.report["variants"]) if self.report else "",
        ]

    def failures(self) -> Iterator[str]:
        """The promises that are broken."""
        if (self.peak_bytes or 0) > (self.budget_bytes or sys.maxsize):
            yield f"{self.way}: {self.peak_bytes:,} bytes, budget {self.budget_bytes:,}"
        if self.gradient_error is not None and self.gradient_error > MOST_ERROR:
            yield f"{self.way}: gradients differ by {self.gradient_error:.1e}"


@dataclass(frozen=True)
class Shape:
    """Of the model and its batch: logits are 16 times the weights, from 8 on Inductor chunks."""

    batch: int = 8
    length: int = 64
    width: int = 32
    words: int = WORDS


def make(shape: Shape) -> tuple[GPT, tuple[Tensor, Tensor]]:
    """The model with fixed random weights, and its arguments."""
    torch.manual_seed(0)
    gpt = GPT(layers=1, width=shape.width, heads=2, length=shape.length, vocabulary=shape.words)
    return gpt.train(), gpt.sample(shape.batch, torch.Generator().manual_seed(0))


class Measuring:
    """The ways, compiled one after the other in this process."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.trained: dict[str, Training] = {}
        self.rows: dict[str, Row] = {}
        self.expected: dict[str, Tensor] = {}

    def add(self, way: str, wrap: Callable[[GPT], nn.Module], **options: Any) -> None:
        """torch.compile of a model, with options of Inductor's."""
        gpt, arguments = make(self.shape)
        model = wrap(gpt)
        training = Training(model, arguments, torch.compile(model, options=options or None))
        self._measure(Row(way), training)

    def add_ours(self, way: str, budget: int) -> int | None:
        """fxremat with chunked losses alone; the least budget where this one cannot be met."""
        gpt, arguments = make(self.shape)
        options = {"memory_budget": budget, "reserve": 0, "variants": ["chunked_loss"]}
        try:
            found = compiled(way, gpt, arguments, "inductor", options)
        except Exception as error:
            infeasible = infeasible_budget(error)
            if infeasible is None:
                raise
            text = str(infeasible).splitlines()[0]
            self.rows[way] = Row(way, budget_bytes=budget, error=text)
            return infeasible.minimum_bytes
        self._measure(Row(way, budget, report=report_fields(found.report)), found.training)
        return None

    def _measure(self, row: Row, training: Training) -> None:
        """Everything but the times."""
        for _ in range(2):
            training.step()
        _, gradients = training.gradients(0)
        self.expected = self.expected or gradients
        row.gradient_error = gradient_error(gradients, self.expected)
        row.peak_bytes = training.measure().peak_bytes
        self.rows[row.way], self.trained[row.way] = row, training
        print(f"{row.way}: {row.peak_bytes / MIB:.1f} MiB", file=sys.stderr, flush=True)

    def time(self, rounds: int, steps: int) -> None:
        """Rounds of steps, forwards and backwards in alternation."""
        for turn in range(rounds):
            ways = list(self.trained)
            for way in ways if turn % 2 == 0 else reversed(ways):
                seconds = median(self.trained[way].time_steps(steps))
                self.trained[way].model.zero_grad(set_to_none=True)
                self.rows[way].step_seconds.append(seconds)
            for way in ways:
                base = self.rows[PLAIN].step_seconds[-1]
                self.rows[way].ratios.append(self.rows[way].step_seconds[-1] / base)


def measure(shape: Shape, rounds: int, steps: int, least: bool = False) -> list[Row]:
    """The rows of all ways."""
    its = Measuring(shape)
    its.add(PLAIN, lambda gpt: gpt)
    if hasattr(F, "linear_cross_entropy"):
        its.add(CALL, WithCall)
    else:
        its.rows[CALL] = Row(CALL, error=f"torch {torch.__version__} has none")
    if hasattr(inductor_config, "auto_chunker"):
        its.add(CHUNKER, lambda gpt: gpt, **{"auto_chunker.enable": True})
    else:
        its.rows[CHUNKER] = Row(CHUNKER, error=f"torch {torch.__version__} has none")
    peaks = [row.peak_bytes for row in its.rows.values() if row.peak_bytes is not None]
    its.add_ours(OURS, min(peaks))
    minimum = its.add_ours(LEAST, MIB) if least else None
    if minimum is not None:
        its.add_ours(LEAST, minimum)
    its.time(rounds, steps)
    return list(its.rows.values())


def table(rows: Sequence[Row]) -> str:
    """A line for each way."""
    plain = next(row for row in rows if row.way == PLAIN)
    return format_table([HEAD, *(row.cells(plain) for row in rows)])


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for("benchmarks.library_calls", __doc__)
    add = parser.add_argument
    for name, default in asdict(Shape()).items():
        add(f"--{name}", type=int, default=default)
    add("--least", action="store_true", help="also at the least budget: compiles twice more")
    add("--rounds", type=int, default=3, help="of timed steps")
    add("--steps", type=int, default=3, help="timed steps in a round")
    add("--threads", type=int, default=1)
    add("--out", type=Path, help="JSON file")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 where a promise is broken."""
    given = parse_arguments(words)
    torch.set_num_threads(given.threads)
    shape = Shape(given.batch, given.length, given.width, given.words)
    rows = measure(shape, given.rounds, given.steps, given.least)
    print(table(rows))
    failures = [failure for row in rows for failure in row.failures()]
    for failure in failures:
        print(f"FAILED: {failure}")
    if given.out is not None:
        data = {
            "machine": describe_machine("cpu", given.threads),
            "shape": asdict(shape),
            "rows": [asdict(row) for row in rows],
        }
        write_json(given.out, data)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())

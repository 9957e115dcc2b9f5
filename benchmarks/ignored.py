"""What it saves to leave out the rows of a loss whose label is ignored, and what it costs to look.

    python -m benchmarks.ignored [--model gpt50k] [--batch 2] [--parts 0,50,75,90] [--rounds 5]

A model with a large vocabulary is compiled once, within a part of what store-all takes. Then steps
are timed in pairs on the same batch, of whose labels a part is -100: all rows computed, and those
left out that add nothing. The compiled step, its memory and the numbers are the same; the order in
a pair changes from round to round. Peaks are measured for each part and have to be what was
promised; an error says so where one is not.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fxremat
from fxremat.memory.measured_peak import measure_peak
from fxremat.runtime.chunks import call as rows_call

from .models import MODELS, build
from .rows import MIB, format_table

IGNORED = -100
HEAD = ["labels ignored", "all rows, s", "left out, s", "ratio", "peak, MiB", "promised"]


@dataclass(frozen=True)
class Row:
    """Of one part of ignored labels: medians of seconds, of ratios in a pair, and the peak."""

    percent: int
    all_rows: float
    left_out: float
    ratio: float
    peak_bytes: int
    promised_bytes: int

    def cells(self) -> list[str]:
        """A line of the table."""
        exact = "exactly" if self.peak_bytes == self.promised_bytes else f"{self.promised_bytes:,}"
        seconds = [f"{self.all_rows:.2f}", f"{self.left_out:.2f}", f"{self.ratio:.3f}"]
        return [f"{self.percent} %", *seconds, f"{self.peak_bytes / MIB:.2f}", exact]


@contextmanager
def all_rows_computed() -> Iterator[None]:
    """Inside, no row is left out; the memory taken is the same."""
    with mock.patch.object(rows_call, "_places", return_value=None):
        yield


def with_ignored(targets: Tensor, percent: int) -> Tensor:
    """A copy with so many of its labels ignored, always the same ones."""
    dice = torch.Generator().manual_seed(percent)
    chosen = torch.randperm(targets.numel(), generator=dice)[: targets.numel() * percent // 100]
    flat = targets.clone().view(-1)
    flat[chosen] = IGNORED
    return flat.view(targets.shape)


def step(model: torch.nn.Module, call: Callable[..., Tensor], batch: Sequence[Tensor]) -> None:
    """Forward and backward, with no gradients before."""
    model.zero_grad(set_to_none=True)
    call(*batch).backward()  # type: ignore[no-untyped-call]


def seconds(run: Callable[[], None], all_rows: bool) -> float:
    """How long one step takes."""
    with all_rows_computed() if all_rows else nullcontext():
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


def row_of(
    percent: int, rounds: int, run: Callable[[], None], peak: Callable[[], int], promised: int
) -> Row:
    """Pairs of steps, after one of each that does not count."""
    pairs: list[dict[bool, float]] = []
    for number in range(rounds + 1):
        order = (True, False) if number % 2 else (False, True)
        pairs.append({all_rows: seconds(run, all_rows) for all_rows in order})
    counted = pairs[1:]
    return Row(
        percent,
        median(pair[True] for pair in counted),
        median(pair[False] for pair in counted),
        median(pair[False] / pair[True] for pair in counted),
        peak(),
        promised,
    )


def rows(
    name: str, size: str, batch_size: int, parts: Sequence[int], percent: int, rounds: int
) -> list[Row]:
    """One row for each part of ignored labels; raises RuntimeError where a peak is not promised."""
    model, (inputs, targets) = build(name, size)
    inputs, targets = inputs[:batch_size].clone(), targets[:batch_size].clone()
    budget = fxremat.explain(model, inputs, targets).store_all_peak_bytes * percent // 100
    call: Any = torch.compile(model, backend="fxremat", options={"memory_budget": budget})
    found = []
    for part in parts:
        batch = (inputs, with_ignored(targets, part))

        def run(batch: Sequence[Tensor] = batch) -> None:
            step(model, call, batch)

        def peak(run: Callable[[], None] = run, batch: Sequence[Tensor] = batch) -> int:
            model.zero_grad(set_to_none=True)
            return measure_peak(run, held=(model, batch)).peak_bytes

        run()
        report = fxremat.reports()[-1]
        if not any("chunked_loss" in row.what for row in report.variants):
            raise RuntimeError(f"{name} at {percent} % keeps its logits; take a smaller budget")
        found.append(row_of(part, rounds, run, peak, report.predicted_peak_bytes))
        if found[-1].peak_bytes != found[-1].promised_bytes:
            raise RuntimeError(f"{found[-1]} is not what was promised")
    return found


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="gpt50k")
    parser.add_argument("--size", default="small")
    parser.add_argument("--batch", type=int, default=4, help="texts in a batch")
    parser.add_argument("--parts", default="0,50,75,90", help="percent of labels ignored")
    parser.add_argument("--percent", type=int, default=65, help="budget, of store-all's peak")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of steps that are timed")
    return parser.parse_args(arguments)


def main() -> None:
    """Print the table."""
    given = parse_arguments()
    parts = [int(part) for part in given.parts.split(",")]
    found = rows(given.model, given.size, given.batch, parts, given.percent, given.rounds)
    print(format_table([HEAD, *(row.cells() for row in found)]))


if __name__ == "__main__":
    main()

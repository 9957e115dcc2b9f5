"""The peak as a formula of the batch, against real steps of batches that were not looked at.

    python -m benchmarks.sizes [--models gpt,llama] [--low 4] [--high 32] [--part 80]

Each model is planned once, for batches from ``low`` to ``high`` and a part of what the largest
takes if nothing runs again. Every difference is printed; one ends the command with an error.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor

import fxremat
from fxremat.memory.measured_peak import measure_peak
from fxremat.whatif.peak_expression import PeakExpression

from .models import find_config
from .nets.layers import Network
from .rows import format_table

LOOKED_AT = 10
HEAD = ["model", "batches", "equal", "most apart", "polynomials", "peak, MiB"]


@dataclass(frozen=True)
class Row:
    """Of one model: the formula, and (batch, told, measured) of each batch that was run."""

    model: str
    expression: PeakExpression
    steps: tuple[tuple[int, int, int], ...]

    @property
    def equal(self) -> int:
        """Batches at which the formula tells what was measured, to the byte."""
        return sum(told == real for _, told, real in self.steps)

    def cells(self) -> list[str]:
        """A line of the table."""
        [size] = self.expression.ranges
        apart = max(abs(told - real) for _, told, real in self.steps)
        top = max(told for _, told, _ in self.steps) / 2**20
        count = len(getattr(self.expression.expression, "args", ())) if self.is_maximum else 1
        batches = f"{size.low} to {size.high}"
        equal = f"{self.equal} of {len(self.steps)}"
        return [self.model, batches, equal, f"{apart:,} B", str(count), f"{top:.1f}"]

    @property
    def is_maximum(self) -> bool:
        """Whether another moment makes the peak at other batches."""
        return isinstance(self.expression.expression, sympy.Max)


def row_of(name: str, size: str, low: int, high: int, percent: int) -> Row:
    """Plan for all batches, run some."""
    torch.manual_seed(0)
    torch.compiler.reset()
    config = find_config(name, size)
    model = config.network(**config.arguments).train()
    whole = fxremat.explain(model, *_inputs(model, high)).store_all_peak_bytes
    options: dict[str, Any] = {"memory_budget": whole * percent // 100}
    given = _inputs(model, (low + high) // 2)
    for tensor in given:
        torch._dynamo.mark_dynamic(tensor, 0, min=low, max=high)
    found = fxremat.explain(model, *given, options=options).peak_expression
    call = torch.compile(model, backend="fxremat", options=options)
    call(*given).backward()
    [one] = found.ranges
    steps = []
    for batch in _spread(low, high):
        inputs = _inputs(model, batch)

        def step(inputs: Sequence[Tensor] = inputs) -> None:
            model.zero_grad(set_to_none=True)
            call(*inputs).backward()

        step()
        model.zero_grad(set_to_none=True)
        peak = measure_peak(step, held=(model, inputs)).peak_bytes
        steps.append((batch, found.at({one.name: batch}), peak))
    return Row(name, found, tuple(steps))


def _inputs(model: Network, batch: int) -> tuple[Tensor, Tensor]:
    return model.sample(batch, torch.Generator().manual_seed(0))


def _spread(low: int, high: int) -> list[int]:
    """Batches from the lowest to the highest."""
    count = min(LOOKED_AT, high - low + 1)
    return sorted({low + (high - low) * k // (count - 1) for k in range(count)})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="gpt,llama,bert,vit,resnet")
    parser.add_argument("--size", default="small")
    parser.add_argument("--low", type=int, default=4)
    parser.add_argument("--high", type=int, default=32)
    parser.add_argument("--part", type=int, default=80, help="percent of what keeping all takes")
    given = parser.parse_args()
    rows: list[Row] = []
    for name in given.models.split(","):
        rows.append(row_of(name, given.size, given.low, given.high, given.part))
        print(format_table([HEAD, *(row.cells() for row in rows)]), flush=True)
    for row in rows:
        print(f"\n{row.model}: {row.expression}")
    if any(row.equal < len(row.steps) for row in rows):
        raise SystemExit("the formula and what was measured differ")


if __name__ == "__main__":
    main()

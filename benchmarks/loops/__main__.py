"""Whole training loops judged without a GPU: what each reserves of a card, step by step.

    python -m benchmarks.loops [MODULE:FUNCTION or FILE.py:FUNCTION ...] [--loops NAME,...]
                               [--device H200] [--budget 60%] [--json OUT]

FUNCTION gives a module that returns the loss, and its inputs: a tuple, or a dictionary by the names
of its arguments. Without one, the models of `benchmarks.loops.models` are judged. The loops
(`benchmarks.loops.steps`) are real Python: each runs on tensors without memory, all that it
allocates is recorded, and a model of torch's allocator says what is reserved. A budget such as
``60%`` is a part of what plain torch.compile reserves in the same loop. Where a model breaks into
several graphs, Dynamo runs what lies between them.

What is promised comes from the plan, before the loop is judged; where the loop then reserves more
than the budget, the row says "over". Rows are printed, and written, as they end. Exits with 1 where
one is over, or failed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from fxremat.cost.device import card_named
from fxremat.errors import UnknownDevice

from ..commands import write_json
from ..machine import describe_machine
from ..rows import format_table
from .rows import HEAD, LoopRow, all_rows, models_asked
from .steps import LOOPS


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.loops", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("models", nargs="*", help="MODULE:FUNCTION or FILE.py:FUNCTION")
    parser.add_argument("--loops", default=",".join(LOOPS), help="names, with commas")
    parser.add_argument("--device", default="H200", help="the card, such as H200 or A100")
    parser.add_argument("--budget", default="60%", help="a part of plain compile's, or bytes")
    parser.add_argument("--json", type=Path, help="the file for the rows")
    parser.add_argument("--together", type=int, default=2, help="models judged at the same time")
    asked = parser.parse_args(words)
    asked.models = models_asked(asked.models, parser)
    asked.loops = asked.loops.split(",")
    unknown = set(asked.loops) - set(LOOPS)
    if unknown:
        parser.error(f"no loops {sorted(unknown)}; there are {', '.join(LOOPS)}")
    try:
        card_named(asked.device)
    except UnknownDevice as error:
        parser.error(str(error))
    return asked


def main(words: Sequence[str] | None = None) -> int:
    """Judge all that is asked for; 1 where a row is over or failed."""
    asked = arguments(words)
    rows: list[LoopRow] = []
    for row in all_rows(asked):
        rows.append(row)
        print(format_table([HEAD, *(one.cells() for one in rows)]), flush=True)
        if row.error:
            print(row.error, flush=True)
        if asked.json:
            _write(asked.json, rows)
    expected = len(asked.models) * len(asked.loops)
    bad = any(row.status in ("over", "failed") for row in rows)
    return int(bad or len(rows) < expected)


def _write(path: Path, rows: Sequence[LoopRow]) -> None:
    machine = describe_machine("cpu", torch.get_num_threads())
    found = {"machine": machine, "rows": [one.as_json() for one in rows]}
    write_json(path, found)


if __name__ == "__main__":
    raise SystemExit(main())

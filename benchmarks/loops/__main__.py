"""Whole training loops judged without a GPU: what each reserves of a card, step by step.

    python -m benchmarks.loops [MODULE:FUNCTION or FILE.py:FUNCTION ...] [--loops NAME,...]
                               [--device H200] [--budget 60%] [--json OUT]

FUNCTION gives a module that returns the loss, and its inputs: a tuple, or a dictionary by the names
of its arguments. Without one, the models of `benchmarks.loops.models` are judged. The loops
(`benchmarks.loops.steps`) are real Python: each runs on tensors without memory, all that it
allocates is recorded, and a model of torch's allocator says what is reserved. A budget such as
``60%`` is a part of what plain torch.compile reserves in the same loop.

What is promised comes from the plan, before the loop is judged; where the loop then reserves more
than the budget, the row says "over". Rows are printed, and written, as they end. Exits with 1 where
one is over, or failed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fxremat.cost.cards import card_named
from fxremat.errors import InfeasibleBudget, UnknownDevice
from fxremat.sizes import parse_bytes
from fxremat.whatif.device import absent

from ..machine import describe_machine
from ..rows import format_table, mib
from .judge import Judge, Outcome
from .steps import LOOPS

HEAD = ["model", "loop", "status", "plain", "budget", "least", "promised", "blocks",
        "reserved", "unused", "peak", "seconds"]  # fmt: skip


@dataclass(frozen=True)
class LoopRow:
    """What was found of one model in one loop. Bytes; None where a row ended before it.

    A budget that is refused says what compiled ``checkpointing`` of each block reserves.
    """

    model: str
    loop: str
    device: str
    status: str
    seconds: float
    plain: int | None = None
    budget: int | None = None
    least: int | None = None
    promised: int | None = None
    checkpointing: int | None = None
    outcome: Outcome | None = None
    error: str | None = None

    def cells(self) -> list[str]:
        """A line of the table, in MiB."""
        found = self.outcome
        return [
            self.model,
            self.loop,
            self.status,
            mib(self.plain),
            mib(self.budget),
            mib(self.least),
            mib(self.promised),
            mib(self.checkpointing),
            mib(None if found is None else found.reserved),
            mib(None if found is None else found.unused),
            "" if found is None else f"step {found.peak_step}, {found.moment}",
            f"{self.seconds:.0f}",
        ]

    def as_json(self) -> dict[str, Any]:
        """One level, with the figures of the replay among the others."""
        row = asdict(self)
        outcome = row.pop("outcome") or dict.fromkeys(Outcome.__dataclass_fields__)
        return {**row, **outcome}


def judged(name: str, make: Callable[[], Any], asked: argparse.Namespace) -> Iterator[LoopRow]:
    """A row for each loop; the model is traced once."""
    begin = time.perf_counter()
    with absent(asked.device) as card:
        judge: Judge | None = None
        for loop in asked.loops:
            row: dict[str, Any] = {"model": name, "loop": loop, "device": card.name}
            try:
                judge = judge or Judge(*_made(make))
                row |= _judged(judge, loop, asked.budget)
            except InfeasibleBudget as refused:
                row |= {"status": "refused", "budget": refused.budget_bytes}
                row |= {"least": refused.minimum_bytes}
                if judge is not None:
                    row |= {"plain": judge.plain_of(loop)}
                    row |= {"checkpointing": judge.checkpointing_of(loop)}
            except Exception as error:
                logging.getLogger(__name__).debug("failed", exc_info=True)
                text = f"{type(error).__name__}: {error}".partition("\n")[0]
                row |= {"status": "failed", "error": text}
            yield LoopRow(seconds=round(time.perf_counter() - begin, 1), **row)
            begin = time.perf_counter()


def _judged(judge: Judge, loop: str, budget: str) -> dict[str, Any]:
    """What is promised under the budget, and what the loop then reserves."""
    plain = judge.plain_of(loop)
    allowed = budget_of(budget, plain)
    promise = judge.planned(loop, allowed)
    outcome = judge.outcome(loop, promise)
    return {
        "status": "ok" if outcome.reserved <= allowed else "over",
        "plain": plain,
        "budget": allowed,
        "least": promise.least,
        "promised": promise.promised,
        "outcome": outcome,
    }


def budget_of(text: str, plain: int) -> int:
    """Bytes of a budget such as "60%", which is of what plain compile reserves, or "8GiB"."""
    if text.endswith("%"):
        return int(float(text[:-1]) / 100 * plain)
    return parse_bytes(text)


def _made(make: Callable[[], Any]) -> tuple[Any, Any]:
    """A model in training mode, and its inputs."""
    model, inputs = make()
    return model.train(), inputs


def function_named(text: str) -> Callable[[], Any]:
    """``package.module:function``, or ``folder/file.py:function``."""
    where, _, name = text.rpartition(":")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    function: Callable[[], Any] = getattr(module, name)
    return function


def _models(given: Sequence[str]) -> dict[str, Callable[[], Any]]:
    from .models import MODELS

    if not given:
        return dict(MODELS)
    known = {name: MODELS[name] for name in given if name in MODELS}
    return known | {text: function_named(text) for text in given if ":" in text}


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
    asked = parser.parse_args(words)
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
    for name, make in _models(asked.models).items():
        for row in judged(name, make, asked):
            rows.append(row)
            print(format_table([HEAD, *(one.cells() for one in rows)]), flush=True)
            if row.error:
                print(row.error, flush=True)
            if asked.json:
                _write(asked.json, rows)
    return int(any(row.status in ("over", "failed") for row in rows))


def _write(path: Path, rows: Sequence[LoopRow]) -> None:
    machine = describe_machine("cpu", torch.get_num_threads())
    found = {"machine": machine, "rows": [one.as_json() for one in rows]}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())

"""What fxremat says of a run on a GPU that is not here: bytes and seconds, nothing measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import fxremat
from fxremat.whatif.device import absent

from .models import build
from .rows import format_table, mib, number
from .runner import Case
from .ways import Variant, budget_bytes

PLAIN = {"variants": "none", "disable_passes": ["recompute"]}
"""Nothing runs again: where the card has too little for that, it is refused, and told."""
STORE_ALL = "store all"
"""`torch.compile` itself takes less: what is cheap it runs again."""
HEAD = ["model", "way", "budget", "allocated", "reserved", "time", "seconds"]


@dataclass(frozen=True)
class Said:
    """Of one way to run a model; ``time`` is relative to running every op once.

    ``minimum_bytes`` where the budget was refused; nothing else is known then.
    """

    model: str
    way: str
    budget_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    time: float | None
    seconds: float
    minimum_bytes: int | None = None

    def cells(self) -> list[str]:
        """A line of the table."""
        refused = "" if self.minimum_bytes is None else f"refused: {mib(self.minimum_bytes)}"
        return [
            self.model,
            self.way,
            mib(self.budget_bytes),
            refused or mib(self.allocated_bytes),
            mib(self.reserved_bytes),
            number(self.time, ".3f"),
            number(self.seconds, ".0f"),
        ]


def said_of(case: Case, variants: Sequence[Variant], card: str) -> list[Said]:
    """All kept first, if only to be refused; budgets are parts of what that reserves."""
    with absent(card):
        model, arguments = build(
            case.model, case.size, "cpu", getattr(torch, case.dtype), case.seed
        )
        everything = _explained(case.model, STORE_ALL, model, arguments, PLAIN)
        reserved = everything.reserved_bytes or everything.minimum_bytes
        assert reserved is not None, "what is refused is told the least"
        peaks = {"compile": reserved}
        rows = [everything]
        for variant in variants:
            asked = {"memory_budget": budget_bytes(variant, peaks), **dict(variant.options)}
            rows.append(_explained(case.model, variant.name, model, arguments, asked))
    return rows


def _explained(
    name: str, way: str, model: Any, arguments: Sequence[Any], options: dict[str, Any]
) -> Said:
    begin, budget = time.perf_counter(), options.get("memory_budget")
    try:
        [report] = fxremat.explain(model, *arguments, options=options).graphs
    except fxremat.InfeasibleBudget as error:
        seconds = time.perf_counter() - begin
        return Said(name, way, budget, None, None, None, seconds, error.minimum_bytes)
    return Said(
        name,
        way,
        budget,
        report.predicted_peak_bytes,
        report.predicted_reserved_bytes,
        1 + report.time_overhead,
        time.perf_counter() - begin,
    )


def run(cases: Sequence[Case], variants: Sequence[Variant], card: str) -> list[dict[str, Any]]:
    """Prints the table as it grows; ``variants`` are parts of what keeping all reserves."""
    found: list[Said] = []
    for case in cases:
        found += said_of(case, variants, card)
        print(format_table([HEAD, *(one.cells() for one in found)]), flush=True)
    return [asdict(one) for one in found]

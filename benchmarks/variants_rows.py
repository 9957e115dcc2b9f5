"""Real steps of a small model for each row of the table of variants: what the row alone is worth.

For each row, its model (`variants_models`) is trained four ways in this process:

    compile     torch.compile
    without     fxremat without other forms, at the least budget that it names
    with        fxremat with this row alone, at the least budget that it names
    same        fxremat with this row alone, at the budget of "without"

Rounds of their steps are interleaved: what disturbs the machine disturbs all alike, so step times
are compared within a round only. On the CPU one thread computes by default, and the processor time
of that thread (in brackets) tells work from what a busy machine adds. Where a plan does without the
row's forms, it says "not taken": the row does not help there, however good it may be elsewhere.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fxremat.passes.variants.rule import Rule
from fxremat.passes.variants.table import RULES

from .machine import describe_machine
from .offload_steps import Contestant, compiled
from .rows import MIB, format_table
from .training import find_minimum, gradient_error
from .variants_models import Made, build

PLAIN, WITHOUT, WITH, SAME = "compile", "without", "with", "same"
SEED = 0
MOST_ERROR = 1e-4
"""Of a gradient of an exact row, in parts of its largest entry."""
HEAD = ["row", "peak MiB", "step ms", "least", "with", "saved", "peak", "time without", "time with",
        "at the same", "gradients", "forms"]  # fmt: skip


@dataclass
class Figures:
    """One way to train; ratios are to torch.compile's, round by round."""

    way: str
    budget_bytes: int | None
    predicted_bytes: int | None
    peak_bytes: int
    gradient_error: float
    forms: tuple[str, ...]
    runs_again: int
    step_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    cpu_ratios: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Of step times: the median over the rounds."""
        return median(self.ratios)

    @property
    def cpu_ratio(self) -> float:
        """The same of processor time."""
        return median(self.cpu_ratios)

    def time(self) -> str:
        """Both, for the table."""
        return f"{self.ratio:.2f} ({self.cpu_ratio:.2f})"

    def to_json(self) -> dict[str, Any]:
        """Fields and derived figures."""
        derived = {"ratio": self.ratio, "cpu_ratio": self.cpu_ratio, "taken": bool(self.forms)}
        return {**asdict(self), **derived}


@dataclass(frozen=True)
class Row:
    """A row of the table: all ways to train its model."""

    name: str
    lossy: bool
    ways: dict[str, Figures]

    def cells(self) -> list[str]:
        """For the table. Where both least budgets are the same, so are "with" and "same"."""
        plain, without, best = (self.ways[way] for way in (PLAIN, WITHOUT, WITH))
        least = [one.budget_bytes or 0 for one in (without, best)]
        return [
            self.name + (" (inexact)" if self.lossy else ""),
            _mib(plain.peak_bytes),
            f"{1e3 * median(plain.step_seconds):.1f}",
            *map(_mib, least),
            f"{1 - least[1] / least[0]:.1%}",
            _mib(best.peak_bytes),
            without.time(),
            best.time(),
            self._at_the_same(),
            f"{max(one.gradient_error for one in self._in_forms()):.0e}",
            str(len(best.forms)) if best.forms else "not taken",
        ]

    def _in_forms(self) -> list[Figures]:
        return [one for way, one in self.ways.items() if way in (WITH, SAME)]

    def _at_the_same(self) -> str:
        one = self.ways.get(SAME, self.ways[WITH])
        return one.time() if one.forms else "not taken"

    def failures(self) -> Iterator[str]:
        """The promises that are broken."""
        for one in self.ways.values():
            if one.budget_bytes is not None and one.peak_bytes > one.budget_bytes:
                peaks = f"{one.peak_bytes:,} bytes, budget {one.budget_bytes:,}"
                yield f"{self.name}, {one.way}: {peaks}"
            if one.gradient_error > MOST_ERROR and not (self.lossy and one.forms):
                yield f"{self.name}, {one.way}: gradients differ by {one.gradient_error:.1e}"

    def to_json(self) -> dict[str, Any]:
        """Fields and derived figures."""
        ways = {way: one.to_json() for way, one in self.ways.items()}
        return {"name": self.name, "lossy": self.lossy, "ways": ways}


def _mib(count: int) -> str:
    return f"{count / MIB:.2f}"


def rules_of(names: str) -> list[Rule]:
    """The rows named; raises `SystemExit` for a name that is none."""
    wanted = {rule.name for rule in RULES} if names == "all" else set(names.split(","))
    unknown = wanted - {rule.name for rule in RULES}
    if unknown:
        raise SystemExit(f"no row of the table: {', '.join(sorted(unknown))}")
    return [rule for rule in RULES if rule.name in wanted]


def options_of(rule: Rule | None) -> dict[str, Any]:
    """Of fxremat, with one row or with none."""
    if rule is None:
        return {"variants": "none", "reserve": 0}
    return {"variants": [rule.name], "allow_lossy": rule.lossy, "reserve": 0}


def least_budget(made: Made, rule: Rule | None) -> int:
    """The least bytes that fxremat names."""
    options = options_of(rule)
    reserve = options.pop("reserve")
    return find_minimum(copy.deepcopy(made[0]), made[1], reserve, options)


def contestants(rule: Rule, made: Made) -> Iterator[tuple[Contestant, int | None]]:
    """All ways to train, compiled, and their budgets.

    The least budgets are found before: what asks for them starts the compiler anew.
    """
    without, best = least_budget(made, None), least_budget(made, rule)
    torch.compiler.reset()
    cases: list[tuple[str, Rule | None, int]] = [(WITHOUT, None, without), (WITH, rule, best)]
    if best != without:
        cases.append((SAME, rule, without))
    model, arguments = made
    yield compiled(PLAIN, model, arguments, "inductor", None), None
    for way, its, budget in cases:
        options = {**options_of(its), "memory_budget": budget}
        yield compiled(way, model, arguments, "inductor", options), budget


def _figures(one: Contestant, budget: int | None, expected: dict[str, Tensor]) -> Figures:
    """Everything but the times."""
    _, gradients = one.training.gradients(SEED)
    report = one.report
    return Figures(
        way=one.variant,
        budget_bytes=budget,
        predicted_bytes=None if report is None else report.predicted_peak_bytes,
        peak_bytes=one.peak_bytes(),
        gradient_error=gradient_error(gradients, expected),
        forms=() if report is None else tuple(row.what for row in report.variants),
        runs_again=0 if report is None else sum(row.times for row in report.recomputed),
    )


def _time(everyone: Sequence[Contestant], ways: dict[str, Figures], given: tuple[int, int]) -> None:
    """Rounds of steps, forwards and backwards in alternation."""
    rounds, steps = given
    for turn in range(rounds):
        for one in everyone if turn % 2 == 0 else reversed(everyone):
            wall, busy = one.time_steps(steps)
            ways[one.variant].step_seconds.append(wall)
            ways[one.variant].cpu_seconds.append(busy)
        plain = ways[PLAIN]
        for its in ways.values():
            its.ratios.append(its.step_seconds[-1] / plain.step_seconds[-1])
            its.cpu_ratios.append(its.cpu_seconds[-1] / plain.cpu_seconds[-1])


def row_of(rule: Rule, device: str, rounds: int, steps: int) -> Row:
    """Compile, measure, compare, and time."""
    both = list(contestants(rule, build(rule.name, device, SEED)))
    everyone = [one for one, _ in both]
    _, expected = everyone[0].training.gradients(SEED)
    ways = {one.variant: _figures(one, budget, expected) for one, budget in both}
    _time(everyone, ways, (rounds, steps))
    return Row(rule.name, rule.lossy, ways)


def table(rows: Sequence[Row]) -> str:
    """A line for each row, and what its columns mean."""
    legend = (
        "peak MiB, step ms: torch.compile. least, with: the least budgets without other forms and "
        "with this row, in MiB; peak: measured at the latter. Times are parts of torch.compile's "
        "(in brackets of processor time), at each one's least budget; at the same: with the row, "
        "at the least budget without."
    )
    return "\n".join([format_table([HEAD, *(row.cells() for row in rows)]), legend])


def run(given: argparse.Namespace) -> int:
    """Measure, print, write."""
    torch.set_num_threads(given.threads)
    rows: list[Row] = []
    for rule in rules_of(given.names):
        rows.append(row_of(rule, given.device, given.rounds, given.steps))
        print("  ".join(rows[-1].cells()), file=sys.stderr, flush=True)
        if given.out is not None:
            write(rows, given)
    print(table(rows))
    failures = [failure for row in rows for failure in row.failures()]
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


def write(rows: Sequence[Row], given: argparse.Namespace) -> None:
    """What is known so far, for it takes minutes to know all."""
    data = {
        "machine": describe_machine(given.device, given.threads),
        "rounds": given.rounds,
        "steps": given.steps,
        "rows": [row.to_json() for row in rows],
        "failures": [failure for row in rows for failure in row.failures()],
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(data, indent=1) + "\n")

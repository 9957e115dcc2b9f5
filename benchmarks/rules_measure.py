"""Real steps of the rules' small models on the CPU: what a rule is worth when it is measured.

Each rule's first model (`rules_models`) is trained three ways in this process:

    compile     torch.compile
    without     fxremat without variants, at a part of torch.compile's peak
    with        fxremat with this rule alone, at the same budget

Where a way cannot meet the budget, its row says what the least is that fxremat names. Rounds of
steps are interleaved: what disturbs the machine disturbs all alike, so step times are compared
within a round only. One thread computes by default, and the processor time of that thread (in
brackets) tells work from what a busy machine adds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fxremat.passes.variants.insertion import Rule

from .commands import write_json
from .machine import describe_machine
from .offload_steps import Contestant, compiled, time_rounds
from .rows import counts, format_table, mib
from .rules_models import OF_RULE, build
from .training import gradient_error, infeasible_budget, report_fields

PLAIN, WITHOUT, WITH = "compile", "without", "with"
MOST_ERROR = 1e-4
"""Of a gradient of an exact rule, in parts of its largest entry."""
HEAD = ["rule", "model", "way", "budget", "peak MiB", "promised", "step ms", "time", "planned",
        "gradients", ""]  # fmt: skip


@dataclass
class Figures:
    """One way to train; ratios are to torch.compile's, round by round."""

    rule: str
    model: str
    way: str
    lossy: bool = False
    budget_bytes: int | None = None
    least_bytes: int | None = None
    peak_bytes: int | None = None
    gradient_error: float = 0.0
    report: dict[str, Any] | None = None
    step_seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    cpu_ratios: list[float] = field(default_factory=list)

    @property
    def variants(self) -> dict[str, int]:
        """How many sites of each rule are taken."""
        return self.report["variants"] if self.report else {}

    def cells(self) -> list[str]:
        """A line of the table."""
        start = [self.rule, self.model, self.way, mib(self.budget_bytes, 2)]
        if self.peak_bytes is None:
            return [*start, *[""] * 6, f"the least is {mib(self.least_bytes, 2)} MiB"]
        report = self.report
        return [
            *start,
            mib(self.peak_bytes, 2),
            mib(report["predicted_peak_bytes"], 2) if report else "",
            f"{1e3 * median(self.step_seconds):.1f}",
            f"{median(self.ratios):.2f} ({median(self.cpu_ratios):.2f})",
            f"{1 + report['time_overhead']:.2f}" if report else "",
            f"{self.gradient_error:.0e}",
            counts(self.variants),
        ]

    def failures(self) -> Iterator[str]:
        """The promises that are broken."""
        name = f"{self.rule}, {self.way}"
        if (self.peak_bytes or 0) > (self.budget_bytes or sys.maxsize):
            yield f"{name}: {self.peak_bytes:,} bytes, budget {self.budget_bytes:,}"
        if self.gradient_error > MOST_ERROR and not (self.lossy and self.variants):
            yield f"{name}: gradients differ by {self.gradient_error:.1e}"


def options_of(rule: Rule | None) -> dict[str, Any]:
    """Of fxremat, with one rule or with none."""
    if rule is None:
        return {"variants": "none", "reserve": 0}
    return {"variants": [rule.name], "allow_lossy": rule.lossy, "reserve": 0}


def ways_of(rule: Rule, percent: int, rounds: int, steps: int) -> list[Figures]:
    """Compile, measure, compare, and time."""
    name = OF_RULE[rule.name][0]
    model, arguments = build(name)
    torch.compiler.reset()
    plain = compiled(PLAIN, model, arguments, "inductor", None)
    _, expected = plain.training.gradients(0)
    first = Figures(rule.name, name, PLAIN, peak_bytes=plain.peak_bytes())
    assert first.peak_bytes is not None
    found, everyone = [first], [(plain, first)]
    for way, its in ((WITHOUT, None), (WITH, rule)):
        budget = first.peak_bytes * percent // 100
        one = Figures(rule.name, name, way, rule.lossy and its is not None, budget)
        found.append(one)
        try:
            options = {**options_of(its), "memory_budget": budget}
            contestant = compiled(way, model, arguments, "inductor", options)
        except Exception as error:
            refusal = infeasible_budget(error)
            if refusal is None:
                raise
            one.least_bytes = refusal.minimum_bytes
            continue
        _fill(one, contestant, expected)
        everyone.append((contestant, one))
    time_rounds(everyone, rounds, steps)
    return found


def _fill(one: Figures, contestant: Contestant, expected: dict[str, Tensor]) -> None:
    """Everything but the times."""
    _, gradients = contestant.training.gradients(0)
    one.gradient_error = gradient_error(gradients, expected)
    one.peak_bytes = contestant.peak_bytes()
    one.report = report_fields(contestant.report)


def table(found: Sequence[Figures]) -> str:
    """A line for each rule and way."""
    return format_table([HEAD, *(one.cells() for one in found)])


def run(rules: Sequence[Rule], given: argparse.Namespace) -> int:
    """Measure, print, write; 1 where a promise is broken."""
    found: list[Figures] = []
    for rule in rules:
        found += ways_of(rule, given.percent, given.rounds, given.steps)
        print(table(found[-3:]), file=sys.stderr, flush=True)
        if given.out is not None:
            data = {
                "machine": describe_machine("cpu", given.threads),
                "percent": given.percent,
                "rows": [asdict(one) for one in found],
            }
            write_json(given.out, data)
    print(table(found))
    failures = [failure for one in found for failure in one.failures()]
    for failure in failures:
        print(f"FAILED: {failure}")
    return int(bool(failures))

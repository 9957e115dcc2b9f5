"""What each rule of the table of variants is worth: a real model and a budget where it is taken.

    python -m benchmarks.rules [--names sign_masks,saved_8bit] [--sizes cpu,gpu] [--out rules.json]
    python -m benchmarks.rules --measure --names fused_attention

Simulated: the training steps of `benchmarks.rules_models` are traced, the small ones at the rates
of a CPU, the large ones, without a byte of memory, at those of a GPU. For each rule and each of its
models two things are planned with this rule alone and without any:

    least       the least peak of the step
    budgets     percents of store-all's peak, and the least peak without the rule: the time added

and at the budget where the rule gains most, with all exact rules beside it and with all of them but
it (`beside`), so that a rule whose work another does as well is seen. Every plan is judged by the
independent checker. A rule pays in bytes where the least peak sinks, in seconds where it is taken
and the time added is less, or the budget is met with it only. Gains below `LEAST_SAVED` and
`LEAST_GAIN` count as none. Inexact rules are allowed alone, each for itself.

`--measure` trains the small models for real, under one budget without the rule and with it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fxremat.compat.tensors import fake_tensors
from fxremat.compile.tracing import trace_step
from fxremat.core.check import check
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.timeline import store_all_peak
from fxremat.core.variants import take
from fxremat.cost.device import spec_named
from fxremat.passes.variants.insertion import Rule
from fxremat.passes.variants.table import RULES
from fxremat.planner import SolverOptions, solve

from .commands import parser_for, write_json
from .machine import describe_machine
from .rows import MIB, format_table
from .rules_models import OF_RULE, SIZES, build
from .training import rule_of

LEAST_SAVED = 0.005
"""Of the least peak: searches for it may end as far apart."""
LEAST_GAIN = 0.002
"""Of store-all's time: so near to its bound the solver leaves a plan as it is."""
BUDGETS = (80, 60, 45, 33)
"""Percents of store-all's peak."""
RATES = {"cpu": "cpu", "gpu": "A100"}
DTYPES = {"cpu": torch.float32, "gpu": torch.bfloat16}
SECONDS = 2.0
"""For the solver, in each of its turns."""
REAL = ("convolution_workspace",)
"""Rules that need the workspaces of library calls, which are measured on real memory."""


VERDICTS = ("no site", "does not pay", "pays in seconds", "pays in bytes",
            "pays in bytes and seconds")  # fmt: skip


@dataclass(frozen=True)
class At:
    """One budget: added times are parts of store-all's, None where nothing found fits.

    ``label`` is the percent of store-all's peak, or "least", the least peak without the rule.
    """

    label: str
    budget_bytes: int
    without: float | None
    with_rule: float | None
    sites: int
    """That the plan takes."""

    @property
    def gain(self) -> float:
        """In parts of store-all's time; infinite where only the rule meets the budget."""
        if self.with_rule is None or not self.sites:
            return 0.0
        return float("inf") if self.without is None else self.without - self.with_rule


@dataclass
class Row:
    """One rule on one model. ``beside`` is the best budget with all other exact rules allowed."""

    rule: str
    lossy: bool
    model: str
    size: str
    rates: str
    sites: int
    store_all_bytes: int = 0
    least_without: int = 0
    least_with: int = 0
    least_sites: int = 0
    budgets: list[At] = field(default_factory=list)
    beside: At | None = None

    @property
    def saved(self) -> float:
        """Of the least peak."""
        return 1 - self.least_with / self.least_without if self.least_without else 0.0

    @property
    def best(self) -> At | None:
        """The budget at which the rule gains most; the largest of those that it alone meets."""
        return max(self.budgets, key=lambda at: (at.gain, at.budget_bytes), default=None)

    @property
    def verdict(self) -> str:
        """Whether the rule pays here: one of `VERDICTS`."""
        if not self.sites:
            return VERDICTS[0]
        in_bytes = self.saved > LEAST_SAVED and self.least_sites > 0
        in_seconds = self.best is not None and self.best.gain > LEAST_GAIN
        return VERDICTS[1 + in_seconds + 2 * in_bytes]

    def to_json(self) -> dict[str, Any]:
        """Fields and derived figures."""
        return {**asdict(self), "saved": self.saved, "verdict": self.verdict}


# -- planning --------------------------------------------------------------------------------


@cache
def problem_of(model: str, size: str, names: tuple[str, ...]) -> Problem:
    """The step at the rates of its size, with the variants of these rules as variants."""
    rules = [rule for rule in RULES if rule.name in names]
    spec = spec_named(RATES[size])
    if set(names) & set(REAL):
        module, inputs = build(model, size)
        return trace_step(
            model, module, inputs, workspaces=True, spec=spec, rules=rules
        ).found.problem
    with fake_tensors():
        module, inputs = build(model, size, dtype=DTYPES[size])
        return trace_step(model, module, inputs, spec=spec, rules=rules).found.problem


def plan(problem: Problem, budget: int | None, seconds: float) -> Plan:
    """The best plan found, judged."""
    found = solve(problem, budget, options=SolverOptions(time_limit_s=seconds))
    verdict = check(take(problem, found.variants), found.steps)
    assert verdict.ok, str(verdict)
    assert verdict.peak_bytes == found.peak_bytes
    return found


def taken(found: Plan, rule: str) -> int:
    """How many sites of a rule a plan takes."""
    return sum(rule_of(name) == rule for name in found.variants)


class Comparison:
    """Plans of one step with some variants and with others."""

    def __init__(self, rule: str, without: Problem, problem: Problem, seconds: float) -> None:
        self.rule, self.without, self.problem, self.seconds = rule, without, problem, seconds
        plain = take(without, ())
        self.store_all_bytes = store_all_peak(plain)
        self.base_us = plain.base_time_us

    def at(self, label: str, budget: int) -> At:
        """Both at one budget, each with what the other's search found of its plans."""
        plans = [plan(one, budget, self.seconds) for one in (self.without, self.problem)]
        bare = [its for its in plans if not taken(its, self.rule)]
        best, best_bare = (
            min(some, key=lambda its: (max(its.peak_bytes, budget), its.time_us))
            for some in (plans, bare)
        )
        without, with_rule = (self._added(its, budget) for its in (best_bare, best))
        return At(label, budget, without, with_rule, taken(best, self.rule))

    def _added(self, its: Plan, budget: int) -> float | None:
        return its.time_us / self.base_us - 1 if its.peak_bytes <= budget else None

    def least(self) -> tuple[Plan, Plan]:
        """The plans of least peak; with the rule, it is never more than without."""
        without, found = (plan(one, 0, self.seconds) for one in (self.without, self.problem))
        return without, min((without, found), key=lambda its: its.peak_bytes)


def row_of(rule: Rule, model: str, size: str, seconds: float) -> Row:
    """All that is planned for one rule on one model."""
    problem = problem_of(model, size, (rule.name,))
    sites = len(problem.variants)
    row = Row(rule.name, rule.lossy, model, size, RATES[size], sites)
    if not sites:
        return row
    comparison = Comparison(rule.name, take(problem, ()), problem, seconds)
    without, found = comparison.least()
    row.store_all_bytes = comparison.store_all_bytes
    row.least_without, row.least_with = without.peak_bytes, found.peak_bytes
    row.least_sites = taken(found, rule.name)
    for percent in BUDGETS:
        budget = row.store_all_bytes * percent // 100
        if budget > row.least_with:
            row.budgets.append(comparison.at(f"{percent}%", budget))
    row.budgets.append(comparison.at("least", row.least_without))
    return row


def beside_others(row: Row, seconds: float) -> At | None:
    """The best budget of a row once more, with all exact rules allowed, and with all but its."""
    if row.best is None or not row.best.gain:
        return None
    others = tuple(rule.name for rule in RULES if not rule.lossy and rule.name not in REAL)
    names = tuple(dict.fromkeys((*others, row.rule)))
    problem = problem_of(row.model, row.size, names)
    left = tuple(one for one in problem.variants if rule_of(one.name) != row.rule)
    without = replace(problem, variants=left)
    return Comparison(row.rule, without, problem, seconds).at(row.best.label, row.best.budget_bytes)


def rows_of(rule: Rule, sizes: Sequence[str], seconds: float, beside: bool) -> Iterator[Row]:
    """The rows of a rule: of each size the first model in which it pays, or all its models."""
    for size in sizes:
        if size == "gpu" and rule.name in REAL:
            continue  # there is no GPU's workspace to measure
        for model in OF_RULE[rule.name]:
            row = row_of(rule, model, size, seconds)
            if beside:
                row.beside = beside_others(row, seconds)
            yield row
            if row.verdict.startswith("pays"):
                break


# -- printing --------------------------------------------------------------------------------

HEAD = ["rule", "model", "rates", "sites", "least MiB", "with it", "saved", "budget", "MiB",
        "without", "with it", "taken", "beside: without", "with", "taken", "verdict"]  # fmt: skip


def _added(figure: float | None) -> str:
    return "over" if figure is None else f"{figure:+.1%}"


def _at(at: At | None) -> list[str]:
    if at is None:
        return ["", "", ""]
    return [_added(at.without), _added(at.with_rule), str(at.sites)]


def cells(row: Row) -> list[str]:
    """A line of the table."""
    best = row.best
    return [
        row.rule + (" (inexact)" if row.lossy else ""),
        row.model,
        row.rates,
        str(row.sites),
        f"{row.least_without / MIB:.1f}",
        f"{row.least_with / MIB:.1f}",
        f"{row.saved:.1%}",
        best.label if best else "",
        f"{best.budget_bytes / MIB:.1f}" if best else "",
        *_at(best),
        *_at(row.beside),
        row.verdict,
    ]


def table(rows: Sequence[Row]) -> str:
    """A line for each rule and model."""
    return format_table([HEAD, *map(cells, rows)])


def verdicts(rows: Sequence[Row]) -> dict[str, str]:
    """Of each rule over all its models: the best that one of them shows."""
    found: dict[str, str] = {}
    for row in rows:
        known = found.get(row.rule, VERDICTS[0])
        found[row.rule] = max(known, row.verdict, key=VERDICTS.index)
    return found


def rules_of(names: str) -> list[Rule]:
    """The rules named; raises `SystemExit` for a name that is none."""
    wanted = {rule.name for rule in RULES} if names == "all" else set(names.split(","))
    unknown = wanted - {rule.name for rule in RULES}
    if unknown:
        raise SystemExit(f"no rule: {', '.join(sorted(unknown))}")
    return [rule for rule in RULES if rule.name in wanted]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for("benchmarks.rules", __doc__)
    add = parser.add_argument
    add("--names", default="all", help="of rules")
    add("--sizes", default=",".join(SIZES), help="of models: cpu, gpu")
    add("--seconds", type=float, default=SECONDS, help="for the solver, in each of its turns")
    add("--alone", action="store_true", help="leave out what the rule is worth beside the others")
    add("--add", action="store_true", help="keep what else the file has")
    add("--measure", action="store_true", help="real steps on the CPU")
    add("--percent", type=int, default=60, help="of torch.compile's peak, for --measure")
    add("--rounds", type=int, default=3, help="of timed steps, for --measure")
    add("--steps", type=int, default=3, help="timed steps in a round, for --measure")
    add("--threads", type=int, default=1)
    add("--out", type=Path, help="JSON file")
    return parser.parse_args(words)


def known_rows(path: Path | None, add: bool) -> list[Row]:
    """What the file has, if it is to be added to."""
    if path is None or not add or not path.exists():
        return []
    return [row_from_json(data) for data in json.loads(path.read_text())["rows"]]


def row_from_json(data: dict[str, Any]) -> Row:
    """A row read back."""
    own = {name: data[name] for name in Row.__dataclass_fields__}
    beside = None if data["beside"] is None else At(**data["beside"])
    budgets = [At(**at) for at in data["budgets"]]
    return Row(**{**own, "budgets": budgets, "beside": beside})


def write(path: Path, rows: Sequence[Row], given: argparse.Namespace) -> None:
    """What is known so far, for it takes minutes to know all."""
    data = {
        "machine": describe_machine("cpu", given.threads),
        "seconds": given.seconds,
        "verdicts": verdicts(rows),
        "rows": [row.to_json() for row in rows],
    }
    write_json(path, data)


def main(words: Sequence[str] | None = None) -> int:
    """Plan or measure, print, write; 1 where a rule does not pay anywhere."""
    given = parse_arguments(words)
    torch.set_num_threads(given.threads)
    if given.measure:
        from .rules_measure import run

        return run(rules_of(given.names), given)
    rows = known_rows(given.out, given.add)
    for rule in rules_of(given.names):
        for row in rows_of(rule, given.sizes.split(","), given.seconds, not given.alone):
            key = row.rule, row.model, row.size
            rows = [one for one in rows if (one.rule, one.model, one.size) != key] + [row]
            print("  ".join(cells(row)), file=sys.stderr, flush=True)
            if given.out is not None:
                write(given.out, rows, given)
    print(table(rows))
    idle = [name for name, its in verdicts(rows).items() if not its.startswith("pays")]
    print(f"\nrules that do not pay: {', '.join(idle) or 'none'}")
    return int(bool(idle))


if __name__ == "__main__":
    sys.exit(main())

"""What variants are worth: beside recomputation, alone, one after the other, together.

    python -m benchmarks.variants plans --models resnet,vgg,gpt50k --budgets 80,50,33
    python -m benchmarks.variants convergence

`plans` is simulated, the ablation of MONeT (arXiv 2010.14501, section 5): the training step is
traced with the rates of a device, and four ways to meet a budget (percent of store-all's peak) are
compared by the time that they add to it. Every plan is judged by the independent checker.

    recompute   no variants
    variants    variants, but nothing runs again
    in turn     those of `variants`, or those that save time, then what has to run again
    together    one decision

`convergence` trains two small models in every lossy variant beside exact training: the same data,
the same weights to begin with. What each rule alone is worth shows `benchmarks.rules`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fxremat.compat.tensors import fake_tensors
from fxremat.compile.tracing import trace_step
from fxremat.core.check import check
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.timeline import store_all_peak
from fxremat.core.variants import run_once, take
from fxremat.cost.device import spec_named
from fxremat.passes.variants.table import rules_named
from fxremat.planner import SolverOptions, solve

from .commands import parser_for, write_json
from .machine import describe_machine
from .models import MODELS, SIZES, build
from .rows import MIB, format_table
from .training import rule_of

WAYS = ("recompute", "variants", "in turn", "together")
SAME = 1e-6
"""Of store-all's time: differences that count as none."""


@dataclass(frozen=True)
class Row:
    """One way to meet one budget; ``added`` is what it adds to the time of store-all, None if none.

    ``peak_bytes`` is the least found where the budget cannot be met; ``rules`` counts the variants.
    """

    model: str
    percent: int
    way: str
    budget_bytes: int
    peak_bytes: int
    added: float | None
    bound: float | None
    variants: int
    runs: int
    seconds: float
    rules: dict[str, int] = field(default_factory=dict)

    def cell(self) -> str:
        """For the table."""
        if self.added is None:
            return f"({self.peak_bytes / self.budget_bytes:.2f} of it)"
        return f"{self.added:.2%}"


def problem_of(name: str, size: str, device: str, lossy: bool) -> Problem:
    """The step traced without memory, with all variants as variants."""
    spec = spec_named(device)
    rules = rules_named(None, allow_lossy=lossy)
    dtype = torch.bfloat16 if size == "gpu" else torch.float32
    with fake_tensors():
        model, inputs = build(name, size, dtype=dtype)
        return trace_step(name, model, inputs, spec=spec, rules=rules).found.problem


def ways(problem: Problem, budget: int, solver: str) -> dict[str, Plan]:
    """The plan of each way."""
    options = SolverOptions()

    def then_again(first: Plan) -> Plan:
        """What has to run again on top of the variants of a plan."""
        left = take(problem, first.variants)
        return replace(solve(left, budget, solver, options), variants=first.variants)

    once = run_once(problem)
    alone, fastest = (solve(once, limit, solver, options) for limit in (budget, None))
    in_turn = (then_again(first) for first in (alone, fastest))
    return {
        "recompute": solve(take(problem, ()), budget, solver, options),
        "variants": alone,
        "in turn": min(in_turn, key=lambda plan: (max(plan.peak_bytes, budget), plan.time_us)),
        "together": solve(problem, budget, solver, options),
    }


def rows_of(name: str, problem: Problem, percent: int, solver: str) -> list[Row]:
    """All ways at one budget."""
    plain = take(problem, ())
    full = store_all_peak(plain)
    budget, base = full * percent // 100, plain.base_time_us
    out = []
    for way, plan in ways(problem, budget, solver).items():
        left = take(problem, plan.variants)
        verdict = check(left, plan.steps)
        assert verdict.ok, str(verdict)
        assert verdict.peak_bytes == plan.peak_bytes
        fits = plan.peak_bytes <= budget
        bound = None if plan.time_bound_us is None or way != "recompute" else plan.time_bound_us
        out.append(
            Row(
                name, percent, way, budget, plan.peak_bytes,
                plan.time_us / base - 1 if fits else None,
                None if bound is None else bound / base - 1,
                len(plan.variants), sum(plan.repeats().values()), plan.seconds,
                dict(Counter(map(rule_of, plan.variants))),
            )
        )  # fmt: skip
    return out


def worse_together(rows: Sequence[Row]) -> list[str]:
    """Cases in which one decision is behind another way."""
    out = []
    for row in rows:
        if row.way == "together":
            others = [r for r in rows if (r.model, r.percent) == (row.model, row.percent)]
            best = min((r.added for r in others if r.added is not None), default=None)
            if best is not None and (row.added is None or row.added > best + SAME):
                out.append(f"{row.model} {row.percent} %: together {row.cell()}, best {best:.2%}")
    return out


def table(rows: Sequence[Row]) -> str:
    """A line for each case."""
    cases = dict.fromkeys((row.model, row.percent) for row in rows)
    lines = []
    for model, percent in cases:
        found = {row.way: row for row in rows if (row.model, row.percent) == (model, percent)}
        budget = found["together"].budget_bytes
        cells = [found[way].cell() for way in WAYS]
        lines.append([model, f"{percent} %", f"{budget / MIB:.0f}", *cells,
                      str(found["together"].variants), str(found["together"].runs)])  # fmt: skip
    head = ["model", "budget", "MiB", *WAYS, "variants", "runs again"]
    return format_table([head, *lines])


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for("benchmarks.variants", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    plans = commands.add_parser("plans", help="simulated: four ways to meet a budget")
    plans.add_argument("--models", default="resnet,vgg,gpt50k", help=f"of {', '.join(MODELS)}")
    plans.add_argument("--size", choices=SIZES, default="gpu")
    plans.add_argument("--device", default="A100", help="whose rates give the times")
    plans.add_argument("--budgets", default="80,60,50,40,33", help="percent of store-all's peak")
    plans.add_argument("--solver", default="auto")
    plans.add_argument("--allow-lossy", action="store_true")
    plans.add_argument("--out", type=Path, help="JSON file")
    convergence = commands.add_parser("convergence", help="trained in every lossy variant")
    convergence.add_argument("--steps", type=int, default=300)
    convergence.add_argument("--out", type=Path, help="JSON file; the curves go beside it, as SVG")
    return parser.parse_args(words)


def main() -> None:
    """Run one command."""
    given = parse_arguments()
    if given.command == "plans":
        sys.exit(plans(given))
    from .variants_convergence import run

    sys.exit(run(given))


def plans(given: argparse.Namespace) -> int:
    """Plan, print, write."""
    rows: list[Row] = []
    for name in given.models.split(","):
        problem = problem_of(name, given.size, given.device, given.allow_lossy)
        count = len(problem.variants)
        print(f"{name}: {len(problem.ops)} ops, {count} variants", file=sys.stderr, flush=True)
        for percent in map(int, given.budgets.split(",")):
            rows += rows_of(name, problem, percent, given.solver)
            print(f"{name}: {percent} %", file=sys.stderr, flush=True)
    print(table(rows))
    failures = worse_together(rows)
    for failure in failures:
        print(f"behind: {failure}")
    if given.out is not None:
        machine = describe_machine("cpu", 1)
        data: dict[str, Any] = {"machine": machine, "device": given.device, "size": given.size,
                                "solver": given.solver, "lossy": given.allow_lossy,
                                "rows": [asdict(row) for row in rows]}  # fmt: skip
        write_json(given.out, data)
    return 1 if failures else 0


if __name__ == "__main__":
    main()

"""Every solver on every problem, side by side; each plan is judged by the independent checker.

    python -m benchmarks.planner --out benchmarks/results/planner.json
    python -m benchmarks.planner --traced none --only K_GPT16 --budgets 60 --time-limit 20

The problems are the JSON files of a directory and models of `benchmarks.models`, traced anew.
Budgets are in percent of the peak of store-all. FAILED, and the exit status 1, say that a plan
fails the check, that another plan refutes a bound, or that a solver ended in an error that it
does not document.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from fxremat.cli.solve import gap
from fxremat.core.check import check
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.timeline import replay
from fxremat.planner import SOLVERS, ProblemRefused, SolverOptions, solve

from .commands import parser_for, write_json
from .planner_problems import DIRECTORY, NONE, TRACED, collect
from .planner_table import Case, Row, heading, line, overview, summarise, summary_table

CHOICES = tuple(dict.fromkeys(("auto", *SOLVERS)))
DEFAULT = [name for name in CHOICES if name != "least_peak"]
SOLVER = "greedy"
"""What the others are compared with."""
ADVICE = ("What to do", "Use the solver", "use solver")
SAME = 1e-6
"""By this part of a time a bound may be above it: solvers compute in floating point."""

Contestant = Callable[[Case, Problem], Row]


# -- one solver on one case ------------------------------------------------------------------


def make_case(name: str, problem: Problem, percent: int) -> Case:
    """A budget in percent of the peak of store-all."""
    full = replay(problem, problem.base_steps()).peak_bytes
    return Case(name, len(problem.ops), full, percent, full * percent // 100)


def attempt(case: Case, problem: Problem, title: str, plan_it: Callable[[Problem], Plan]) -> Row:
    """Plan, take the time, judge. The problem is a new one to solvers that remember."""
    started = time.perf_counter()
    try:
        plan = plan_it(replace(problem))
    except ProblemRefused as error:
        return Row(case, title, "refused", time.perf_counter() - started, reason=_brief(error))
    except Exception as error:  # the others are still to come
        traceback.print_exc()
        reason = f"{type(error).__name__}: {_brief(error)}"
        return Row(case, title, "FAILED", time.perf_counter() - started, reason=reason)
    return judged(case, problem, title, plan, time.perf_counter() - started)


def _brief(error: Exception) -> str:
    """What is wrong, without the advice."""
    text = " ".join(str(error).split())
    for advice in ADVICE:
        text = text.partition(advice)[0]
    return text.rstrip(" .:")


def judged(case: Case, problem: Problem, title: str, plan: Plan, seconds: float) -> Row:
    """The row of a plan."""
    fits = plan.peak_bytes <= case.budget_bytes
    row = Row(
        case,
        title,
        "ok" if fits else "infeasible",
        seconds,
        peak_bytes=plan.peak_bytes,
        peak_bound_bytes=plan.peak_bound_bytes,
    )
    failure = failure_of(problem, plan, case.budget_bytes if fits else None)
    if failure:
        return replace(row, status="FAILED", reason=failure)
    if not fits:
        return row
    base = problem.base_time_us
    bound = base if plan.time_bound_us is None else plan.time_bound_us
    return replace(
        row,
        added_percent=_over(plan.time_us, base),
        bound_percent=_over(bound, base),
        gap_percent=100 * gap(plan.time_us, bound),
    )


def _over(time_us: float, base_us: float) -> float:
    return 100 * (time_us / base_us - 1) if base_us else 0.0


def failure_of(problem: Problem, plan: Plan, budget_bytes: int | None) -> str:
    """What the checker has against the plan and its figures; nothing where all is well."""
    verdict = check(problem, plan.steps, budget_bytes)
    if not verdict.ok:
        return str(verdict.failures[0])
    if verdict.peak_bytes != plan.peak_bytes:
        return f"its peak is {verdict.peak_bytes:,} bytes"
    if not math.isclose(verdict.time_us, plan.time_us, abs_tol=SAME):
        return f"its time is {verdict.time_us} us, not {plan.time_us} us"
    return ""


def refuted(rows: Sequence[Row]) -> list[Row]:
    """The rows of one case; those whose bounds another plan refutes are marked as failed."""
    added = min((r.added_percent for r in rows if r.added_percent is not None), default=math.inf)
    real = (row.peak_bytes for row in rows if row.status != "FAILED")
    peak = min((nbytes for nbytes in real if nbytes is not None), default=math.inf)
    least = added + SAME * (100 + added)
    return [
        replace(row, status="FAILED", reason="another plan refutes its bound")
        if (row.bound_percent or 0) > least or (row.peak_bound_bytes or 0) > peak
        else row
        for row in rows
    ]


# -- who takes part --------------------------------------------------------------------------


def solvers(names: Sequence[str], limit_s: float) -> list[Contestant]:
    """The planner under each of its solvers."""
    options = SolverOptions(time_limit_s=limit_s)
    return [partial(solver_row, name=name, options=options) for name in names]


def solver_row(case: Case, problem: Problem, name: str, options: SolverOptions) -> Row:
    """One solver on one case."""
    return attempt(case, problem, name, lambda its: solve(its, case.budget_bytes, name, options))


# -- all of them -----------------------------------------------------------------------------


def run_case(case: Case, problem: Problem, contestants: Sequence[Contestant]) -> list[Row]:
    """Print the rows of a case as they come."""
    print(heading(case), flush=True)
    rows = []
    for contestant in contestants:
        rows.append(contestant(case, problem))
        print(line(rows[-1]), flush=True)
    out = refuted(rows)
    for before, after in zip(rows, out, strict=True):
        if before != after:
            print(line(after), flush=True)
    return out


def describe() -> dict[str, Any]:
    """Machine, date, and the versions of everything that solves."""
    import torch

    from .machine import describe_machine

    there = {its.name.lower(): its.version for its in importlib.metadata.distributions()}
    versions = {name: there.get(name) for name in ("highspy", "ortools", "numpy")}
    return {**describe_machine("cpu", torch.get_num_threads()), **versions}


def write(path: Path, head: dict[str, Any], rows: Sequence[Row]) -> None:
    """Everything so far, as JSON."""
    summary = [asdict(its) for its in summarise(rows, SOLVER)]
    result = {**head, "summary": summary, "rows": [row.to_json() for row in rows]}
    write_json(path, result)


def run(options: argparse.Namespace) -> list[Row]:
    """All problems under all budgets."""
    limit = options.time_limit
    contestants = solvers(options.solvers, limit)
    head = {"machine": describe(), "time_limit_s": limit} if options.out else {}
    rows: list[Row] = []
    for name, problem in collect(options.problems, options.traced, options.size, options.only):
        for percent in options.budgets:
            rows += run_case(make_case(name, problem, percent), problem, contestants)
            if options.out:
                write(options.out, head, rows)
    return rows


def split(text: str) -> list[str]:
    """What commas part, each once."""
    return list(dict.fromkeys(filter(None, text.split(","))))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for("benchmarks.planner", __doc__)
    add = parser.add_argument
    add("--problems", type=Path, default=DIRECTORY, metavar="DIR", help=f"default: {DIRECTORY}")
    add("--traced", type=split, default=[*TRACED], help=f"models, or {NONE}; {', '.join(TRACED)}")
    add("--size", choices=("small", "deep"), default="small", help="of traced models")
    add("--only", nargs="+", default=[], metavar="NAME", help="these problems alone")
    add("--budgets", type=split, default=["80", "60", "40"], help="percent; 80,60,40")
    add("--solvers", type=split, default=DEFAULT, help=f"of {', '.join(CHOICES)}")
    add("--time-limit", type=float, default=60.0, metavar="S", help="for one plan; 60")
    add("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.solvers) - set(CHOICES)):
        parser.error(f"unknown solvers {unknown}; there are {', '.join(CHOICES)}")
    if not all(part.isdecimal() for part in options.budgets):
        parser.error(f"--budgets {','.join(options.budgets)}: write percents, as in 80,60")
    options.budgets = [int(part) for part in options.budgets]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and write; 1 where something failed."""
    options = parse(arguments)
    rows = run(options)
    if not rows:
        print("nothing to plan")
        return 0
    print(overview(rows))
    print(summary_table(summarise(rows, SOLVER), SOLVER))
    failed = sum(row.status == "FAILED" for row in rows)
    if failed:
        print(f"\nFAILED: {failed} of {len(rows)} rows")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Commands on a problem file: ``solve`` and ``check`` for a plan, ``pareto`` for all budgets."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from fxremat.cli.arguments import (
    Commands,
    UsageError,
    add_budget,
    add_copies,
    add_problem,
    add_time_limit,
    read_as,
    read_problem,
    read_solver,
    with_copies,
    write_json,
    write_text,
)
from fxremat.core.check import check
from fxremat.core.json_data import to_data
from fxremat.core.plan import Plan, claim_from_json
from fxremat.core.problem import Problem
from fxremat.core.timeline import replay, store_all_peak
from fxremat.core.variants import take
from fxremat.planner import SolverOptions, front, solve
from fxremat.planner.deadline import Deadline, interruptible
from fxremat.planner.solvers import Progress
from fxremat.report.front import front_of
from fxremat.sizes import exact_bytes

SECONDS_BETWEEN = 0.1
CLEAR = "\r\x1b[K"


def line_of(progress: Progress, base_us: float, limit_s: float | None) -> str:
    """``greedy: best +3.2 % time, proven +1.0 %, gap 2.1 %, 12 s left``"""
    best, bound = progress.time_us, progress.bound_us
    parts = ["no plan yet" if best is None else f"best {_added(best, base_us)} time"]
    if bound is not None:
        parts.append(f"proven {_added(bound, base_us)}")
    if best is not None and bound is not None:
        parts.append(f"gap {gap(best, bound):.1%}")
    if limit_s is None:
        parts.append(f"{progress.seconds:.0f} s")
    else:
        parts.append(f"{max(0.0, limit_s - progress.seconds):.0f} s left")
    return f"{progress.solver}: {', '.join(parts)}"


def gap(time_us: float, bound_us: float) -> float:
    """The most that the best plan can be above the optimum, as a fraction of its time."""
    return max(0.0, time_us - bound_us) / time_us if time_us else 0.0


def _added(time_us: float, base_us: float) -> str:
    return f"{time_us / base_us - 1:+.1%}" if base_us else f"{time_us:.1f} us"


@dataclass
class ProgressLine:
    """Shows at most ten lines a second, each over the one before."""

    stream: TextIO
    base_us: float
    limit_s: float | None
    last: float | None = None

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if self.last is None or now - self.last >= SECONDS_BETWEEN:
            self.last = now
            self.stream.write(CLEAR + line_of(progress, self.base_us, self.limit_s))
            self.stream.flush()

    def clear(self) -> None:
        """Leave an empty line behind."""
        if self.last is not None:
            self.stream.write(CLEAR)
            self.stream.flush()


@contextmanager
def on_terminal(base_us: float, limit_s: float | None, what: str) -> Iterator[SolverOptions]:
    """What a solver is given: it shows progress where there is a terminal.

    Ctrl-C ends it with ``what`` there is so far.
    """
    line = ProgressLine(sys.stderr, base_us, limit_s) if sys.stderr.isatty() else None
    try:
        with interruptible():
            yield SolverOptions(time_limit_s=limit_s, progress=line)
            stopped = not Deadline(None).running()
    finally:
        if line is not None:
            line.clear()
    if stopped:
        print(f"interrupted: this is {what} so far", file=sys.stderr)


def add(commands: Commands) -> None:
    solving = commands.add_parser("solve", help="plan a problem for a budget")
    add_problem(solving)
    add_budget(solving, required=True)
    solving.add_argument("--solver", metavar="S", type=read_solver, default="auto")
    add_time_limit(solving)
    add_copies(solving)
    solving.add_argument("--out", metavar="PLAN.json", help="write the plan here")
    solving.set_defaults(run=run_solve)
    checking = commands.add_parser("check", help="check a plan against its problem")
    add_problem(checking)
    checking.add_argument("plan", metavar="PLAN.json", help="only its steps and variants are read")
    add_budget(checking, required=False)
    add_copies(checking)
    checking.set_defaults(run=run_check)
    pareto = commands.add_parser("pareto", help="the Pareto front of peak against time")
    add_problem(pareto)
    pareto.add_argument("--out", metavar="FRONT.json", help="write the points here")
    pareto.add_argument("--picture", metavar="FRONT.svg", help="draw the front here")
    add_budget(pareto, required=False)
    add_time_limit(pareto)
    pareto.set_defaults(run=run_pareto)


def run_solve(given: argparse.Namespace) -> int:
    """Solve, print, write."""
    problem = with_copies(read_problem(given.problem), given)
    budget = given.budget(problem)
    best = "the best plan found"
    with on_terminal(problem.base_time_us, given.time_limit, best) as options:
        plan = solve(problem, budget, given.solver, options)
    if plan.peak_bytes > budget:
        print(nothing_fits(plan, budget), file=sys.stderr)
        return 1
    print(figures(problem, plan))
    if given.out is not None:
        write_json(given.out, to_data(plan))
    return 0


def nothing_fits(plan: Plan, budget_bytes: int) -> str:
    """The message where no plan fits; ``plan`` has the least peak that was found."""
    proven = "no lower bound proven"
    if plan.peak_bound_bytes is not None:
        proven = f"proven least: {plan.peak_bound_bytes}"
    return (
        f"no plan within {budget_bytes} bytes; "
        f"the least peak found is {plan.peak_bytes} bytes ({proven})"
    )


def figures(problem: Problem, plan: Plan) -> str:
    """The figures of a plan, a line each."""
    base, full = problem.base_time_us, store_all_peak(problem)
    rows = [("solver", plan.solver)]
    if plan.budget_bytes is not None:
        rows.append(("budget", _with_share(plan.budget_bytes, full)))
    rows.append(("peak", _with_share(plan.peak_bytes, full)))
    rows.append(("time", f"{plan.time_us:.1f} us, {_percent(plan.time_us, base)} over store-all"))
    if plan.moves:
        line = replay(take(problem, plan.variants), plan.steps)
        count = sum(move.kind == "to device" for move in plan.moves)
        stall = _percent(problem.base_time_us + line.timing.stall_us, problem.base_time_us)
        host = f"{exact_bytes(line.host_peak_bytes)} in host memory"
        rows.append(("moved", f"{count} values come back, {host}, {stall} of waiting"))
    if plan.variants:
        rows.append(("variants", ", ".join(plan.variants)))
    if plan.time_bound_us is not None:
        off = f"gap {gap(plan.time_us, plan.time_bound_us):.2%}"
        rows.append(("bound", f"at least {_percent(plan.time_bound_us, base)} is proven; {off}"))
    if plan.peak_bound_bytes is not None:
        rows.append(("least", f"no plan takes less than {exact_bytes(plan.peak_bound_bytes)}"))
    rows.append(("seconds", f"{plan.seconds:.2f}"))
    return "\n".join(f"{name:9} {text}" for name, text in rows)


def _percent(time_us: float, base_us: float) -> str:
    return f"{time_us / base_us - 1:+.2%}" if base_us else "+0.00%"


def _with_share(nbytes: int, full: int) -> str:
    share = f", {nbytes / full:.1%} of store-all" if full else ""
    return f"{exact_bytes(nbytes)}{share}"


def run_check(given: argparse.Namespace) -> int:
    """Check the plan and print the verdict."""
    problem = with_copies(read_problem(given.problem), given)
    claim = read_as(given.plan, claim_from_json)
    budget = None if given.budget is None else given.budget(problem)
    try:
        left = take(problem, claim.variants)
    except KeyError as error:
        raise UsageError(f"{given.plan}: the problem has no variant {error}") from error
    verdict = check(left, claim.steps, budget)
    print(verdict)
    return 0 if verdict.ok else 1


def run_pareto(given: argparse.Namespace) -> int:
    """Find the front, print, write and draw it."""
    problem = read_problem(given.problem)
    budget = None if given.budget is None else given.budget(problem)
    with on_terminal(problem.base_time_us, given.time_limit, "what was found") as options:
        plans = front(problem, options)
    found = front_of(problem, plans, budget_bytes=budget)
    print(found)
    if given.out is not None:
        write_json(given.out, found.to_json())
    if given.picture is not None:
        write_text(given.picture, found.picture())
    return 0

"""``solve``: problem and budget in, plan out."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from fxremat.cli import files
from fxremat.cli.arguments import (
    Commands,
    add_budget,
    add_copies,
    add_problem,
    add_time_limit,
    keep_all_peak,
    read_solver,
    with_copies,
)
from fxremat.cli.progress import gap, shown
from fxremat.core.plan import Plan, plan_to_json
from fxremat.core.problem import Problem
from fxremat.core.timeline import replay
from fxremat.core.variants import take
from fxremat.planner import SolverOptions, solve
from fxremat.planner.deadline import Deadline, interruptible
from fxremat.sizes import exact_bytes


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = commands.add_parser("solve", help="plan a problem for a budget")
    add_problem(parser)
    add_budget(parser, required=True)
    parser.add_argument("--solver", metavar="S", type=read_solver, default="auto")
    add_time_limit(parser)
    add_copies(parser)
    parser.add_argument("--out", metavar="PLAN.json", help="write the plan here")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Solve, print, write."""
    problem = with_copies(files.read_problem(given.problem), given)
    budget = given.budget.bytes_for(problem)
    limits = SolverOptions(time_limit_s=given.time_limit)
    plan = solve_on_terminal(problem, budget, given.solver, limits)
    if plan.peak_bytes > budget:
        print(nothing_fits(plan, budget), file=sys.stderr)
        return 1
    print(figures(problem, plan))
    if given.out is not None:
        files.write_json(given.out, plan_to_json(plan))
    return 0


def solve_on_terminal(
    problem: Problem, budget_bytes: int, solver: str, options: SolverOptions
) -> Plan:
    """Solve with progress shown; Ctrl-C ends it with the best plan found so far."""
    with shown(problem.base_time_us, options.time_limit_s) as progress, interruptible():
        plan = solve(problem, budget_bytes, solver, replace(options, progress=progress))
        stopped = not Deadline(None).running()
    if stopped:
        print("interrupted: this is the best plan found so far", file=sys.stderr)
    return plan


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
    base, full = problem.base_time_us, keep_all_peak(problem)
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

"""``pareto``: the time that each number of bytes costs, as a table, as JSON and as a picture."""

from __future__ import annotations

import argparse
import sys

from fxremat.cli import files
from fxremat.cli.arguments import Commands, add_budget, add_problem, add_time_limit
from fxremat.cli.progress import shown
from fxremat.planner import SolverOptions, front
from fxremat.planner.deadline import Deadline, interruptible
from fxremat.report.front import front_of


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = commands.add_parser("pareto", help="the Pareto front of peak against time")
    add_problem(parser)
    parser.add_argument("--out", metavar="FRONT.json", help="write the points here")
    parser.add_argument("--picture", metavar="FRONT.svg", help="draw the front here")
    add_budget(parser, required=False)
    add_time_limit(parser)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Find the front, print, write and draw it."""
    problem = files.read_problem(given.problem)
    budget = None if given.budget is None else given.budget.bytes_for(problem)
    with shown(problem.base_time_us, given.time_limit) as progress, interruptible():
        plans = front(problem, SolverOptions(time_limit_s=given.time_limit, progress=progress))
        stopped = not Deadline(None).running()
    if stopped:
        print("interrupted: this is what was found so far", file=sys.stderr)
    found = front_of(problem, plans, budget_bytes=budget)
    print(found)
    if given.out is not None:
        files.write_json(given.out, found.to_json())
    if given.picture is not None:
        files.write_text(given.picture, found.picture())
    return 0

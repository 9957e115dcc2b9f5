"""``check``: whether a plan is valid, and what it needs, by `fxremat.core.check` alone."""

from __future__ import annotations

import argparse

from fxremat.cli import files
from fxremat.cli.arguments import (
    Commands,
    UsageError,
    add_budget,
    add_copies,
    add_problem,
    with_copies,
)
from fxremat.core.check import check
from fxremat.core.variants import take


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = commands.add_parser("check", help="check a plan against its problem")
    add_problem(parser)
    parser.add_argument("plan", metavar="PLAN.json", help="only its steps and variants are read")
    add_budget(parser, required=False)
    add_copies(parser)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Check the plan and print the verdict."""
    problem = with_copies(files.read_problem(given.problem), given)
    steps, variants = files.read_plan(given.plan)
    budget = None if given.budget is None else given.budget.bytes_for(problem)
    try:
        left = take(problem, variants)
    except KeyError as error:
        raise UsageError(f"{given.plan}: the problem has no variant {error}") from error
    verdict = check(left, steps, budget)
    print(verdict)
    return 0 if verdict.ok else 1

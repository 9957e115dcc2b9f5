"""The command line: problems and plans as JSON files, traced, solved, checked, drawn.

    python -m fxremat trace module:function --out problem.json
    python -m fxremat solve problem.json --budget 80% --out plan.json
    python -m fxremat check problem.json plan.json --budget 80%
    python -m fxremat pareto problem.json --picture front.svg
    python -m fxremat timeline graph_0.report.json --page step.html --perfetto step.json
    python -m fxremat variants
    python -m fxremat fit module:function --device H100 --vary batch=0:0,1:0
    python -m fxremat bisect train.py

A file's ``add`` describes its commands to the parser. Exit status: 0 for success, 1 if nothing fits
or is found, or a check fails, 2 if the arguments or files are wrong.
Only ``trace``, ``timeline``, ``variants`` and ``fit`` need torch, and what ``bisect`` runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from fxremat.cli import bisect, fit, solve, timeline, trace
from fxremat.cli.arguments import UsageError
from fxremat.core.problem import InvalidProblem
from fxremat.planner import ProblemRefused
from fxremat.version import __version__


class _Parser(argparse.ArgumentParser):
    """A parser whose error messages are one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help says more)")


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; what it returns has ``run``, the function to call."""
    parser = _Parser(
        prog="python -m fxremat", description="Plan training steps within a memory budget."
    )
    parser.add_argument("--version", action="version", version=f"fxremat {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    trace.add(commands)
    solve.add(commands)
    timeline.add(commands)
    variants = commands.add_parser("variants", help="list all operator variants")
    variants.set_defaults(run=_list_variants)
    fit.add(commands)
    bisect.add(commands)
    return parser


def _list_variants(given: argparse.Namespace) -> int:
    """Print the table."""
    from fxremat.passes.variants.table import RULES

    width = max(len(rule.name) for rule in RULES)
    for rule in RULES:
        named = "" if rule.by_default else " (only if named, or all are)"
        print(f"{rule.name:{width}}  {'lossy' if rule.lossy else 'exact'}  {rule.line}{named}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        given = make_parser().parse_args(arguments)
        return int(given.run(given))
    except (UsageError, InvalidProblem, ProblemRefused) as error:
        print(f"fxremat: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # there is no plan yet that could be kept
        print("fxremat: interrupted", file=sys.stderr)
        return 130

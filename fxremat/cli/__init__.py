"""The command line: problems and plans as JSON files, traced, solved, checked, drawn.

    fxremat fit config.json --device H100 --budget 60GiB --batch 8 --length 2048
    fxremat explain module:function --device H100 --budget 60GiB
    fxremat page step.html graph_0.report.json
    fxremat trace module:function --out problem.json
    fxremat solve problem.json --budget 80% --out plan.json
    fxremat check problem.json plan.json --budget 80%
    fxremat pareto problem.json --picture front.svg
    fxremat variants
    fxremat info
    fxremat bisect train.py

``python -m fxremat`` is the same. A file's ``add`` describes its commands to the parser. Exit
status: 0 for success, 1 if nothing fits or is found, or a check fails, 2 if the arguments or files
are wrong. ``solve``, ``check`` and ``pareto`` need no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from fxremat.cli import bisect, explain, fit, info, solve, trace
from fxremat.cli.arguments import UsageError
from fxremat.core.problem import InvalidProblem
from fxremat.errors import FxrematError, InfeasibleBudget
from fxremat.planner import ProblemRefused
from fxremat.version import __version__


class _Parser(argparse.ArgumentParser):
    """A parser whose error messages are one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help says more)")


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; what it returns has ``run``, the function to call."""
    parser = _Parser(prog="fxremat", description="Plan training steps within a memory budget.")
    parser.add_argument("--version", action="version", version=f"fxremat {__version__}")
    parser.add_argument("--traceback", action="store_true", help="say where an error comes from")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    fit.add(commands)
    explain.add(commands)
    trace.add(commands)
    solve.add(commands)
    variants = commands.add_parser("variants", help="list all operator variants")
    variants.set_defaults(run=_list_variants)
    info.add(commands)
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
    shows_where = False
    try:
        given = make_parser().parse_args(arguments)
        shows_where = given.traceback
        return int(given.run(given))
    except KeyboardInterrupt:  # there is no plan yet that could be kept
        print("fxremat: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if shows_where:
            raise
        print(f"fxremat: {_line_of(error)}", file=sys.stderr)
        return 1 if isinstance(error, InfeasibleBudget) else 2


def _line_of(error: Exception) -> str:
    """What happened and what to do: the first and the last line of an error of ours."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, FxrematError):
        return ". ".join(lines[:1] + [line for line in lines[1:] if line.startswith("What to do")])
    if isinstance(error, (UsageError, InvalidProblem, ProblemRefused)):
        return lines[0]
    return f"{type(error).__name__}: {lines[0]} (fxremat --traceback COMMAND says where)"

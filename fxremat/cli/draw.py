"""``draw``: reports as a page, one HTML file that shows the memory of the step."""

from __future__ import annotations

import argparse

from fxremat.cli import files
from fxremat.cli.arguments import Commands
from fxremat.report.page.writing import page_of, title_of


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = commands.add_parser("draw", help="the memory of a step as a page of HTML")
    parser.add_argument(
        "reports",
        metavar="REPORT.json",
        nargs="+",
        help="as the option report writes them, graph_0.report.json; several are one step",
    )
    parser.add_argument("--front", metavar="FRONT.json", help="draw it too; from pareto --out")
    parser.add_argument("--out", metavar="STEP.html", required=True, help="write the page here")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Read, write, and say what was decided."""
    reports = [files.read_report(path) for path in given.reports]
    front = None if given.front is None else files.read_front(given.front)
    files.write_text(given.out, page_of(reports, front))
    print(title_of(reports))
    return 0

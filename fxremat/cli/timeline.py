"""``timeline``: planned steps as a page of HTML, or as files for viewers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from fxremat.cli import files
from fxremat.cli.arguments import Commands, UsageError

if TYPE_CHECKING:
    from fxremat.report.report import Report


def add(commands: Commands) -> None:
    parser = commands.add_parser("timeline", help="show a planned step")
    parser.add_argument(
        "report", metavar="GRAPH.report.json", nargs="+", help="as the option `report` writes them"
    )
    parser.add_argument("--page", metavar="OUT.html", help="a page that shows the step's memory")
    parser.add_argument(
        "--front", metavar="FRONT.json", help="show this front on the page; pareto --out writes it"
    )
    parser.add_argument(
        "--perfetto", metavar="OUT.json", help="a Chrome trace, for ui.perfetto.dev"
    )
    parser.add_argument(
        "--memory-viz", metavar="OUT.pickle", help="a snapshot, for pytorch.org/memory_viz"
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Write the files that are asked for, and print a line for each graph."""
    from fxremat.report.chrome_trace import write_chrome_trace
    from fxremat.report.page import write_page
    from fxremat.report.snapshot import write_snapshot

    if given.page is None and given.perfetto is None and given.memory_viz is None:
        options = "--page OUT.html, --perfetto OUT.json or --memory-viz OUT.pickle"
        raise UsageError(f"nothing to write; give {options}")
    front = None if given.front is None else files.read_front(given.front)
    reports = [files.read_report(path) for path in given.report]
    for report in reports:
        print(report.summary())
    outputs: list[tuple[str | None, Callable[[str, list[Report]], None]]] = [
        (given.page, lambda path, reports: write_page(path, reports, front)),
        (given.perfetto, write_chrome_trace),
        (given.memory_viz, write_snapshot),
    ]
    for path, write in outputs:
        if path is None:
            continue
        with files.naming(path):
            write(path, reports)
        print(f"written   {path}")
    return 0

"""``timeline``: planned steps, as files for the viewers that people have."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fxremat.cli import files
from fxremat.cli.arguments import Commands
from fxremat.cli.errors import UsageError

if TYPE_CHECKING:
    from fxremat.report.report import Report


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = commands.add_parser("timeline", help="a planned step for Perfetto and memory_viz")
    parser.add_argument(
        "report", metavar="GRAPH.report.json", nargs="+", help="as the option `report` writes them"
    )
    parser.add_argument(
        "--perfetto", metavar="OUT.json", help="a Chrome trace, for ui.perfetto.dev"
    )
    parser.add_argument(
        "--memory-viz", metavar="OUT.pickle", help="a snapshot, for pytorch.org/memory_viz"
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Read, write what is asked for, and say of each graph what is in there."""
    from fxremat.report.chrome_trace import write_chrome_trace
    from fxremat.report.snapshot import write_snapshot

    if given.perfetto is None and given.memory_viz is None:
        raise UsageError("nothing to write; give --perfetto OUT.json or --memory-viz OUT.pickle")
    reports = [_read(path) for path in given.report]
    for report in reports:
        print(report.summary())
    for path, write in ((given.perfetto, write_chrome_trace), (given.memory_viz, write_snapshot)):
        if path is not None:
            with files.naming(path):
                write(path, reports)
            print(f"written   {path}")
    return 0


def _read(path: str) -> Report:
    """The report in a file."""
    from fxremat.report.report import report_from_json

    try:
        return report_from_json(files.read_json(path))
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: no report as the option `report` writes it") from error

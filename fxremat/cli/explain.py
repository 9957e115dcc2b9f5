"""``explain`` and ``page``: what was decided for a step, as text, a page, or files for viewers.

The step is planned here, or its reports are read that a compilation has written.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from fxremat.cli.arguments import Commands, naming, read_as
from fxremat.cli.step import add_plan, add_step, explained, is_config, planned_for, step_of
from fxremat.core.json_data import from_data
from fxremat.report.exports import write_chrome_trace, write_snapshot
from fxremat.report.front import front_from_json
from fxremat.report.page import write_page
from fxremat.report.report import Report


def add(commands: Commands) -> None:
    explain = commands.add_parser("explain", help="plan a step, and say what is decided")
    add_step(explain, or_reports=True)
    add_plan(explain)
    explain.add_argument(
        "--perfetto", metavar="OUT.json", help="write a Chrome trace, for ui.perfetto.dev"
    )
    explain.add_argument(
        "--memory-viz", metavar="OUT.pickle", help="write a snapshot, for pytorch.org/memory_viz"
    )
    explain.set_defaults(run=run_explain)
    page = commands.add_parser("page", help="write a page that shows the memory of a step")
    page.add_argument("out", metavar="OUT.html", help="write it here")
    add_step(page, or_reports=True)
    add_plan(page)
    page.add_argument(
        "--front", metavar="FRONT.json", help="show this front on the page; pareto --out writes it"
    )
    page.set_defaults(run=run_page)


def reports_of(given: argparse.Namespace) -> Sequence[Report]:
    """Those in the files that are given, or of the step that is planned now."""
    first = given.step[0]
    if len(given.step) > 1 or (first.endswith(".json") and not is_config(first)):
        what = "no report of this version of fxremat; the option report writes graph_0.report.json"
        return [read_as(path, partial(from_data, Report), what) for path in given.step]
    with planned_for(given.device):
        return explained(step_of(first, given), given).graphs


def run_explain(given: argparse.Namespace) -> int:
    """Print the report of each graph, and write the files that are asked for."""
    reports = reports_of(given)
    for report in reports:
        print(report)
    for path, write in (given.perfetto, write_chrome_trace), (given.memory_viz, write_snapshot):
        if path is not None:
            with naming(path):
                write(path, reports)
            print(f"written   {path}")
    return 0


def run_page(given: argparse.Namespace) -> int:
    """Write the page, and print a line for each graph."""
    front = None
    if given.front is not None:
        front = read_as(given.front, front_from_json, "no front; pareto --out writes one")
    reports = reports_of(given)
    for report in reports:
        print(report.summary())
    with naming(given.out):
        write_page(given.out, reports, front)
    print(f"written   {given.out}")
    return 0

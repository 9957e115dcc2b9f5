"""``variants``: all operator variants, a line each."""

from __future__ import annotations

import argparse

from fxremat.cli.arguments import Commands


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = commands.add_parser("variants", help="list all operator variants")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print the table."""
    from fxremat.passes.variants.table import RULES

    width = max(len(rule.name) for rule in RULES)
    for rule in RULES:
        named = "" if rule.by_default else " (only if named, or all are)"
        print(f"{rule.name:{width}}  {'lossy' if rule.lossy else 'exact'}  {rule.line}{named}")
    return 0

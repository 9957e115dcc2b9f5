"""Architectures of others, in small configurations, as their users train them: are budgets kept?

    python -m benchmarks.architectures [NAME ...] --json OUT [--minutes 5] [--again]
    python -m benchmarks.architectures --page OUT      # docs/architectures.md, from what was found

Each is trained with AdamW: under plain torch.compile, with each repeated block checkpointed, at
60 % of plain's peak, and at the least that fxremat names. One process an architecture. Rows are
written as they end, and those that a file has are not measured again. Needs what the extra
`architectures` installs, and the CPU.

    ok            within the budget, and within the named least
    over          more bytes than the budget, or than the named least
    refused       the budget is below the least
    failed        anything else that plain compile does: also wrong gradients, or too many minutes
    inactive      no graph was planned
    plain_fails   plain torch.compile fails

Exits with 1 where one is over, failed, inactive without a warning, or refused although
checkpointing takes no more than the budget.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..commands import write_json
from ..machine import describe_machine
from ..runner import ROOT
from .models import ARCHITECTURES
from .rows import HEAD, Row, page, summary

PAGE = ROOT / "docs" / "architectures.md"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.architectures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="all, if none is named")
    parser.add_argument("--json", type=Path, help="the file for the rows")
    parser.add_argument("--minutes", type=float, default=5.0, help="most of one architecture")
    parser.add_argument("--again", action="store_true", help="measure also what the file has")
    parser.add_argument("--page", type=Path, help="write the page in the docs from this file")
    asked = parser.parse_args(words)
    unknown = set(asked.names) - set(ARCHITECTURES)
    if unknown:
        parser.error(f"no {sorted(unknown)}; there are {', '.join(ARCHITECTURES)}")
    asked.names = asked.names or list(ARCHITECTURES)
    return asked


def rows_in(path: Path | None) -> dict[str, Row]:
    """The rows of a file by name; none if there is no file yet."""
    if path is None or not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {each["name"]: Row(each) for each in rows}


def commit() -> str:
    """Of the source tree, in short."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def measure(name: str, minutes: float) -> Row:
    """The row of one architecture, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.architectures.measuring", name]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=60 * minutes, check=False
        )
    except subprocess.TimeoutExpired:
        return Row({"name": name, "status": "failed", "error": f"took over {minutes:g} minutes"})
    lines = done.stdout.strip().splitlines()
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        said = done.stderr.strip().splitlines()[-3:]
        return Row({"name": name, "status": "failed", "error": " ".join(said)})
    return Row(found)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, or write the page."""
    asked = arguments(words)
    if asked.page:
        found = json.loads(asked.page.read_text(encoding="utf-8"))
        rows = list(map(Row, found["rows"]))
        PAGE.write_text(page(found["machine"], rows, len(ARCHITECTURES)), encoding="utf-8")
        return 0
    known = rows_in(asked.json)
    print("  ".join(HEAD), flush=True)
    for name in asked.names:
        if asked.again or name not in known:
            known[name] = Row({**measure(name, asked.minutes).found, "commit": commit()})
            if asked.json:
                _write(asked.json, known)
        print("  ".join(known[name].cells()), flush=True)
        for line in known[name].remarks():
            print("   ", line, flush=True)
    chosen = [known[name] for name in asked.names]
    print(summary(chosen))
    return int(any(row.is_bad for row in chosen))


def _write(path: Path, rows: dict[str, Row]) -> None:
    ordered = [rows[name].found for name in ARCHITECTURES if name in rows]
    machine = describe_machine("cpu", torch.get_num_threads())
    write_json(path, {"machine": machine, "rows": ordered})


if __name__ == "__main__":
    raise SystemExit(main())

"""``bisect``: a script runs with one part of fxremat left out after the other.

The part whose absence gives what plain Inductor gives is the one that makes the difference. Each
run is a process of its own; parts are left out by environment variables, so that options which the
script sets itself keep their part in.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fxremat.cli.arguments import Commands, UsageError

PARTS = {
    "planned addresses": "ARENA=0",
    "operator variants": "VARIANTS=none",
    "recomputing": "DISABLE_PASSES=recompute",
    "sums of gradients": "DISABLE_PASSES=sums",
    "writing in place": "DISABLE_PASSES=inplace",
    "moving activations": "OFFLOAD=0",
    "measured times": "OP_TIMES=roofline",
    "the best of all solvers": "SOLVER=greedy",
}
"""What each is called, and the setting that leaves it out."""
ALL_OFF = "DISABLE=1"
LINES_SHOWN = 3


@dataclass(frozen=True)
class Outcome:
    """What a run came to: its exit status, or the number that was asked for, and its last lines."""

    status: int
    number: float | None
    tail: str

    def is_nearer(self, one: Outcome, other: Outcome) -> bool:
        """Whether it is like one outcome rather than like the other."""
        if None in (self.number, one.number, other.number):
            return (self.status, self.number is None) == (one.status, one.number is None)
        assert self.number is not None
        assert one.number is not None
        assert other.number is not None
        return abs(self.number - one.number) < abs(self.number - other.number)

    def __str__(self) -> str:
        return f"exit status {self.status}" if self.number is None else f"{self.number:g}"


def add(commands: Commands) -> None:
    """Describe the command to the parser."""
    parser = commands.add_parser(
        "bisect", help="run a script without one part at a time, and name what makes a difference"
    )
    parser.add_argument(
        "--measure",
        metavar="PATTERN",
        help="compare the number in the first group of the pattern's last match in what the "
        r"script prints, such as 'loss (\S+)', instead of the exit status",
    )
    parser.add_argument("script", type=Path, metavar="SCRIPT.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    parser.set_defaults(run=_bisect)


def _bisect(given: argparse.Namespace) -> int:
    """Print what each run came to; 0 where some part makes the difference, else 1."""
    if not given.script.is_file():
        raise UsageError(f"there is no script {str(given.script)!r}")
    pattern = _pattern(given.measure)
    command = [sys.executable, str(given.script), *given.arguments]

    def run(what: str, setting: str = "") -> Outcome:
        start = time.monotonic()
        found = _outcome(command, setting, pattern)
        seconds = time.monotonic() - start
        print(f"{what:36} {found!s:20} {seconds:6.1f} s", flush=True)
        return found

    whole, none = run("with all of it"), run("plain Inductor", ALL_OFF)
    if pattern is not None and None in (whole.number, none.number):
        raise UsageError(f"nothing that was printed matches {given.measure!r}: {whole.tail}")
    if (whole.status, whole.number) == (none.status, none.number):
        print("fxremat makes no difference: the outcome is that of plain Inductor")
        return 1
    return _name_parts(run, whole, none)


def _name_parts(run: Callable[[str, str], Outcome], whole: Outcome, none: Outcome) -> int:
    parts = [
        (part, setting)
        for part, setting in PARTS.items()
        if run(f"without {part}", setting).is_nearer(none, whole)
    ]
    for part, setting in parts:
        print(f"found: {part} (FXREMAT_{setting})")
    if not parts:
        print("no single part makes the difference; last lines of the run with all of it:")
        print(whole.tail)
    return int(not parts)


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        pattern = None if text is None else re.compile(text)
    except re.error as error:
        raise UsageError(f"--measure is no regular expression: {error}") from error
    if pattern is not None and not pattern.groups:
        raise UsageError(r"--measure needs a group around the number, such as 'loss (\S+)'")
    return pattern


def _outcome(command: list[str], setting: str, pattern: re.Pattern[str] | None) -> Outcome:
    name, _, value = setting.partition("=")
    environment = {**os.environ, f"FXREMAT_{name}": value} if setting else None
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-LINES_SHOWN:])
    found = pattern.findall(done.stdout) if pattern is not None else []
    try:
        last = found[-1] if not found or isinstance(found[-1], str) else found[-1][0]
        return Outcome(done.returncode, float(last), tail)
    except (IndexError, ValueError):
        return Outcome(done.returncode, None, tail)

"""Arguments and files of several commands, how each is read, and the error for a wrong one."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fxremat.core.constants import CALL_US
from fxremat.core.problem import Copies, Problem, problem_from_json
from fxremat.core.timeline import store_all_peak
from fxremat.errors import nearest
from fxremat.planner import SOLVERS
from fxremat.sizes import parse_bytes

T = TypeVar("T")
Commands = Any
"""What ``add_subparsers`` returns; its type has no public name."""


class UsageError(Exception):
    """Something given on the command line is wrong; the message is one line."""


Budget = Callable[[Problem], int]
"""Gives the bytes for a problem."""


def read_budget(text: str) -> Budget:
    """``8589934592``, ``8GiB`` or ``80%``: of the peak of running every op once, in base order."""
    with suppress(ValueError):
        if text.strip().endswith("%"):
            percent = float(text.strip().removesuffix("%"))
            if 0 < percent < math.inf:
                return lambda problem: int(store_all_peak(problem) * percent / 100)
        elif (nbytes := parse_bytes(text)) > 0:
            return lambda problem: nbytes
    raise argparse.ArgumentTypeError(
        f"{text!r} is no budget; write bytes ('1048576'), a size ('8GiB') or a percentage of the "
        "store-all peak above 0% ('80%')"
    )


def read_solver(text: str) -> str:
    """``auto`` or the name of a solver."""
    names = ("auto", *(name for name in SOLVERS if name != "auto"))
    if text in names:
        return text
    close = nearest(text, names)
    hint = f"did you mean {close!r}? " if close else ""
    raise argparse.ArgumentTypeError(f"unknown solver {text!r}; {hint}there are {', '.join(names)}")


def read_count(text: str) -> int:
    """A whole number above zero."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def read_seconds(text: str) -> float:
    """A time above zero."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def add_problem(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("problem", metavar="PROBLEM.json", help="as written by trace")


def add_budget(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "--budget",
        metavar="B",
        type=read_budget,
        required=required,
        help="bytes, a size such as 8GiB, or a percentage of the store-all peak such as 80%%",
    )


def read_size(text: str) -> int:
    """A number of bytes, zero or more; ``25GB/s`` is read as ``25GB``."""
    try:
        return parse_bytes(text.removesuffix("/s"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_copies(parser: argparse.ArgumentParser) -> None:
    """Add ``--host-bandwidth`` and ``--host-memory``."""
    parser.add_argument(
        "--host-bandwidth",
        metavar="RATE",
        type=read_size,
        help="values may move to host memory and back, at so many bytes per second each way, "
        "such as 25GB; by default as the problem says",
    )
    parser.add_argument(
        "--host-memory",
        metavar="SIZE",
        type=read_size,
        help="most bytes of moved values in host memory",
    )


def with_copies(problem: Problem, given: argparse.Namespace) -> Problem:
    """The problem with the copies that the command line asks for."""
    if given.host_bandwidth is None and problem.copies is None:
        if given.host_memory is not None:
            raise UsageError("--host-memory needs --host-bandwidth: nothing moves without it")
        return problem
    copies = problem.copies or Copies(0.0, 0.0, CALL_US)
    if given.host_bandwidth is not None:
        rate = given.host_bandwidth / 1e6
        copies = replace(copies, to_host=rate, to_device=rate)
    cap = copies.host_bytes if given.host_memory is None else given.host_memory
    return replace(problem, copies=replace(copies, host_bytes=cap))


def add_time_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--time-limit",
        metavar="SECONDS",
        type=read_seconds,
        help="return the best plan found by then; by default solvers limit work, not time",
    )


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Turn errors of a file into a `UsageError` that names it."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not JSON (not even UTF-8)") from error


def read_problem(path: str) -> Problem:
    """The problem in a file."""
    return read_as(path, problem_from_json)


def read_json(path: str) -> Any:
    with naming(path):
        text = Path(path).read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}: not JSON ({error})") from error


def read_as(path: str, make: Callable[[Any], T], refusal: str = "") -> T:
    """What a file of JSON holds; without a ``refusal`` the error says what is wrong."""
    data = read_json(path)
    try:
        return make(data)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: {refusal or error}") from error


def write_text(path: str, text: str) -> None:
    """Write a file and say so."""
    with naming(path):
        Path(path).write_text(text, encoding="utf-8")
    print(f"written   {path}")


def write_json(path: str, data: Mapping[str, Any]) -> None:
    """Write a file of JSON and say so."""
    write_text(path, json.dumps(data, indent=1) + "\n")

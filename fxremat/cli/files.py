"""Reading and writing files; an error names the file, in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxremat.cli.arguments import UsageError
from fxremat.core.json_data import InvalidData, from_data
from fxremat.core.plan import steps_from_json, variants_from_json
from fxremat.core.problem import InvalidProblem, Problem, load_problem
from fxremat.core.schedule import Step

if TYPE_CHECKING:
    from fxremat.report.front import Front
    from fxremat.report.report import Report


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
    """The problem in a file. Raises `InvalidProblem`, which names the field that is wrong."""
    with naming(path):
        return load_problem(path)


def read_json(path: str) -> Any:
    with naming(path):
        text = Path(path).read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}: not JSON ({error})") from error


def read_plan(path: str) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """The steps of the plan in a file, and the variants it takes."""
    data = read_json(path)
    try:
        return steps_from_json(data), variants_from_json(data)
    except InvalidProblem as error:
        raise UsageError(f"{path}: {error}") from error


def read_report(path: str) -> Report:
    """The report in a file, as the option ``report`` writes it."""
    from fxremat.report.report import Report

    data = read_json(path)
    try:
        return from_data(Report, data)
    except InvalidData as error:
        what = "no report of this version of fxremat; the option report writes graph_0.report.json"
        raise UsageError(f"{path}: {what}") from error


def read_front(path: str) -> Front:
    """The front in a file, as ``pareto`` writes it."""
    from fxremat.report.front import front_from_json

    data = read_json(path)
    try:
        return front_from_json(data)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: no front; pareto --out writes one") from error


def write_text(path: str, text: str) -> None:
    """Write a file and say so."""
    with naming(path):
        Path(path).write_text(text, encoding="utf-8")
    print(f"written   {path}")


def write_json(path: str, data: Mapping[str, Any]) -> None:
    """Write a file of JSON and say so."""
    write_text(path, json.dumps(data, indent=1) + "\n")

"""The problem format: there and back, and what is said of files that are wrong."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from fxremat.core.problem import (
    InvalidProblem,
    Op,
    Problem,
    Value,
    load_problem,
    problem_from_json,
    problem_to_json,
    validate,
)
from tests.conftest import Golden
from tests.strategies import problems

SMALL = Problem(
    name="small",
    values=(Value("x", 8), Value("w", 100), Value("a", 4), Value("b", 4)),
    ops=(
        Op("make_a", ("x", "w"), ("a",), 1.5, phase="forward", repeatable=False),
        Op("make_b", ("a",), ("b",), 2.0, 16, phase="backward", inplace=(("a", "b"),)),
    ),
    inputs=("x",),
    resident=("w",),
    outputs=("b",),
)


def test_problem_json_text(golden: Golden) -> None:
    golden(json.dumps(problem_to_json(SMALL), indent=1))


@given(problems())
def test_json_there_and_back(problem: Problem) -> None:
    assert problem_from_json(json.loads(json.dumps(problem_to_json(problem)))) == problem


def test_what_follows_from_the_fields() -> None:
    assert SMALL.bytes_of["w"] == 100
    assert SMALL.op_of["make_b"].workspace_bytes == 16
    assert SMALL.writer_of == {"a": "make_a", "b": "make_b"}
    assert SMALL.resident_bytes == 100
    assert SMALL.base_time_us == 3.5
    assert SMALL.base_steps() == ("make_a", "make_b")


def test_optional_fields_of_an_op_have_defaults() -> None:
    data = problem_to_json(SMALL)
    data["ops"][1] = {"name": "make_b", "reads": ["a"], "writes": ["b"], "time_us": 2}
    assert problem_from_json(data).ops[1] == Op("make_b", ("a",), ("b",), 2.0)


def put(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    """A change: the field at ``path`` becomes ``value``."""

    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


def drop(*path: str | int) -> Callable[[dict[str, Any]], None]:
    """A change: the field at ``path`` goes."""

    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


MALFORMED = [
    (put("format", value="fxremat-problem/9"), "field 'format'"),
    (drop("format"), "field 'format' is None"),
    (put("values", 2, value="a"), r"field 'values\[2\]' is 'a', expected an object"),
    (put("values", 0, "bytes", value=-8), "values: 'x' has a negative"),
    (put("values", 0, "name", value="a"), "values: a name is used twice"),
    (drop("ops", 1, "name"), r"field 'ops\[1\].name' is missing"),
    (put("ops", 1, "name", value="make_a"), "ops: a name is used twice"),
    (put("ops", 1, "reads", value=["b"]), "op 'make_b': reads 'b' before"),
    (put("ops", 1, "writes", value=["q"]), "op 'make_b': writes unknown value 'q'"),
    (put("ops", 1, "writes", value=["a"]), "op 'make_b': 'a' is written twice"),
    (put("ops", 0, "writes", value=["x"]), "op 'make_a': 'x' is written twice, or an input"),
    (put("ops", 1, "time_us", value="fast"), r"field 'ops\[1\].time_us'"),
    (put("ops", 1, "repeatable", value="no"), r"field 'ops\[1\].repeatable'"),
    (put("ops", 1, "time_us", value=-1), "op 'make_b': 'time_us'"),
    (put("ops", 1, "time_us", value=math.nan), "op 'make_b': 'time_us'"),
    (put("ops", 1, "time_us", value=math.inf), "op 'make_b': 'time_us'"),
    (put("ops", 1, "workspace_bytes", value=-1), "op 'make_b': 'workspace_bytes'"),
    (put("ops", 1, "phase", value="sideways"), r"field 'ops\[1\].phase' is 'sideways'"),
    (put("ops", 1, "inplace", value=[["x", "b"]]), "op 'make_b': 'inplace' pair"),
    (put("inputs", value=["q"]), "inputs: unknown value 'q'"),
    (put("outputs", value=["q"]), "outputs: unknown value 'q'"),
]


@pytest.mark.parametrize(("change", "message"), MALFORMED, ids=[m for _, m in MALFORMED])
def test_malformed(change: Callable[[dict[str, Any]], None], message: str) -> None:
    data = copy.deepcopy(problem_to_json(SMALL))
    change(data)
    with pytest.raises(InvalidProblem, match=message):
        problem_from_json(data)


def test_an_output_that_nobody_writes() -> None:
    with pytest.raises(InvalidProblem, match="outputs: 'x' is never written"):
        validate(Problem("none", (Value("x", 1),), (), outputs=("x",)))


def test_load(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(problem_to_json(SMALL)), encoding="utf-8")
    assert load_problem(str(path)) == SMALL


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "expected an object")])
def test_load_what_is_no_problem(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidProblem, match=rf"bad\.json: .*{message}"):
        load_problem(str(path))

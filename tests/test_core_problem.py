"""Problems, plans and variants: what they hold, what they refuse, and their JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.cli.arguments import UsageError, read_problem
from fxremat.core import variants as core_variants
from fxremat.core.check import check
from fxremat.core.json_data import InvalidData, from_data, to_data
from fxremat.core.plan import Plan
from fxremat.core.problem import (
    Change,
    InvalidProblem,
    Op,
    Problem,
    Value,
    Variant,
    problem_from_json,
    problem_to_json,
    validate,
)
from fxremat.core.schedule import Move
from fxremat.core.step import Step, StepPoint, Version
from fxremat.core.variants import exclude, run_once, take
from tests.chains import LOSS_PROBLEM
from tests.conftest import Golden
from tests.strategies import problems_with_variants

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


def test_optional_fields_of_an_op_have_defaults() -> None:
    """A whole number is a number."""
    data = problem_to_json(SMALL)
    data["ops"][1] = {"name": "make_b", "reads": ["a"], "writes": ["b"], "time_us": 2}
    assert problem_from_json(data).ops[1] == Op("make_b", ("a",), ("b",), 2.0)


MISSING = object()


def changed(data: Any, path: str, value: object) -> None:
    """The field at ``path`` becomes ``value``, or goes."""
    *outer, last = (int(key) if key.isdigit() else key for key in path.split("."))
    for key in outer:
        data = data[key]
    data[last] = value
    if value is MISSING:
        del data[last]


MALFORMED = [
    ("format", "fxremat-problem/9", "field 'format'"),
    ("format", MISSING, "field 'format' is None"),
    ("values.2", "a", r"field 'values\[2\]' is 'a', expected an object"),
    ("values.0.bytes", -8, "values: 'x' has a negative"),
    ("values.0.name", "a", "values: a name is used twice"),
    ("ops.1.name", MISSING, r"field 'ops\[1\].name' is missing"),
    ("ops.1.name", "make_a", "ops: a name is used twice"),
    ("ops.1.reads", ["b"], "op 'make_b': reads 'b' before"),
    ("ops.1.writes", ["q"], "op 'make_b': writes unknown value 'q'"),
    ("ops.1.writes", ["a"], "op 'make_b': 'a' is written twice"),
    ("ops.0.writes", ["x"], "op 'make_a': 'x' is written twice, or an input"),
    ("ops.1.time_us", "fast", r"field 'ops\[1\].time_us'"),
    ("ops.1.repeatable", "no", r"field 'ops\[1\].repeatable'"),
    ("ops.1.time_us", -1, "op 'make_b': 'time_us'"),
    ("ops.1.time_us", math.nan, "op 'make_b': 'time_us'"),
    ("ops.1.time_us", math.inf, "op 'make_b': 'time_us'"),
    ("ops.1.workspace_bytes", -1, "op 'make_b': 'workspace_bytes'"),
    ("ops.1.phase", "sideways", r"field 'ops\[1\].phase' is 'sideways'"),
    ("ops.1.inplace", [["x", "b"]], "op 'make_b': 'inplace' pair"),
    ("inputs", ["q"], "inputs: unknown value 'q'"),
    ("outputs", ["q"], "outputs: unknown value 'q'"),
]


@pytest.mark.parametrize(("path", "value", "message"), MALFORMED, ids=[m for *_, m in MALFORMED])
def test_malformed(path: str, value: object, message: str) -> None:
    data = problem_to_json(SMALL)
    changed(data, path, value)
    with pytest.raises(InvalidProblem, match=message):
        problem_from_json(data)


def test_an_output_that_nobody_writes() -> None:
    with pytest.raises(InvalidProblem, match="outputs: 'x' is never written"):
        validate(Problem("none", (Value("x", 1),), (), outputs=("x",)))


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "expected an object")])
def test_load(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "some.json"
    path.write_text(json.dumps(problem_to_json(SMALL)), encoding="utf-8")
    assert read_problem(str(path)) == SMALL
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=rf"some\.json: .*{message}"):
        read_problem(str(path))


# --- json data ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner:
    name: str
    pair: tuple[int, float] = (1, 2.0)


@dataclass(frozen=True)
class Outer:
    inner: tuple[Inner, ...]
    steps: tuple[str | Move, ...] = ()
    by_name: dict[str, Inner] = field(default_factory=dict)
    kind: Literal["one", "other"] = "one"
    limit: int | None = None
    anything: Any = None


OUTER = Outer(
    (Inner("a"), Inner("b", (3, 4.5))), ("op", Move("wait", "a")), {"c": Inner("d")}, "other", 7,
    [{"free": True}],
)  # fmt: skip


def test_there_and_back() -> None:
    """Defaults may be missing, and unknown fields are ignored."""
    assert from_data(Outer, json.loads(json.dumps(to_data(OUTER)))) == OUTER
    assert to_data(Move("to host", "a")) == {"to host": "a"}
    assert from_data(Outer, {"inner": [], "colour": "red"}) == Outer(())
    assert from_data(Inner, {"name": "a", "pair": [1, 2]}) == Inner("a", (1, 2.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": 3}, "field 'inner' is 3, expected a list"),
        ({"inner": [{}]}, r"field 'inner\[0\].name' is missing"),
        ({"inner": [{"name": True}]}, r"field 'inner\[0\].name' is True, expected a string"),
        ({"inner": [{"name": "a", "pair": [1]}]}, r"'inner\[0\].pair' .*expected a list of 2"),
        ({"inner": [{"name": "a", "pair": [True, 1]}]}, r"pair\[0\]' is True, expected a whole"),
        ({"by_name": {"x": []}}, r"field \"by_name\['x'\]\" is \[\], expected an object"),
        ({"kind": "third"}, "field 'kind' is 'third', expected 'one' or 'other'"),
        ({"limit": 1.5}, "field 'limit' is 1.5, expected a whole number"),
        ({"steps": ["a", 1]}, r"field 'steps\[1\]': 1 is not an op's name"),
    ],
)
def test_wrong_data(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidData, match=message):
        from_data(Outer, {**to_data(OUTER), **change})
    with pytest.raises(InvalidData, match="expected an object, not 5"):
        from_data(Outer, 5)


# --- parts --------------------------------------------------------------------------------


def test_what_waits_and_what_runs_is_on_top_of_what_is_outside() -> None:
    """Two runs of one part, one within the other."""
    points = (
        StepPoint(20, (), 0, "forward"),
        StepPoint(22, (0,), 1, "forward"),
        StepPoint(30, (0, 1)),
        StepPoint(20, (0,), 1, "backward"),
        StepPoint(23, (), 0, "backward"),
    )
    step = Step(points, (0, 0), ((Version(12.0, 1, 5, 9), Version(10.0, 4, 6, 7)),))
    found = [step.bytes_at(point, (1, 0)) for point in step.points]
    assert found == [20 + 6, 22 + 4 + 5, 30 + 4 + 1, 20 + 4 + 9, 23 + 7]
    assert step.peak_bytes((1, 0)) == 35
    assert step.time_us((1, 0)) == 22.0
    assert Step((), (), ()).peak_bytes(()) == 0


# --- plan ---------------------------------------------------------------------------------


def test_plan_json_text(golden: Golden) -> None:
    plan = Plan(("a", "b", "a", "c", "a"), "greedy", 1000, 900, 12.5, time_bound_us=10.0)
    assert plan.repeats() == {"a": 2}  # beyond the first
    golden(json.dumps(to_data(plan), indent=1))


# --- variants -----------------------------------------------------------------------------


def test_what_nobody_needs_is_gone() -> None:
    """Where nothing is taken the base problem is left."""
    left = take(LOSS_PROBLEM, ["chunks"])
    assert [op.name for op in left.ops] == ["loss_in_chunks", "tangents", "dx_in_chunks"]
    assert left.outputs == ("loss2", "g", "dx2")
    assert {value.name for value in left.values} == {"x", "w", "g", "loss2", "dx2"}
    assert check(left, left.base_steps()).peak_bytes == 10 + 50 + 4 + 4 + 10 + 200
    left = take(LOSS_PROBLEM, [])
    assert left.ops == LOSS_PROBLEM.ops
    gone = {value.name for value in LOSS_PROBLEM.values if value not in left.values}
    assert gone == {"loss2", "dx2"}


def packed(change: Change) -> Variant:
    """The logits are packed in the forward, and unpacked for the softmax."""
    pack = Op("pack", ("logits",), ("loss2",), 1.0, phase="forward")
    unpack = Op("unpack", ("loss2",), ("dx2",), 1.0, phase="backward")
    return Variant("packed", ops=(pack, unpack), changes=(change,))


def test_a_read_is_changed_and_the_new_op_stands_before_it() -> None:
    one = packed(Change("softmax", ("logits",), ("dx2",), 0.5, 7))
    left = take(validate(replace(LOSS_PROBLEM, variants=(one,))), ["packed"])
    names = [op.name for op in left.ops]
    assert names == ["mm", "pack", "nll", "tangents", "unpack", "softmax", "mm2"]
    softmax = left.op_of["softmax"]
    assert set(softmax.reads) == {"g", "dx2"}
    assert (softmax.time_us, softmax.workspace_bytes) == (2.5, 7)


@pytest.mark.parametrize(("size", "is_early"), [(10, True), (9, False)])
def test_an_output_that_nobody_reads_is_made_when_it_lets_go_of_more(
    size: int, is_early: bool
) -> None:
    """A gradient from the forward, scaled: at the end all the others would be there as well."""
    ops = (
        Op("loss_and_dx", ("x", "w"), ("loss2", "dx1"), 22.0, 100, "forward"),
        Op("scaled", ("dx1", "g"), ("dx2",), 1.0, 0, "backward"),
    )
    ahead = Variant("ahead", ops=ops, outputs=(("loss", "loss2"), ("dx", "dx2")))
    other = Op("other", ("x", "g"), ("gradient",), 1.0, phase="backward")
    problem = replace(
        LOSS_PROBLEM,
        values=(*LOSS_PROBLEM.values, Value("dx1", size), Value("gradient", 10)),
        ops=(*LOSS_PROBLEM.ops, other),
        outputs=(*LOSS_PROBLEM.outputs, "gradient"),
        variants=(ahead,),
    )
    names = [op.name for op in take(validate(problem), ["ahead"]).ops]
    assert names.index("loss_and_dx") < names.index("tangents") < names.index("scaled")
    assert (names.index("scaled") < names.index("other")) == is_early


def test_what_is_read_instead_may_be_written_over() -> None:
    one = packed(Change("softmax", ("logits",), ("dx2",), inplace=(("dx2", "dlogits"),)))
    sizes = tuple(replace(v, bytes=1000) if v.name == "dx2" else v for v in LOSS_PROBLEM.values)
    given = validate(replace(LOSS_PROBLEM, values=sizes, variants=(one,)))
    assert problem_from_json(problem_to_json(given)) == given
    left = take(given, ["packed"])
    assert left.op_of["softmax"].inplace == (("dx2", "dlogits"),)
    apart = replace(left, ops=tuple(replace(op, inplace=()) for op in left.ops))
    steps = left.base_steps()
    assert check(left, steps).peak_bytes < check(apart, steps).peak_bytes


def test_nothing_runs_again_that_runs_once() -> None:
    once = run_once(LOSS_PROBLEM)
    ops = [*once.ops, *(op for one in once.variants for op in one.ops)]
    assert ops
    assert not any(op.repeatable for op in ops)


def test_forms_that_exclude_or_wait_for_each_other_are_refused() -> None:
    """Two forms of one output, and a ring of ops."""
    one, other = LOSS_PROBLEM.variants
    assert exclude(one, other)
    with pytest.raises(InvalidProblem, match="'again' and 'chunks' exclude"):
        take(LOSS_PROBLEM, ["chunks", "again"])
    new = Op("new", ("dx",), ("loss2",), 1.0)
    ring = Variant("ring", ops=(new,), changes=(Change("mm2", ("dlogits",), ("loss2",)),))
    with pytest.raises(InvalidProblem, match="wait for each other"):
        take(validate(replace(LOSS_PROBLEM, variants=(ring,))), ["ring"])


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (Variant("a", ops=(Op("mm", (), ("dx2",), 1.0),)), "op is used twice"),
        (Variant("a", ops=(Op("q", (), ("dx",), 1.0),)), "written twice"),
        (Variant("a", ops=(Op("q", ("no",), ("dx2",), 1.0),)), "unknown value 'no'"),
        (Variant("a", changes=(Change("no"),)), "unknown op 'no'"),
        (Variant("a", changes=(Change("mm", ("g",)),)), "does not read all that it drops"),
        (Variant("a", outputs=(("logits", "dx2"),)), "what is no output"),
        (packed(Change("softmax", (), ("dx2",), inplace=(("g", "dlogits"),))), "'inplace' pair"),
    ],
)
def test_wrong_alternatives_are_refused(variant: Variant, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        validate(replace(LOSS_PROBLEM, variants=(variant,)))


def as_many_as_go_together(problem: Problem, data: st.DataObject) -> list[str]:
    """Names of variants, looked at in any order."""
    names: list[str] = []
    for one in data.draw(st.permutations(problem.variants)):
        if not any(exclude(one, other) for other in problem.variants if other.name in names):
            names.append(one.name)
    return names


@given(problems_with_variants(), st.data())
def test_whatever_is_taken_leaves_a_problem_whose_base_order_is_a_schedule(
    problem: Problem, data: st.DataObject
) -> None:
    """Where new ops are put between those of the base order, sorting all gives the same."""
    assert problem_from_json(json.loads(json.dumps(problem_to_json(problem)))) == problem
    names = as_many_as_go_together(problem, data)
    left = take(problem, names)
    assert not left.variants
    assert check(left, left.base_steps()).ok
    assert len(left.outputs) <= len(problem.outputs)
    with mock.patch.object(core_variants, "any", return_value=True, create=True):
        assert take(problem, names) == left  # as if something stood before what it reads

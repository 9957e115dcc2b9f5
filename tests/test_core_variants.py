"""Other forms of ops: what is left of a problem when some are taken."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.core import variants as core_variants
from fxremat.core.check import check
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
from fxremat.core.variants import exclude, run_once, take
from tests.strategies import problems_with_variants
from tests.variant_problem import LOSS_PROBLEM


def test_what_nobody_needs_is_gone() -> None:
    left = take(LOSS_PROBLEM, ["chunks"])
    assert [op.name for op in left.ops] == ["loss_in_chunks", "tangents", "dx_in_chunks"]
    assert left.outputs == ("loss2", "g", "dx2")
    assert {value.name for value in left.values} == {"x", "w", "g", "loss2", "dx2"}
    assert check(left, left.base_steps()).peak_bytes == 10 + 50 + 4 + 4 + 10 + 200


def test_nothing_taken_leaves_the_base_problem() -> None:
    left = take(LOSS_PROBLEM, [])
    assert left.ops == LOSS_PROBLEM.ops
    gone = {value.name for value in LOSS_PROBLEM.values if value not in left.values}
    assert gone == {"loss2", "dx2"}


def test_a_read_is_changed_and_the_new_op_stands_before_it() -> None:
    packed = Variant(
        "packed",
        ops=(
            Op("pack", ("logits",), ("loss2",), 1.0, phase="forward"),
            Op("unpack", ("loss2",), ("dx2",), 1.0, phase="backward"),
        ),
        changes=(Change("softmax", ("logits",), ("dx2",), 0.5, 7),),
    )
    left = take(validate(replace(LOSS_PROBLEM, variants=(packed,))), ["packed"])
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
    ahead = Variant(
        "ahead",
        ops=(
            Op("loss_and_dx", ("x", "w"), ("loss2", "dx1"), 22.0, 100, "forward"),
            Op("scaled", ("dx1", "g"), ("dx2",), 1.0, 0, "backward"),
        ),
        outputs=(("loss", "loss2"), ("dx", "dx2")),
    )
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
    packed = Variant(
        "packed",
        ops=(Op("pack", ("logits",), ("loss2",), 1.0, phase="forward"),
             Op("unpack", ("loss2",), ("dx2",), 1.0, phase="backward")),
        changes=(Change("softmax", ("logits",), ("dx2",), inplace=(("dx2", "dlogits"),)),),
    )  # fmt: skip
    sizes = tuple(replace(v, bytes=1000) if v.name == "dx2" else v for v in LOSS_PROBLEM.values)
    given = validate(replace(LOSS_PROBLEM, values=sizes, variants=(packed,)))
    assert problem_from_json(problem_to_json(given)) == given
    left = take(given, ["packed"])
    assert left.op_of["softmax"].inplace == (("dx2", "dlogits"),)
    apart = replace(left, ops=tuple(replace(op, inplace=()) for op in left.ops))
    steps = left.base_steps()
    assert check(left, steps).peak_bytes < check(apart, steps).peak_bytes
    foreign = replace(
        packed, changes=(Change("softmax", (), ("dx2",), inplace=(("g", "dlogits"),)),)
    )
    with pytest.raises(InvalidProblem, match="'inplace' pair"):
        validate(replace(given, variants=(foreign,)))


def test_nothing_runs_again_that_runs_once() -> None:
    once = run_once(LOSS_PROBLEM)
    ops = [*once.ops, *(op for one in once.variants for op in one.ops)]
    assert ops
    assert not any(op.repeatable for op in ops)


def test_two_forms_of_one_output_exclude_each_other() -> None:
    one, other = LOSS_PROBLEM.variants
    assert exclude(one, other)
    with pytest.raises(InvalidProblem, match="'again' and 'chunks' exclude"):
        take(LOSS_PROBLEM, ["chunks", "again"])


def test_ops_that_wait_for_each_other_are_refused() -> None:
    ring = Variant(
        "ring",
        ops=(Op("new", ("dx",), ("loss2",), 1.0),),
        changes=(Change("mm2", ("dlogits",), ("loss2",)),),
    )
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
    assert problem_from_json(problem_to_json(problem)) == problem
    left = take(problem, as_many_as_go_together(problem, data))
    assert not left.variants
    assert check(left, left.base_steps()).ok
    assert len(left.outputs) <= len(problem.outputs)


@given(problems_with_variants(), st.data())
def test_merging_gives_the_order_of_the_queue(problem: Problem, data: st.DataObject) -> None:
    """Where new ops are put between those of the base order, sorting all gives the same."""
    names = as_many_as_go_together(problem, data)
    merged = take(problem, names)
    with mock.patch.object(core_variants, "_merged", return_value=None):
        assert take(problem, names) == merged

"""The judge: every rule broken once, and its numbers against those of the timeline."""

from __future__ import annotations

import time
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fxremat.core.check import Failure, Verdict, check
from fxremat.core.problem import Op, Problem, Value, validate
from fxremat.core.timeline import replay
from tests.conftest import Golden
from tests.strategies import problems, scheduled_problems

PROBLEM = Problem(
    name="three",
    values=(Value("x", 8), Value("a", 16), Value("b", 4), Value("c", 2)),
    ops=(
        Op("make_a", ("x",), ("a",), 1.0),
        Op("make_b", ("a",), ("b",), 2.0, workspace_bytes=3, repeatable=False),
        Op("make_c", ("a", "b"), ("c",), 4.0),
    ),
    inputs=("x",),
    outputs=("c",),
)
BASE = PROBLEM.base_steps()


def kinds(verdict: Verdict) -> list[str]:
    """The kinds of all failures."""
    return [failure.kind for failure in verdict.failures]


def test_the_base_schedule_is_possible() -> None:
    assert check(PROBLEM, BASE) == Verdict((), peak_bytes=24, time_us=7.0)
    assert check(PROBLEM, BASE).ok


def test_unknown_op() -> None:
    verdict = check(PROBLEM, (*BASE, "make_tea"))
    assert verdict.failures == (Failure("unknown op", op="make_tea", step=3),)


def test_op_never_runs() -> None:
    verdict = check(PROBLEM, ("make_a", "make_b"))
    assert kinds(verdict) == ["op never runs", "output is not there"]
    assert verdict.failures[0].op == "make_c"
    assert verdict.failures[1].value == "c"


def test_op_runs_twice() -> None:
    verdict = check(PROBLEM, ("make_a", "make_b", "make_b", "make_c"))
    assert kinds(verdict) == ["op runs twice"]
    assert (verdict.failures[0].op, verdict.failures[0].step) == ("make_b", 2)


def test_out_of_order() -> None:
    two = replace(PROBLEM, ops=(*PROBLEM.ops, Op("other", ("x",), ("d",), 0.0)))
    two = validate(replace(two, values=(*PROBLEM.values, Value("d", 1))))
    verdict = check(two, ("make_a", "other", "make_b", "make_c"))
    assert kinds(verdict) == ["out of order", "out of order"]
    assert [failure.op for failure in verdict.failures] == ["make_b", "make_c"]


def test_read_is_not_there() -> None:
    verdict = check(PROBLEM, ("make_b", "make_a", "make_c"))
    assert kinds(verdict) == ["out of order", "read is not there"]
    assert verdict.failures[1] == Failure("read is not there", op="make_b", value="a", step=0)


def test_over_budget_names_the_worst_step() -> None:
    assert check(PROBLEM, BASE, budget_bytes=24).ok
    (failure,) = check(PROBLEM, BASE, budget_bytes=23).failures
    assert (failure.kind, failure.op, failure.step) == ("over budget", "make_a", 0)


def test_verdict_text(golden: Golden) -> None:
    texts = [
        check(PROBLEM, BASE),
        check(PROBLEM, ("make_b", "tea", "make_b"), budget_bytes=2),
    ]
    golden("\n\n".join(map(str, texts)))


@given(scheduled_problems())
def test_judge_and_timeline_agree(example: tuple[Problem, tuple[str, ...]]) -> None:
    problem, steps = example
    timeline = replay(problem, steps)
    assert check(problem, steps) == Verdict((), timeline.peak_bytes, timeline.time_us)
    (failure,) = check(problem, steps, timeline.peak_bytes - 1).failures
    assert (failure.kind, failure.step) == ("over budget", timeline.peak_step)


@given(problems(), st.data())
def test_any_list_of_names_is_judged(problem: Problem, data: st.DataObject) -> None:
    names = st.sampled_from([*problem.base_steps(), "nonsense"])
    steps = tuple(data.draw(st.lists(names, max_size=12)))
    verdict = check(problem, steps)
    if verdict.ok:
        assert verdict.peak_bytes == replay(problem, steps).peak_bytes


@given(scheduled_problems(), st.data())
def test_a_missing_step_is_seen(
    example: tuple[Problem, tuple[str, ...]], data: st.DataObject
) -> None:
    problem, steps = example
    index = data.draw(st.integers(0, len(steps) - 1))
    rest = steps[:index] + steps[index + 1 :]
    verdict = check(problem, rest)
    assert ("op never runs" in kinds(verdict)) == (steps[index] not in rest)


def long_chain(count: int) -> Problem:
    """Every op reads the two values before its own; every tenth is read again at the end."""
    names = [f"v{i}" for i in range(count)]
    ops = [
        Op(f"op{i}", tuple(names[max(0, i - 2) : i]), (names[i],), 1.0) for i in range(count - 1)
    ]
    ops.append(Op("last", tuple(names[:-1:10]), (names[-1],), 1.0))
    values = tuple(Value(name, 1 + i % 7) for i, name in enumerate(names))
    return validate(Problem("long", values, tuple(ops), outputs=(names[-1],)))


def test_six_thousand_steps_take_seconds() -> None:
    problem = long_chain(6000)
    start = time.process_time()
    verdict = check(problem, problem.base_steps())
    assert time.process_time() - start < 10
    assert verdict.peak_bytes == replay(problem, problem.base_steps()).peak_bytes

"""Steps replayed and checked: live bytes, times, moves, and what the checker refuses."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fxremat.core.check import Failure, Verdict, check
from fxremat.core.json_data import to_data
from fxremat.core.plan import Plan, claim_from_json
from fxremat.core.problem import (
    Copies,
    InvalidProblem,
    Op,
    Problem,
    Value,
    problem_from_json,
    problem_to_json,
    validate,
)
from fxremat.core.schedule import Move, Step, ops_of, store_all
from fxremat.core.timeline import Lifetime, replay
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


def test_bytes_of_every_step() -> None:
    assert replay(PROBLEM, BASE).live_bytes == (8 + 16, 16 + 4 + 3, 16 + 4 + 2)
    line = replay(moved_chain(), moved_chain().base_steps())
    assert line.live_bytes == (110, 120, 124, 126, 113)
    assert (line.peak_bytes, line.time_us) == (126, 16.0)
    assert line.live_at_peak() == ("w", "a", "b", "c", "db")  # the largest first
    assert replay(moved_chain(), ()).peak_bytes == 100


def test_lifetimes_of_every_copy() -> None:
    line = replay(PROBLEM, ("make_a", "make_b", "make_a", "make_c"))
    assert set(line.copies) == {
        Lifetime("x", 8, 0, 3), Lifetime("a", 16, 0, 2), Lifetime("a", 16, 2, 4),
        Lifetime("b", 4, 1, 4), Lifetime("c", 2, 3, 4),
    }  # fmt: skip
    with pytest.raises(KeyError, match="reads a, which was never written"):
        replay(PROBLEM, ("make_b",))


def test_outputs_stay_and_inputs_that_nobody_reads_go() -> None:
    """The output from its first write, the input after the first step."""
    values = Value("x", 5), Value("y", 7), Value("z", 1)
    ops = Op("make_y", (), ("y",), 1.0), Op("make_z", (), ("z",), 1.0)
    problem = Problem("kept", values, ops, inputs=("x",), outputs=("y",))
    assert replay(problem, ("make_y", "make_z", "make_y")).live_bytes == (12, 8, 7)


def overtaking(*pairs: tuple[str, str], outputs: tuple[str, ...] = ()) -> tuple[int, ...]:
    """Live bytes of one op that reads p (4) and q (8) and writes r (2) and s (16)."""
    values = Value("p", 4), Value("q", 8), Value("r", 2), Value("s", 16)
    op = Op("op", ("p", "q"), ("r", "s"), 1.0, inplace=pairs)
    problem = Problem("inplace", values, (op,), inputs=("p", "q"), outputs=outputs)
    return replay(problem, ("op",)).live_bytes


@pytest.mark.parametrize(
    ("pairs", "outputs", "less"),
    [
        ([], (), 0),
        ([("p", "r")], (), 2),  # the smaller of the two storages
        ([("p", "s")], (), 4),
        ([("p", "r"), ("p", "s")], (), 2),  # one read is overtaken by one write only
        ([("p", "s"), ("p", "r")], (), 4),
        ([("p", "s"), ("q", "s")], (), 4),  # one write overtakes one read only
        ([("p", "r"), ("q", "s")], (), 2 + 8),
        ([("p", "r")], ("p",), 0),  # an output is never overtaken
        ([("p", "r")], ("r",), 2),  # but may overtake
    ],
)
def test_a_write_takes_over_a_storage_that_is_read(
    pairs: list[tuple[str, str]], outputs: tuple[str, ...], less: int
) -> None:
    assert overtaking(*pairs, outputs=outputs) == (30 - less,)


def test_a_value_read_later_is_not_overtaken() -> None:
    values = tuple(Value(name, 4) for name in "pqr")
    make_q = Op("make_q", ("p",), ("q",), 1.0, inplace=(("p", "q"),))
    make_r = Op("make_r", ("p", "q"), ("r",), 1.0, inplace=(("p", "r"),))
    problem = Problem("later", values, (make_q, make_r), inputs=("p",), outputs=("r",))
    assert replay(problem, problem.base_steps()).live_bytes == (8, 8)


# --- check --------------------------------------------------------------------------------


def kinds_of(problem: Problem, *steps: Step) -> list[str]:
    return [failure.kind for failure in check(problem, steps).failures]


REFUSED: dict[str, tuple[tuple[str, ...], list[Failure]]] = {
    "unknown op": ((*BASE, "make_tea"), [Failure("unknown op", "make_tea", step=3)]),
    "op never runs": (
        ("make_a", "make_b"),
        [Failure("op never runs", "make_c"), Failure("output is not there", value="c")]),
    "op runs twice": (
        ("make_a", "make_b", "make_b", "make_c"), [Failure("op runs twice", "make_b", step=2)]),
    "read is not there": (
        ("make_b", "make_a", "make_c"),
        [Failure("out of order", "make_a", step=1),
         Failure("read is not there", "make_b", "a", step=0)]),
    "out of order": (
        ("make_a", "other", "make_b", "make_c"),
        [Failure("out of order", "make_b", step=2), Failure("out of order", "make_c", step=3)]),
}  # fmt: skip


@pytest.mark.parametrize(("steps", "failures"), REFUSED.values(), ids=REFUSED)
def test_every_rule_is_checked(steps: tuple[str, ...], failures: list[Failure]) -> None:
    problem = PROBLEM
    if "other" in steps:
        other = Op("other", ("x",), ("d",), 0.0)
        values = (*problem.values, Value("d", 1))
        problem = validate(replace(problem, values=values, ops=(*problem.ops, other)))
    found = check(problem, steps).failures
    assert [replace(one, detail="") for one in found] == failures


def test_verdict_text(golden: Golden) -> None:
    texts = [check(PROBLEM, BASE), check(PROBLEM, ("make_b", "tea", "make_b"), budget_bytes=2)]
    golden("\n\n".join(map(str, texts)))


@example((PROBLEM, BASE))
@given(scheduled_problems())
def test_judge_and_timeline_agree(given_: tuple[Problem, tuple[str, ...]]) -> None:
    """Where a budget is exceeded the worst step is named."""
    problem, steps = given_
    timeline = replay(problem, steps)
    within = Verdict((), timeline.peak_bytes, timeline.time_us)
    assert check(problem, steps) == check(problem, steps, timeline.peak_bytes) == within
    (failure,) = check(problem, steps, timeline.peak_bytes - 1).failures
    step = timeline.live_bytes.index(timeline.peak_bytes)
    assert (failure.kind, failure.op, failure.step) == ("over budget", steps[step], step)


@given(problems(), st.data())
def test_any_list_of_names_is_judged(problem: Problem, data: st.DataObject) -> None:
    names = st.sampled_from([*problem.base_steps(), "nonsense"])
    steps = tuple(data.draw(st.lists(names, max_size=12)))
    verdict = check(problem, steps)
    if verdict.ok:
        assert verdict.peak_bytes == replay(problem, steps).peak_bytes


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


# --- moves --------------------------------------------------------------------------------


OUT, IN, WAIT = partial(Move, "to host"), partial(Move, "to device"), partial(Move, "wait")


def moved_chain(**copies: Any) -> Problem:
    """a -> b -> c -> d, then dc reads c, b and da reads a; a and b are ten bytes each."""
    sizes = {"w": 100, "a": 10, "b": 10, "c": 4, "db": 2, "da": 1}
    return Problem(
        name="chain",
        values=tuple(Value(name, size) for name, size in sizes.items()),
        ops=(
            Op("make_a", ("w",), ("a",), 1.0),
            Op("make_b", ("a",), ("b",), 2.0),
            Op("make_c", ("b",), ("c",), 8.0),
            Op("make_db", ("b", "c"), ("db",), 4.0),
            Op("make_da", ("a", "db"), ("da",), 1.0),
        ),
        resident=("w",),
        outputs=("da",),
        copies=Copies(**{"to_host": 5.0, "to_device": 2.0, **copies}),
    )


AWAY: tuple[Step, ...] = (
    "make_a", OUT("a"), "make_b", WAIT("a"), "make_c", IN("a"), "make_db", WAIT("a"), "make_da",
)  # fmt: skip


def test_bytes_and_transfers_beside_the_ops() -> None:
    """Out from 1 to 3, waited for at 3; in from 11 to 16, waited for at 15."""
    line, verdict = replay(moved_chain(), AWAY), check(moved_chain(), AWAY)
    assert line.live_bytes == (110, 110, 120, 120, 114, 124, 126, 112, 113)
    assert line.host_bytes == (0, 10, 10, 10, 10, 10, 10, 10, 0)
    assert verdict.ok
    assert (verdict.peak_bytes, verdict.host_peak_bytes) == (126, 10)
    timing = line.timing
    assert [(t.start_us, t.end_us) for t in timing.transfers] == [(1.0, 3.0), (11.0, 16.0)]
    assert timing.step_end_us == (1.0, 1.0, 3.0, 3.0, 11.0, 11.0, 15.0, 16.0, 17.0)
    assert (timing.stall_us, timing.time_us) == (1.0, 17.0)
    assert verdict.time_us == 17.0


def test_a_direction_makes_one_transfer_at_a_time() -> None:
    away = ("make_a", OUT("a"), "make_b", OUT("b"), WAIT("a"), "make_c", WAIT("b"))
    steps = (*away, IN("b"), IN("a"), WAIT("b"), "make_db", WAIT("a"), "make_da")
    timing = replay(moved_chain(latency_us=1.0), steps).timing
    assert [(t.start_us, t.end_us) for t in timing.transfers] == [
        (1.0, 4.0), (4.0, 7.0), (12.0, 18.0), (18.0, 24.0),
    ]  # fmt: skip
    assert check(moved_chain(latency_us=1.0), steps).time_us == timing.time_us == 25.0
    assert check(moved_chain(latency_us=1.0), steps).ok


def test_the_last_transfer_counts() -> None:
    """Without bandwidth it never ends."""
    problem = moved_chain(to_host=0.1)
    steps: tuple[Step, ...] = (*problem.base_steps()[:4], OUT("a"), "make_da", WAIT("a"))
    assert replay(problem, steps).time_us == check(problem, steps).time_us == 15.0 + 100.0
    never = moved_chain(to_device=0.0)
    assert replay(never, AWAY).time_us == check(never, AWAY).time_us == float("inf")


def inserted(at: int, *moves: Move) -> tuple[Step, ...]:
    base = moved_chain().base_steps()
    return (*base[:at], *moves, *base[at:])


@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        (inserted(1, WAIT("a")), "nothing to wait for"),
        (inserted(1, OUT("a")), "never waited for"),
        (inserted(1, OUT("a"), OUT("a"), WAIT("a")), "still moving"),
        (inserted(1, OUT("a"), IN("a"), WAIT("a")), "still moving"),
        (inserted(2, IN("a"), WAIT("a")), "nothing on the host"),
        (inserted(1, OUT("b"), WAIT("b")), "read is not there"),
        (inserted(1, OUT("w"), WAIT("w")), "may not move"),
        (inserted(5, OUT("da"), WAIT("da")), "may not move"),
        (inserted(1, OUT("nothing"), WAIT("nothing")), "may not move"),
        ((*AWAY[:7], AWAY[8], AWAY[7]), "still moving"),
        ((*AWAY[:3], "make_a", *AWAY[3:]), "still moving"),
    ],
)
def test_rules(steps: tuple[Step, ...], kind: str) -> None:
    assert kind in kinds_of(moved_chain(), *steps)


def test_what_the_copies_allow() -> None:
    assert "may not move" in kinds_of(replace(moved_chain(), copies=None), *AWAY)
    assert kinds_of(moved_chain(host_bytes=9), *AWAY) == ["over host memory"]
    assert kinds_of(moved_chain(host_bytes=10), *AWAY) == []


AGAIN: tuple[Step, ...] = (
    "make_a", OUT("a"), WAIT("a"), IN("a"), WAIT("a"), "make_b", "make_c", "make_db",
    IN("a"), WAIT("a"), "make_da",
)  # fmt: skip
BY_TURNS: tuple[Step, ...] = (
    "make_a", OUT("a"), WAIT("a"), IN("a"), WAIT("a"), "make_b", OUT("b"), WAIT("b"),
    "make_c", IN("b"), WAIT("b"), "make_db", "make_da",
)  # fmt: skip
TOGETHER: tuple[Step, ...] = (
    "make_a", OUT("a"), "make_b", OUT("b"), WAIT("a"), WAIT("b"),
    "make_c", IN("b"), WAIT("b"), "make_db", IN("a"), WAIT("a"), "make_da",
)  # fmt: skip


@pytest.mark.parametrize(("steps", "most"), [(BY_TURNS, 10), (TOGETHER, 20), (AGAIN, 10)])
def test_what_came_back_for_good_is_not_on_the_host(steps: tuple[Step, ...], most: int) -> None:
    verdict, line = check(moved_chain(), steps), replay(moved_chain(), steps)
    assert verdict.ok
    assert verdict.host_peak_bytes == max(line.host_bytes) == most
    if steps is AGAIN:  # a second fetch keeps the host's copy
        assert line.host_bytes == (0, *(10 for _ in range(9)), 0)
        assert line.live_bytes[5:8] == (120, 114, 116)


def test_json_of_steps_and_copies() -> None:
    plan = Plan(AWAY, "by hand", None, 126, 17.0)
    data = json.loads(json.dumps(to_data(plan)))
    assert data["steps"][:3] == ["make_a", {"to host": "a"}, "make_b"]
    assert claim_from_json(data).steps == AWAY
    assert ops_of(AWAY) == moved_chain().base_steps()
    problem = moved_chain(host_bytes=7)
    assert problem_from_json(json.loads(json.dumps(problem_to_json(problem)))) == problem
    assert problem_to_json(replace(problem, copies=None))["copies"] is None


def test_malformed_steps_and_copies_are_named() -> None:
    for step in ({"to moon": "a"}, {"wait": 1}, {"wait": "a", "to host": "b"}, 3):
        with pytest.raises(InvalidProblem, match=r"'steps\[1\]'"):
            claim_from_json({"steps": ["make_a", step]})
    for field in ("to_host", "to_device", "host_bytes"):
        data = problem_to_json(moved_chain())
        data["copies"][field] = -1
        with pytest.raises(InvalidProblem, match=field):
            problem_from_json(data)


# --- values that live in host memory ------------------------------------------------------


def weighted() -> Problem:
    """Two layers whose weights, 50 bytes each, and their gradients live in host memory."""
    sizes = {"w1": 50, "w2": 50, "x": 10, "a": 10, "b": 10, "db": 10, "g2": 50, "g1": 50}
    return Problem(
        name="weighted",
        values=tuple(Value(name, size) for name, size in sizes.items()),
        ops=(
            Op("f1", ("x", "w1"), ("a",), 10.0),
            Op("f2", ("a", "w2"), ("b",), 10.0),
            Op("b2", ("a", "b", "w2"), ("db", "g2"), 20.0),
            Op("b1", ("x", "db"), ("g1",), 20.0),
        ),
        inputs=("x",),
        copies=Copies(5.0, 5.0),
        host=("w1", "w2", "g1", "g2"),
    )


def test_store_all_brings_weights_and_takes_gradients_away() -> None:
    """Which has to be; but a weight may come twice."""
    problem = weighted()
    steps = store_all(problem)
    assert [str(step) for step in steps] == [
        "to device: w1", "wait: w1", "f1", "to device: w2", "wait: w2", "f2", "b2",
        "to host: g2", "wait: g2", "b1", "to host: g1", "wait: g1",
    ]  # fmt: skip
    verdict = check(problem, steps)
    assert verdict.ok, str(verdict)
    line = replay(problem, steps)
    assert line.live_bytes == (60, 60, 70, 70, 70, 80, 140, 70, 70, 70, 50, 50)
    assert verdict.peak_bytes == line.peak_bytes == 140
    assert line.time_us == verdict.time_us == 60.0 + 4 * 10.0
    assert line.host_peak_bytes == verdict.host_peak_bytes == 0  # they live there anyway
    assert "read is not there" in kinds_of(problem, *steps[2:])
    assert kinds_of(problem, *steps[:-2]) == ["not on the host at the end"]
    at = steps.index("b2")
    assert check(problem, [*steps[:at], IN("w2"), WAIT("w2"), *steps[at:]]).ok


@pytest.mark.parametrize("change", [{"copies": None}, {"inputs": ("x", "w1")}, {"host": ("w9",)}])
def test_host_values_are_validated(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidProblem):
        validate(replace(weighted(), **change))
    assert problem_from_json(problem_to_json(weighted())) == weighted()

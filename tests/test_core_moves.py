"""Schedules with moves: bytes, host bytes and times written out; rules broken one by one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fxremat.core.check import check
from fxremat.core.plan import Plan, plan_to_json, steps_from_json
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
from fxremat.core.timeline import replay


def OUT(value: str) -> Move:
    """Start moving it to the host."""
    return Move("to host", value)


def IN(value: str) -> Move:
    """Start moving it back."""
    return Move("to device", value)


def WAIT(value: str) -> Move:
    """Wait until it is there."""
    return Move("wait", value)


def chain(**copies: Any) -> Problem:
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


def test_bytes_at_every_step() -> None:
    line = replay(chain(), AWAY)
    assert line.live_bytes == (110, 110, 120, 120, 114, 124, 126, 112, 113)
    assert line.host_bytes == (0, 10, 10, 10, 10, 10, 10, 10, 0)
    verdict = check(chain(), AWAY)
    assert verdict.ok
    assert (verdict.peak_bytes, verdict.host_peak_bytes) == (126, 10)


def test_transfers_run_beside_the_ops() -> None:
    """Out from 1 to 3, waited for at 3; in from 11 to 16, waited for at 15."""
    timing = replay(chain(), AWAY).timing
    assert [(t.start_us, t.end_us) for t in timing.transfers] == [(1.0, 3.0), (11.0, 16.0)]
    assert timing.step_end_us == (1.0, 1.0, 3.0, 3.0, 11.0, 11.0, 15.0, 16.0, 17.0)
    assert (timing.stall_us, timing.time_us) == (1.0, 17.0)
    assert check(chain(), AWAY).time_us == 17.0


def test_a_direction_makes_one_transfer_at_a_time() -> None:
    away = ("make_a", OUT("a"), "make_b", OUT("b"), WAIT("a"), "make_c", WAIT("b"))
    steps = (*away, IN("b"), IN("a"), WAIT("b"), "make_db", WAIT("a"), "make_da")
    timing = replay(chain(latency_us=1.0), steps).timing
    assert [(t.start_us, t.end_us) for t in timing.transfers] == [
        (1.0, 4.0), (4.0, 7.0), (12.0, 18.0), (18.0, 24.0),
    ]  # fmt: skip
    assert check(chain(latency_us=1.0), steps).time_us == timing.time_us == 25.0
    assert check(chain(latency_us=1.0), steps).ok


def test_the_last_transfer_counts() -> None:
    steps: tuple[Step, ...] = (*chain().base_steps()[:4], OUT("a"), "make_da", WAIT("a"))
    assert replay(chain(to_host=0.1), steps).time_us == check(chain(to_host=0.1), steps).time_us
    assert replay(chain(to_host=0.1), steps).time_us == 15.0 + 100.0


def test_no_bandwidth_never_ends() -> None:
    assert replay(chain(to_device=0.0), AWAY).time_us == float("inf")
    assert check(chain(to_device=0.0), AWAY).time_us == float("inf")


def kinds(problem: Problem, *steps: Step) -> list[str]:
    return [failure.kind for failure in check(problem, steps).failures]


def inserted(at: int, *moves: Move) -> tuple[Step, ...]:
    base = chain().base_steps()
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
    assert kind in kinds(chain(), *steps)


def test_without_copies_nothing_moves() -> None:
    assert "may not move" in kinds(replace(chain(), copies=None), *AWAY)


def test_host_memory_is_limited() -> None:
    assert kinds(chain(host_bytes=9), *AWAY) == ["over host memory"]
    assert kinds(chain(host_bytes=10), *AWAY) == []


def test_a_second_fetch_keeps_the_host_copy() -> None:
    steps = ("make_a", OUT("a"), WAIT("a"), IN("a"), WAIT("a"), "make_b", "make_c", "make_db",
             IN("a"), WAIT("a"), "make_da")  # fmt: skip
    assert check(chain(), steps).ok
    assert replay(chain(), steps).host_bytes == (0, *(10 for _ in range(9)), 0)
    assert replay(chain(), steps).live_bytes[5:8] == (120, 114, 116)


BY_TURNS: tuple[Step, ...] = (
    "make_a", OUT("a"), WAIT("a"), IN("a"), WAIT("a"), "make_b", OUT("b"), WAIT("b"),
    "make_c", IN("b"), WAIT("b"), "make_db", "make_da",
)  # fmt: skip
TOGETHER: tuple[Step, ...] = (
    "make_a", OUT("a"), "make_b", OUT("b"), WAIT("a"), WAIT("b"),
    "make_c", IN("b"), WAIT("b"), "make_db", IN("a"), WAIT("a"), "make_da",
)  # fmt: skip


@pytest.mark.parametrize(("steps", "host_bytes"), [(BY_TURNS, 10), (TOGETHER, 20)])
def test_what_came_back_for_good_is_not_on_the_host(
    steps: tuple[Step, ...], host_bytes: int
) -> None:
    verdict = check(chain(), steps)
    assert verdict.ok
    assert verdict.host_peak_bytes == max(replay(chain(), steps).host_bytes) == host_bytes


def test_json_of_steps_and_copies() -> None:
    plan = Plan(AWAY, "by hand", None, 126, 17.0)
    data = json.loads(json.dumps(plan_to_json(plan)))
    assert data["steps"][:3] == ["make_a", {"to host": "a"}, "make_b"]
    assert steps_from_json(data) == AWAY
    assert ops_of(AWAY) == chain().base_steps()
    problem = chain(host_bytes=7)
    assert problem_from_json(json.loads(json.dumps(problem_to_json(problem)))) == problem
    assert problem_to_json(replace(problem, copies=None))["copies"] is None


@pytest.mark.parametrize("step", [{"to moon": "a"}, {"wait": 1}, {"wait": "a", "to host": "b"}, 3])
def test_a_malformed_step_is_named(step: object) -> None:
    with pytest.raises(InvalidProblem, match=r"'steps\[1\]'"):
        steps_from_json({"steps": ["make_a", step]})


@pytest.mark.parametrize(
    ("copies", "field"),
    [
        ({"to_host": -1.0, "to_device": 1.0}, "to_host"),
        ({"to_host": 1.0, "to_device": 1.0, "host_bytes": -1}, "host_bytes"),
    ],
)
def test_malformed_copies_are_named(copies: object, field: str) -> None:
    data = {**problem_to_json(chain()), "copies": copies}
    with pytest.raises(InvalidProblem, match=field):
        problem_from_json(data)


# --- values that live in host memory -------------------------------------------------------


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


def test_a_weight_has_to_come_and_a_gradient_to_go() -> None:
    problem = weighted()
    steps = store_all(problem)
    assert "read is not there" in kinds(problem, *steps[2:])
    assert kinds(problem, *steps[:-2]) == ["not on the host at the end"]


def test_a_weight_may_come_twice() -> None:
    problem = weighted()
    steps = list(store_all(problem))
    again = [IN("w2"), WAIT("w2")]
    at = steps.index("b2")
    assert check(problem, [*steps[:at], *again, *steps[at:]]).ok


@pytest.mark.parametrize("change", [{"copies": None}, {"inputs": ("x", "w1")}, {"host": ("w9",)}])
def test_host_values_are_validated(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidProblem):
        validate(replace(weighted(), **change))
    assert problem_from_json(problem_to_json(weighted())) == weighted()

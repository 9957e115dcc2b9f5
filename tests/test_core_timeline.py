"""Replaying schedules: literal cases, each with its bytes written out."""

from __future__ import annotations

import pytest
from hypothesis import given

from fxremat.core.problem import Op, Problem, Value
from fxremat.core.timeline import Interval, replay
from tests.strategies import scheduled_problems


def chain() -> Problem:
    """x -> a -> b -> loss, and back: db reads a and b, da reads x and db."""
    sizes = {"x": 1, "w": 100, "a": 10, "b": 20, "db": 4, "da": 2}
    return Problem(
        name="chain",
        values=tuple(Value(name, size) for name, size in sizes.items()),
        ops=(
            Op("make_a", ("x", "w"), ("a",), 1.0),
            Op("make_b", ("a",), ("b",), 2.0, workspace_bytes=5),
            Op("make_db", ("a", "b"), ("db",), 4.0),
            Op("make_da", ("x", "db"), ("da",), 8.0),
        ),
        inputs=("x",),
        resident=("w",),
        outputs=("da",),
    )


def test_bytes_of_every_step() -> None:
    timeline = replay(chain(), chain().base_steps())
    assert timeline.live_bytes == (
        100 + 1 + 10,
        100 + 1 + 10 + 20 + 5,
        100 + 1 + 10 + 20 + 4,
        100 + 1 + 4 + 2,
    )
    assert timeline.peak_bytes == 136
    assert timeline.peak_step == 1
    assert timeline.time_us == 15.0


def test_intervals_of_every_copy() -> None:
    timeline = replay(chain(), ("make_a", "make_b", "make_a", "make_db", "make_da"))
    assert set(timeline.intervals) == {
        Interval("x", 0, 5),
        Interval("a", 0, 2),
        Interval("a", 2, 4),
        Interval("b", 1, 4),
        Interval("db", 3, 5),
        Interval("da", 4, 5),
    }


def test_live_values_are_largest_first() -> None:
    timeline = replay(chain(), chain().base_steps())
    assert timeline.live_at(2) == ("w", "b", "a", "db", "x")


def test_an_output_stays_from_its_first_write() -> None:
    problem = Problem(
        name="kept",
        values=(Value("y", 7), Value("z", 1)),
        ops=(Op("make_y", (), ("y",), 1.0), Op("make_z", (), ("z",), 1.0)),
        outputs=("y",),
    )
    assert replay(problem, ("make_y", "make_z", "make_y")).live_bytes == (7, 8, 7)


def test_an_input_that_nobody_reads_goes_after_the_first_step() -> None:
    problem = Problem(
        name="unread",
        values=(Value("x", 5), Value("y", 1), Value("z", 1)),
        ops=(Op("make_y", (), ("y",), 1.0), Op("make_z", (), ("z",), 1.0)),
        inputs=("x",),
        outputs=("y", "z"),
    )
    assert replay(problem, problem.base_steps()).live_bytes == (6, 2)


def test_no_steps_need_the_resident_bytes() -> None:
    assert replay(chain(), ()).peak_bytes == 100


def test_a_read_of_what_was_never_written() -> None:
    with pytest.raises(KeyError, match="reads a, which was never written"):
        replay(chain(), ("make_b",))


def overtaking(*pairs: tuple[str, str], outputs: tuple[str, ...] = ()) -> tuple[int, ...]:
    """Live bytes of one op that reads p (4) and q (8) and writes r (2) and s (16)."""
    problem = Problem(
        name="inplace",
        values=(Value("p", 4), Value("q", 8), Value("r", 2), Value("s", 16)),
        ops=(Op("op", ("p", "q"), ("r", "s"), 1.0, inplace=pairs),),
        inputs=("p", "q"),
        outputs=outputs,
    )
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
    problem = Problem(
        name="later",
        values=(Value("p", 4), Value("q", 4), Value("r", 4)),
        ops=(
            Op("make_q", ("p",), ("q",), 1.0, inplace=(("p", "q"),)),
            Op("make_r", ("p", "q"), ("r",), 1.0, inplace=(("p", "r"),)),
        ),
        inputs=("p",),
        outputs=("r",),
    )
    assert replay(problem, problem.base_steps()).live_bytes == (8, 8)


@given(scheduled_problems())
def test_live_bytes_agree_with_live_values(example: tuple[Problem, tuple[str, ...]]) -> None:
    problem, steps = example
    timeline = replay(problem, steps)
    for step, name in enumerate(steps):
        values = sum(problem.bytes_of[value] for value in timeline.live_at(step))
        op = problem.op_of[name]
        shared = values + op.workspace_bytes - timeline.live_bytes[step]
        assert 0 <= shared <= sum(problem.bytes_of[read] for read in set(op.reads))

"""Constants of the planner, each scaled while the others stay."""

from __future__ import annotations

import pytest

from benchmarks import constants
from benchmarks.constants import Constant, constants_of, measure, sweep
from fxremat.planner.local import tuning
from tests.chains import chain


def test_constants_of_every_room_are_found() -> None:
    names = [str(one) for one in constants_of("local")]
    assert "local.RUIN_IN_VAIN" in names
    assert "local.RUIN_LENGTHS[2]" in names
    assert "local.RUIN_LENGTHS[0]" not in names, "nothing is half of 0"
    assert len(set(names)) == len(names)
    assert all(constants_of(room) for room in constants.ROOMS)


def test_a_constant_is_itself_again_afterwards() -> None:
    before = tuning.RUIN_LENGTHS
    with Constant(tuning.__name__, "RUIN_LENGTHS", 2).scaled(2.0):
        assert tuning.RUIN_LENGTHS == (0.0, 0.0, 1.0, 1.0)
    assert before == tuning.RUIN_LENGTHS
    few = Constant(tuning.__name__, "EXACT_MOST_OPS")
    with pytest.raises(ZeroDivisionError), few.scaled(0.01):
        raise ZeroDivisionError(few.value())
    assert few.value() == tuning.EXACT_MOST_OPS > 1


def test_what_a_constant_does_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any eviction path and without any round, plans take longer."""
    problem = chain([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [3.0, 1.0] * 6)
    rows = list(sweep("local", [problem], [60], "local.RUIN_IN_VAIN"))
    assert [row.constant for row in rows] == ["local, as it is", *[rows[1].constant] * 2]
    assert [row.value for row in rows[1:]] == [20, 80]
    added, least, _ = measure("local", [problem], [60])
    assert (added, least) == (rows[0].added_points, rows[0].least_percent)
    monkeypatch.setattr("fxremat.planner.local.level_sweep.descend", lambda *arguments: None)
    monkeypatch.setattr("fxremat.planner.local.level_sweep.offer_segments", lambda *arguments: None)
    worse = measure("local", [problem], [60])
    assert (worse[1], worse[0]) > (least, added)

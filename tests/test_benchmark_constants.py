"""Constants of the planner, each scaled while the others stay."""

from __future__ import annotations

import pytest

from benchmarks import constants
from benchmarks.constants import Constant, constants_of, measure, sweep
from fxremat.planner.local import ruin_and_repair
from tests.chains import chain


def test_constants_of_every_room_are_found() -> None:
    names = [str(one) for one in constants_of("local")]
    assert "local.ruin_and_repair.IN_VAIN" in names
    assert "local.ruin_and_repair.LENGTHS[2]" in names
    assert len(set(names)) == len(names)
    assert not any(name.rpartition(".")[2] in constants.FIXED for name in names)
    assert all(constants_of(room) for room in constants.ROOMS)


def test_a_constant_is_itself_again_afterwards() -> None:
    one = Constant("fxremat.planner.local.ruin_and_repair", "LENGTHS", 2)
    before = ruin_and_repair.LENGTHS
    with pytest.raises(ZeroDivisionError), one.scaled(2.0):
        assert ruin_and_repair.LENGTHS == (0.0, 0.0, 1.0, 1.0)
        raise ZeroDivisionError
    assert before == ruin_and_repair.LENGTHS
    with Constant("fxremat.planner.local.least_peak", "MOST_OPS").scaled(0.01):
        assert constants.modules_of("local")
        assert Constant("fxremat.planner.local.least_peak", "MOST_OPS").value() == 1


def test_what_a_constant_does_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any eviction path and without any round, plans take longer."""
    problem = chain([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [3.0, 1.0] * 6)
    rows = list(sweep("local", [problem], [60], "local.ruin_and_repair.IN_VAIN"))
    assert [row.constant for row in rows] == ["local, as it is", *[rows[1].constant] * 2]
    assert [row.value for row in rows[1:]] == [20, 80]
    added, least, _ = measure("local", [problem], [60])
    assert (added, least) == (rows[0].added_points, rows[0].least_percent)
    monkeypatch.setattr("fxremat.planner.local.level_sweep.descend", lambda *arguments: None)
    monkeypatch.setattr("fxremat.planner.local.level_sweep.offer_segments", lambda *arguments: None)
    worse = measure("local", [problem], [60])
    assert (worse[1], worse[0]) > (least, added)

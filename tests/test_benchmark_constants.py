"""Constants of the planner, each scaled while the others stay."""

from __future__ import annotations

import pytest

from benchmarks.constants import Constant, all_constants, measure, sweep
from fxremat.planner import constants
from tests.chains import chain


def test_every_constant_is_found() -> None:
    names = [str(one) for one in all_constants()]
    assert {"TRIES", "HALVES[2]"} <= {*names}
    assert "HALVES[0]" not in names, "nothing is half of 0"
    assert len(set(names)) == len(names)


def test_a_constant_is_itself_again_afterwards() -> None:
    before = constants.HALVES
    with Constant("HALVES", 2).scaled(2.0):
        assert constants.HALVES == (0.0, 0.5, 2.0)
    assert before == constants.HALVES
    few = Constant("FEW_OPS")
    with pytest.raises(ZeroDivisionError), few.scaled(0.01):
        raise ZeroDivisionError(few.value())
    assert few.value() == constants.FEW_OPS > 1


def test_what_a_constant_does_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any eviction path and without any round, plans take longer."""
    problem = chain([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [3.0, 1.0] * 6)
    rows = list(sweep("local", [problem], [60], "TRIES"))
    assert [row.constant for row in rows] == ["local, as it is", "TRIES", "TRIES"]
    assert [row.value for row in rows[1:]] == [20, 80]
    added, least, _ = measure("local", [problem], [60])
    assert (added, least) == (rows[0].added_points, rows[0].least_percent)
    monkeypatch.setattr("fxremat.planner.local.level_sweep.descend", lambda *arguments: None)
    monkeypatch.setattr("fxremat.planner.local.level_sweep.offer_segments", lambda *arguments: None)
    worse = measure("local", [problem], [60])
    assert (worse[1], worse[0]) > (least, added)

"""The benchmark of ignored labels: batches with a part of them, and lines of its table."""

from __future__ import annotations

import torch

from benchmarks.ignored import IGNORED, Row, all_rows_computed, with_ignored
from fxremat.runtime.chunks import counted_rows


def test_a_part_of_the_labels_is_ignored_and_the_rest_stays() -> None:
    targets = torch.arange(40).view(4, 10)
    made = with_ignored(targets, 75)
    assert int((made == IGNORED).sum()) == 30
    assert torch.equal(made[made != IGNORED], targets[made != IGNORED])
    assert torch.equal(targets, torch.arange(40).view(4, 10))


def test_all_rows_can_be_computed() -> None:
    labels, room = torch.tensor([1, IGNORED, 2]), torch.empty(3, dtype=torch.int64)
    with all_rows_computed():
        assert counted_rows._places(labels, IGNORED, room) is None
    found = counted_rows._places(labels, IGNORED, room)
    assert found is not None
    assert found.tolist() == room[:2].tolist() == [0, 2]


def test_a_line_says_whether_the_peak_is_the_promised_one() -> None:
    row = Row(75, 2.0, 1.0, 0.5, 2**20, 2**20)
    assert row.cells() == ["75 %", "2.00", "1.00", "0.500", "1.00", "exactly"]

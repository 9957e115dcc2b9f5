"""What the benchmark of models that others wrote has to tell fxremat of."""

import pytest
import torch
from torch import nn

from benchmarks.unseen import HEAD, Row, show, unread_bytes
from tests.small import Stack, seeded


def test_what_no_graph_reads_is_counted() -> None:
    model, x = seeded(Stack, 8, 32)
    assert unread_bytes(model, (x,)) == 0
    model.register_buffer("unread", torch.zeros(16))
    model.register_parameter("unused", nn.Parameter(torch.zeros(4)))
    assert unread_bytes(model, (x,)) == 80


def test_what_one_of_two_graphs_reads_is_not() -> None:
    model, x = seeded(lambda: Stack(broken=True), 8, 32)
    assert unread_bytes(model, (x,)) == 0


def test_lines_are_shown_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    report = {
        "predicted_peak_bytes": 11 << 20,
        "time_overhead": 0.02,
        "variants": {"sign_masks": 2, "packed_masks": 1},
    }
    row = Row("gpt2", "80%", 12 << 20, None, 11 << 20, [1e-7, 2e-7], [0.5], 31.0, report)
    show(HEAD)
    show(row.cells())
    head, line = capsys.readouterr().out.splitlines()
    assert len(head) == len(line)
    assert line.split() == [
        "gpt2", "80%", "12.0", "11.0", "yes", "11.0", "0.00%", "1.5e-07", "2.0e-07", "500.0",
        "+2.0%", "3", "31",
    ]  # fmt: skip


def test_a_budget_that_cannot_be_met_names_the_least() -> None:
    assert Row("t5", "40%", 4 << 20, 5 << 20).cells() == ["t5", "40%", "4.0", "", "least 5.0"]

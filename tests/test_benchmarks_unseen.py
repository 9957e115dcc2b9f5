"""What the benchmark of models that others wrote has to tell fxremat of."""

import pytest
import torch
from torch import nn

from benchmarks.unseen import HEAD, show, unread_bytes
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
    show(HEAD)
    show(["gpt2", "80%", "12.0", "11.5", "yes", "11.5", "0.00%", "1.0e-07", "2.0e-07", "31"])
    head, line = capsys.readouterr().out.splitlines()
    assert len(head) == len(line)
    assert head.split()[-2:] == ["compile", "s"]
    assert line.index("12.0") + len("12.0") == head.index("MiB") + len("MiB")

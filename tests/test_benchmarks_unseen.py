"""What the benchmark of models that others wrote has to tell fxremat of."""

import torch
from torch import nn

from benchmarks.unseen import unread_bytes
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

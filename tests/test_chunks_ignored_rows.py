"""Which losses leave rows out: those of which it follows from the graph; values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxremat.passes.variants.chunks.ignored_rows import Known, Value, result_of
from fxremat.passes.variants.chunks.rules import CHUNKED_LOSS
from fxremat.runtime.chunks.operator import ROWS
from fxremat.runtime.chunks.program import parse
from tests.graphs import Net, calls
from tests.row_nets import WEIGHTS, D, head, labels, rows, z_loss
from tests.row_sites import check, taken, trace
from tests.test_chunks_rules import hugging_face
from tests.variants import sites

COUNT = 50
MASK = (labels(COUNT) > 40).float()
Y = labels(COUNT, ignored=True)


def log_probabilities(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of the label of each row, as those who train by preferences or rewards write it."""
    picked = logits.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return picked - torch.logsumexp(logits, -1)


def masked(m: Any, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return -(log_probabilities(m.head(x), y) * mask).sum() / mask.sum()


def masked_by_label(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    counts = y != -100
    found = log_probabilities(m.head(x), torch.where(counts, y, 0))
    return -(found * counts).sum() / counts.sum()


def weighted(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(m.head(x), y, weight=WEIGHTS.to(x.dtype), label_smoothing=0.1)


LEFT_OUT: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "another number": (lambda m, x, y: F.cross_entropy(m.head(x), y, ignore_index=3), (Y % 9,)),
    "smoothing and weights": (weighted, (Y,)),
    "nll": (lambda m, x, y: F.nll_loss(F.log_softmax(m.head(x) / 2, -1), y), (Y,)),
    "mask of numbers": (masked, (labels(COUNT), MASK.long())),
    "mask of truth": (masked, (labels(COUNT), MASK.bool())),
}
CHECKED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mask": (masked, (labels(COUNT), MASK)),
    "mask by label": (masked_by_label, (Y,)),
    "no mask": (masked, (labels(COUNT), torch.zeros(COUNT))),
}
"""Zero times the gradient of a mean over nothing is NaN in every row, and stays so."""
COMPUTED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "z": (lambda m, x, y: z_loss(m.head(x), y), (Y,)),
    "two labels": (
        lambda m, x, y: F.cross_entropy(m.head(x), y) + F.cross_entropy(m.head(x), y.flip(0)),
        (Y,),
    ),
    "seen": (
        lambda m, x, y, mask: (
            (found := log_probabilities(m.head(x), y)).detach(),
            (found * mask).sum(),
        ),
        (labels(COUNT), MASK),
    ),
}


def ignored(graph: Any) -> list[Any]:
    """What the calls of a graph say of rows that are left out."""
    return [parse(str(call.args[2])).ignored for call in calls(graph, ROWS)]


@pytest.mark.parametrize("name", LEFT_OUT)
def test_rows_are_left_out_of_all_loops(name: str) -> None:
    loss, given = LEFT_OUT[name]
    joint = trace(Net(loss, head=head()), (rows(COUNT, D), *given)).joint
    found = sites(CHUNKED_LOSS, joint)
    assert any("at once" in site.name for site in found)
    assert all(None not in ignored(taken(joint, site).module.graph) for site in found)


@pytest.mark.parametrize("name", CHECKED)
def test_masked_rows(name: str) -> None:
    loss, given = CHECKED[name]
    graphs = check(Net(loss, head=head()), (rows(COUNT, D), *given), CHUNKED_LOSS)
    assert all(None not in ignored(graph) for graph in graphs.values())


@pytest.mark.parametrize("name", COMPUTED)
def test_rows_that_matter_are_computed(name: str) -> None:
    loss, given = COMPUTED[name]
    joint = trace(Net(loss, head=head()), (rows(COUNT, D), *given)).joint
    found = sites(CHUNKED_LOSS, joint)
    assert found
    assert all({*ignored(taken(joint, site).module.graph)} == {None} for site in found)


def test_shifted_labels() -> None:
    """As trainers do it; few of them count."""
    y = labels(4, 16)
    y.view(-1)[:60] = -100
    net = Net(hugging_face, head=head(False))
    graphs = check(net, (rows(4, 16, D), y, torch.tensor(60)), CHUNKED_LOSS)
    assert all(None not in ignored(graph) for graph in graphs.values())


ZERO, ONE = Known(0.0), Known(1.0)


@pytest.mark.parametrize(
    ("op", "args", "result"),
    [
        ("aten.mul.Tensor", (ZERO, None), ZERO),
        ("aten.mul.Tensor", (None, 0.0), None),
        ("aten.mul.Tensor", (ONE, None), None),
        ("aten.logical_and.default", (None, Known(False)), Known(False)),
        ("aten.bitwise_and.Tensor", (Known(True), None), None),
        ("aten.div.Tensor", (ZERO, None), None),
        ("aten.div.Tensor", (ZERO, 2.0), ZERO),
        ("aten.add.Tensor", (ONE, ONE), Known(2.0)),
        ("aten.where.self", (Known(False), None, ONE), ONE),
        ("aten.where.self", (None, ONE, ONE), ONE),
        ("aten.where.self", (None, ONE, None), None),
        ("aten.sum.dim_IntList", (ZERO, (1,), True), ZERO),
        ("aten.sum.dim_IntList", (ONE, (1,), True), None),
        ("aten.scatter_add.default", (ZERO, 1, None, ZERO), ZERO),
        ("aten.scatter_add.default", (ZERO, 1, None, None), None),
        ("aten.scatter.value", (ZERO, 1, None, 1.0), None),
        ("aten.mm.default", (ZERO, None), ZERO),
        ("aten.addmm.default", (None, ZERO, None), None),
        ("aten.exp.default", (ZERO,), ONE),
        ("aten.amax.default", (ONE, (1,), True), ONE),
    ],
)
def test_what_follows_for_an_operator(op: str, args: tuple[Any, ...], result: Value) -> None:
    dtype = torch.bool if "_and" in op else torch.float32
    assert result_of(op, args, {}, dtype) == result
    assert result_of(op, args, {"alpha": 2}, dtype) is None

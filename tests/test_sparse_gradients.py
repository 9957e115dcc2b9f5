"""Sparse gradients: a model trains as under plain compile, and says that nothing is planned."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxremat.compat.tensors import SPARSE, plain_tensors

pytestmark = pytest.mark.usefixtures("fresh")


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, 8, sparse=True), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.words(x)).square().mean()
        return loss


def trained(model: nn.Module, backend: str, **options: str) -> list[Tensor]:
    """The gradients of the second of two steps."""
    torch._dynamo.reset()
    given: dict[str, Any] = {**options}
    run = torch.compile(model, backend=backend, options=given or None)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        run(torch.arange(32)).backward()
    return [one.grad.to_dense() for one in model.parameters() if one.grad is not None]


def test_a_budget_is_told_to_be_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    model = Words()
    expected = trained(model, "aot_eager")
    with caplog.at_level(logging.WARNING, "fxremat"):
        found = trained(model, "fxremat", memory_budget="1MiB")
    torch.testing.assert_close(found, expected)
    told = [one.getMessage() for one in caplog.records if "is sparse" in one.getMessage()]
    assert len(told) == 1
    assert "nothing of the graph is planned" in told[0]
    assert "words" in told[0]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", SPARSE, ids=str)
def test_parts_of_a_sparse_tensor_have_its_bytes(layout: torch.layout) -> None:
    blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    sparse = torch.eye(8).to_sparse(layout=layout, blocksize=blocks)
    parts = list(plain_tensors(sparse))
    assert len(parts) == len(SPARSE[layout])
    assert parts[-1].untyped_storage().nbytes() == parts[-1].nbytes >= 8 * 4
    assert {one.layout for one in parts} == {torch.strided}

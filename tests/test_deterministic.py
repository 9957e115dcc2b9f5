"""Where torch is to be deterministic, steps within a budget are, as plain compiled ones are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from tests.kernels import words

SEED = 3
pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


class Classifier(nn.Module):
    """Rows are looked up and added into others: gradients whose sums depend on their order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 128)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.embed(ids.flatten())
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.2)
        x = torch.zeros_like(x).index_add(0, target.flatten(), x)
        return F.cross_entropy(self.head(x), target.flatten())


def gradients(backend: str, **options: Any) -> list[Tensor]:
    """Of a step of a new model, compiled anew."""
    torch.compiler.reset()
    torch.manual_seed(SEED)
    model = Classifier()
    step: Any = torch.compile(model, backend=backend, options=options or None)
    step(*words()).backward()
    found = [parameter.grad for parameter in model.parameters()]
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize(("executor", "plain"), [("aot_eager", "aot_eager"), ("inductor", None)])
def test_gradients_are_equal_to_the_bit(executor: str, plain: str | None) -> None:
    """From compilation to compilation, and where no loops are fused to those of plain torch."""
    given = {"executor": executor, "solver": "greedy", "variants": "none"}
    first = gradients("fxremat", memory_budget="1.55MiB", **given)
    assert fxremat.reports()[-1].recomputed
    second = gradients("fxremat", memory_budget="1.55MiB", **given)
    others = [second] if plain is None else [second, gradients(plain)]
    for other in others:
        assert len(first) == len(other) == len(list(Classifier().parameters()))
        assert all(map(torch.equal, first, other))


def test_what_is_not_deterministic_raises_as_under_plain_compile() -> None:
    def unpooled(x: Tensor) -> Tensor:
        return F.max_unpool1d(x[None, :4], torch.arange(4)[None], [2]).sum()

    def refused(backend: str, **options: Any) -> str:
        torch.compiler.reset()
        x = torch.randn(8, requires_grad=True)
        step: Any = torch.compile(unpooled, backend=backend, options=options or None)
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation") as e:
            step(x)
        return str(e.value)

    assert "max_unpooling" in refused("aot_eager")
    assert "max_unpooling" in refused("fxremat", executor="aot_eager", memory_budget="1MiB")

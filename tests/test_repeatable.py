"""Custom ops that the user says may run again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.compat.joint_graph import mark_repeatable
from fxremat.cost import second_runs
from fxremat.passes.joint_graph import is_repeatable
from fxremat.verify import predicates
from tests.nets import triple
from tests.ranks import least_named

OPTIONS: dict[str, Any] = {"executor": "aot_eager", "solver": "greedy", "variants": "none"}
NAME = "fxremat_tests::triple"

pytestmark = pytest.mark.usefixtures("fresh")


class Blocks(nn.Module):
    """Each block saves what a kernel of its own gives, unless that may run again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(triple(layer(x)))
        return x.square().mean()


def least(**options: Any) -> int:
    torch.manual_seed(0)
    with pytest.raises(fxremat.InfeasibleBudget) as refused:
        fxremat.explain(
            Blocks(), torch.randn(2048, 64), memory_budget="1MiB", options={**OPTIONS, **options}
        )
    return least_named(refused.value)


def test_the_least_is_lower_where_they_may_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not seen that they give the same, as among ranks, the user may say so."""
    seen = least()
    monkeypatch.setattr(second_runs, "_several_ranks", lambda: True)
    assert least(repeatable=[NAME]) == seen < 0.9 * least()


def test_gradients_are_the_same() -> None:
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(2048, 64)
    loss: Any = model(x)
    loss.backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    budget = least(repeatable=[NAME])
    options = {**OPTIONS, "memory_budget": budget, "repeatable": [NAME]}
    loss = torch.compile(model, backend="fxremat", options=options)(x)
    loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)
    assert fxremat.reports()[-1].recomputed


@pytest.mark.parametrize("names", [(NAME,), ()])
def test_planner_and_verifier_agree(names: tuple[str, ...]) -> None:
    graph = torch.fx.Graph()
    source = graph.placeholder("x")
    node = graph.call_function(torch.ops.fxremat_tests.triple.default, (source,))
    source.meta["val"] = node.meta["val"] = torch.empty(2, device="meta")
    mark_repeatable(graph, names)
    assert is_repeatable(node, frozenset()) is bool(names)
    assert predicates.is_repeatable(node, frozenset()) is bool(names)
    assert not is_repeatable(node, frozenset({source}))


@pytest.mark.parametrize("wrong", ["triple", ["a::b::c"], [3], 7])
def test_wrong_names(wrong: Any) -> None:
    with pytest.raises(fxremat.InvalidOption, match="library::op"):
        least(repeatable=wrong)

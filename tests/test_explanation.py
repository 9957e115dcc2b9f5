"""`fxremat.explain` runs no more of a model than what it has to see."""

from __future__ import annotations

import torch
from torch import nn

import fxremat
from tests.graphs import batch

EAGER = {"executor": "aot_eager"}
RAN: list[torch.Size] = []


@torch.library.custom_op(
    "fxremat_tests::noted", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def noted(x: torch.Tensor) -> torch.Tensor:
    """A copy; says that it ran."""
    RAN.append(x.shape)
    return x.clone()


@noted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Noted(nn.Module):
    """Two layers; the graph ends between them if it is ``broken``."""

    def __init__(self, *, broken: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.broken, self.calls = nn.BatchNorm1d(16), broken, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.norm(self.first(x))
        with torch.no_grad():
            more = noted(x)
        if self.broken:
            torch._dynamo.graph_break()
        result: torch.Tensor = self.second(x.relu()) + more
        return result.sum()


def test_a_model_that_is_one_graph_does_not_run() -> None:
    RAN.clear()
    model = Noted(broken=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    [graph] = fxremat.explain(model, batch(8, 16), options=EAGER).graphs
    assert graph.predicted_peak_bytes > 0
    assert not RAN
    assert model.calls == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_graph_that_another_follows_runs() -> None:
    RAN.clear()
    model = Noted(broken=True)
    assert len(fxremat.explain(model, batch(8, 16), options=EAGER).graphs) == 2
    assert [tuple(shape) for shape in RAN] == [(8, 16)]
    hooked = Noted(broken=False)
    results: list[torch.Tensor] = []
    hooked.register_forward_hook(lambda module, given, result: results.append(result))
    assert fxremat.explain(hooked, batch(8, 16), options=EAGER).graphs
    assert len(RAN) == 2

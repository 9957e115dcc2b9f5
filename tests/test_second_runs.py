"""Kernels of others: what may run again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxremat
from fxremat.compat.joint_graph import REPEATABLE, is_pure_attention
from fxremat.cost import second_runs
from tests import end_to_end, kernels
from tests.end_to_end import QUICK
from tests.graphs import Net
from tests.nets import triple

pytestmark = pytest.mark.usefixtures("fresh_budgets")

CPU = torch.device("cpu")


NUMBERS = count()
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "doubled": lambda x: 2 * x,
    "tagged": lambda x: 2 * x,
    "noisy": lambda x: x + torch.rand_like(x),
    "counted": lambda x: x + next(NUMBERS),
    # as FlashAttention gives a seed that it leaves as it is allocated if it draws nothing
    "unwritten": lambda x: torch.empty(1 << 16, dtype=torch.int64),
    "refusing": lambda x: x.item(),  # raises: made-up data have several elements
}


def declared(name: str, **settings: Any) -> Any:
    """One of them as an operator."""

    def run(x: Tensor) -> Tensor:
        return FUNCTIONS[name](x)  # type: ignore[no-any-return]

    made = torch.library.custom_op(f"fxremat_second::{name}", run, mutates_args=(), **settings)
    made.register_fake(torch.empty_like)
    return made._opoverload


def marked(target: Any) -> bool:
    """Whether a call of it may run again."""
    graph = fx.Graph()
    x = graph.placeholder("primals_1")
    node = graph.call_function(target, (x,))
    graph.output(node)
    with FakeTensorMode():
        x.meta["val"], node.meta["val"] = torch.empty(8, 4), torch.empty(8, 4)
    second_runs.mark_functions(graph, CPU, here=True)
    return REPEATABLE in node.meta


def test_two_runs_decide(caplog: pytest.LogCaptureFixture) -> None:
    state = torch.get_rng_state()
    assert marked(declared("doubled"))
    torch.arange(1 << 20).add_(1)  # what memory that is allocated next may hold
    assert marked(declared("unwritten"))
    assert not marked(declared("noisy"))
    assert not marked(declared("counted"))
    assert not marked(declared("tagged", tags=(torch.Tag.nondeterministic_seeded,)))
    assert not caplog.text
    refused = declared("refusing")
    assert not marked(refused)
    assert not marked(refused)
    assert caplog.text.count("'repeatable': ['fxremat_second::refusing']") == 1
    torch.testing.assert_close(torch.get_rng_state(), state)


def attention_node(score: Callable[[Any, Any], Any]) -> fx.Node:
    """A call of FlexAttention whose scores are changed by an op."""
    inside = fx.Graph()
    given = inside.placeholder("score")
    inside.output(score(inside, given))
    root = nn.Module()
    root.score = fx.GraphModule(nn.Module(), inside)
    graph = fx.Graph()
    q = graph.placeholder("q")
    target = torch.ops.higher_order.flex_attention
    node = graph.call_function(target, (q, q, q, graph.create_node("get_attr", "score")))
    graph.output(node)
    nodes = fx.GraphModule(root, graph).graph.nodes
    found: fx.Node = next(one for one in nodes if one.target is target)
    return found


def test_flex_attention_may_run_again_unless_it_draws() -> None:
    def scaled(graph: fx.Graph, score: fx.Node) -> fx.Node:
        return graph.call_function(torch.ops.aten.mul.Tensor, (score, 2.0))

    def dropped(graph: fx.Graph, score: fx.Node) -> fx.Node:
        return graph.call_function(torch.ops.aten.rand_like.default, (score,))

    assert is_pure_attention(attention_node(scaled))
    assert not is_pure_attention(attention_node(dropped))


def test_kernels_of_others_need_no_more_than_those_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention, norms and the loss: no higher a least, and gradients equal to the bit."""
    batch = kernels.words()
    torch.manual_seed(0)
    theirs = kernels.Transformer(kernels.THEIRS)
    own = kernels.Transformer(kernels.TORCHS)
    least = end_to_end.least(theirs, batch, **QUICK)
    assert least <= end_to_end.least(own, batch, **QUICK)
    with monkeypatch.context() as patch:
        patch.setattr(second_runs, "is_a_rank", lambda: True)
        assert least < 0.8 * end_to_end.least(theirs, batch, **QUICK)  # if each runs once
    mine, how = copy.deepcopy(theirs), {**QUICK, "memory_budget": least}
    torch.compile(mine, backend="fxremat", options=how)(*batch).backward()
    expected = torch.compile(theirs, backend="aot_eager")
    expected(*batch).backward()
    for one, plain in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert plain.grad is not None
        assert torch.equal(one.grad, plain.grad)  # type: ignore[arg-type]


# --- repeatable ---------------------------------------------------------------------------

NAME = "fxremat_tests::triple"


def blocks() -> Net:
    """Each block saves what a kernel of its own gives, unless that may run again."""

    def step(net: Any, x: Tensor) -> Tensor:
        for layer in net.layers:
            x = torch.sin(triple(layer(x)))
        return x.square().mean()

    return Net(step, layers=nn.ModuleList(nn.Linear(64, 64) for _ in range(4)))


def least(**options: Any) -> int:
    torch.manual_seed(0)
    return end_to_end.least(blocks(), (torch.randn(2048, 64),), **QUICK, **options)


def test_the_least_is_lower_where_they_may_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not seen that they give the same, as among ranks, the user may say so."""
    seen = least()
    monkeypatch.setattr(second_runs, "is_a_rank", lambda: True)
    assert least(repeatable=[NAME]) == seen < 0.9 * least()


@pytest.mark.parametrize("wrong", ["triple", ["a::b::c"], [3], 7])
def test_wrong_names(wrong: Any) -> None:
    with pytest.raises(fxremat.InvalidOption, match="library::op"):
        least(repeatable=wrong)

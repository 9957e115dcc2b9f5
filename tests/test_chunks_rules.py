"""Regions computed for a few rows at a time: same values, same gradients, in every form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxremat.passes.variants.chunks.rules import CHUNKED_ATTENTION, CHUNKED_LOSS, CHUNKED_MLP
from fxremat.runtime.chunks.operator import ROWS
from fxremat.runtime.chunks.program import parse
from tests.graphs import Net, calls
from tests.row_nets import WEIGHTS, D, Gated, V, head, labels, rows, up_and_down, z_loss
from tests.row_sites import all_names, check, taken, trace
from tests.variants import sites


def written_out(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy by hand."""
    shifted = logits - logits.max(-1, keepdim=True).values
    return (shifted.exp().sum(-1).log() - shifted.gather(-1, y[:, None])[:, 0]).mean()


LOSSES: dict[str, Any] = {
    "plain": F.cross_entropy,
    "module": lambda logits, y: nn.CrossEntropyLoss()(logits, y),
    "smoothing": lambda logits, y: F.cross_entropy(logits, y, label_smoothing=0.1),
    "weights": lambda logits, y: F.cross_entropy(logits, y, weight=WEIGHTS.to(logits.dtype)),
    "sum": lambda logits, y: F.cross_entropy(logits, y, reduction="sum"),
    "none": lambda logits, y: F.cross_entropy(logits, y, reduction="none"),
    "scaled": lambda logits, y: F.cross_entropy(logits / 8.0, y) * 0.5,
    "squared": lambda logits, y: F.cross_entropy(logits, y) ** 2,
    "z": z_loss,
    "by hand": written_out,
    "nll": lambda logits, y: F.nll_loss(F.log_softmax(logits, -1), y),
    "soft cap": lambda logits, y: F.cross_entropy(5 * torch.tanh(logits / 5), y),
    "probabilities": lambda logits, y: F.cross_entropy(logits, F.one_hot(y, V).to(logits.dtype)),
    "float": lambda logits, y: F.cross_entropy(logits.double().to(logits.dtype), y),
    "two": lambda logits, y: (F.cross_entropy(logits, y), F.cross_entropy(logits, y.flip(0))),
}


@pytest.mark.parametrize(
    ("name", "bias"), [*((name, True) for name in LOSSES), ("plain", False), ("by hand", False)]
)
def test_losses(name: str, bias: bool) -> None:
    net = Net(lambda m, x, y: LOSSES[name](m.head(x), y), head=head(bias))
    check(net, (rows(50, D), labels(50)), CHUNKED_LOSS)


@pytest.mark.parametrize("all_of_them", [False, True], ids=["some", "all"])
@pytest.mark.parametrize("name", ["plain", "smoothing", "weights", "sum", "none"])
def test_ignored_labels(name: str, all_of_them: bool) -> None:
    net = Net(lambda m, x, y: LOSSES[name](m.head(x), y), head=head())
    y = torch.full((50,), -100) if all_of_them else labels(50, ignored=True)
    check(net, (rows(50, D), y), CHUNKED_LOSS)


def hugging_face(m: Any, x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Shifted labels, padded, and the sum divided by a number of items."""
    logits = m.head(x).float()
    shifted = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    loss = F.cross_entropy(logits.view(-1, V), shifted, ignore_index=-100, reduction="sum")
    return loss / count


def test_shifted_labels() -> None:
    net = Net(hugging_face, head=head(False))
    names = check(net, (rows(4, 16, D), labels(4, 16), torch.tensor(60)), CHUNKED_LOSS)
    assert any("at once" in name for name in names)


def test_tied_weights() -> None:
    def step(m: Any, tokens: torch.Tensor, y: torch.Tensor) -> Any:
        return F.cross_entropy(F.linear(torch.tanh(m.table(tokens)), m.table.weight), y)

    torch.manual_seed(1)
    check(Net(step, table=nn.Embedding(V, D)), (labels(50), labels(50)), CHUNKED_LOSS)


def test_one_hot_rows_are_seen_through_casts() -> None:
    """Of a loss in bfloat16: one number a row is added, and no row is compared with positions."""
    net = Net(lambda m, x, y: F.cross_entropy(m.head(x), y), head=head().bfloat16())
    x = rows(64, D).detach().bfloat16().requires_grad_()
    assert check(net, (x, labels(64)), CHUNKED_LOSS, tolerance=2e-2)
    joint = trace(net, (x, labels(64))).joint
    at_once = [site for site in sites(CHUNKED_LOSS, joint) if "at once" in site.name]
    assert at_once
    for site in at_once:
        [call] = calls(taken(joint, site).module.graph, ROWS)
        ops = [(one.op, one.row_shape) for one in parse(str(call.args[2])).loop]
        assert ("aten.scatter_add.default", (V,)) in ops
        assert ("aten.eq.Tensor", (V,)) not in ops


def test_no_gradients_ahead_in_float16() -> None:
    net = Net(lambda m, x, y: F.cross_entropy(m.head(x).float(), y), head=head().half())
    x = rows(64, D).detach().half().requires_grad_()
    names = check(net, (x, labels(64)), CHUNKED_LOSS, tolerance=2e-2)
    assert not any("at once" in name for name in names)


def test_given_logits() -> None:
    def step(logits: torch.Tensor, y: torch.Tensor) -> Any:
        return F.cross_entropy(logits, y)

    check(step, (rows(50, V), labels(50)), CHUNKED_LOSS)


def test_logits_that_are_a_result() -> None:
    def step(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = m.head(x)
        return F.cross_entropy(logits, y), logits

    names = check(Net(step, head=head()), (rows(50, D), labels(50)), CHUNKED_LOSS)
    assert not any("at once" in name for name in names)


@pytest.mark.parametrize("count", [1, 2, 15, 17, 33])
def test_few_rows(count: int) -> None:
    """Too few rows for a chunk are left alone, a few more are not."""
    net = Net(lambda m, x, y: F.cross_entropy(m.head(x), y), head=head())
    if count <= 16:
        assert all_names(net, (rows(count, D), labels(count))) == []
    else:
        check(net, (rows(count, D), labels(count)), CHUNKED_LOSS)


# --- MLP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh])
def test_mlp(activation: type[nn.Module]) -> None:
    names = check(up_and_down(activation), (rows(3, 17, D),), CHUNKED_MLP)
    assert all("again" in name for name in names)


def test_gated_mlp() -> None:
    check(Gated(), (rows(3, 17, D),), CHUNKED_MLP)


def test_two_mlps_have_their_own_sites() -> None:
    names = all_names(nn.Sequential(Gated(), Gated()), (rows(64, D),))
    assert len({name.split()[1] for name in names}) == 2


# --- attention -----------------------------------------------------------------------------------


def attention(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """Attention over [B, H, T, d] with a mask that is the same for all heads."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~m.mask, float("-inf"))
    return scores.softmax(-1) @ v


def test_attention() -> None:
    mask = torch.ones(24, 24, dtype=torch.bool).tril()
    given = tuple(rows(2, 4, 24, 8).detach().mul(f).requires_grad_() for f in (1.0, 0.7, 0.5))
    check(Net(attention, mask=mask), given, CHUNKED_ATTENTION)


def test_attention_of_a_projection() -> None:
    def step(m: Any, x: torch.Tensor) -> Any:
        q, k, v = (p.view(2, 24, 4, 4).transpose(1, 2) for p in m.qkv(x).split(D, -1))
        return m.out(attention(m, q, k, v).transpose(1, 2).reshape(2, 24, D))

    mask = torch.ones(24, 24, dtype=torch.bool).tril()
    torch.manual_seed(1)
    net = Net(step, qkv=nn.Linear(D, 3 * D), out=nn.Linear(D, D), mask=mask)
    check(net, (rows(2, 24, D),), CHUNKED_ATTENTION)


# --- left alone ----------------------------------------------------------------------------------


def test_sums_along_rows() -> None:
    def step(m: Any, x: torch.Tensor) -> Any:
        return m.down(m.up(x).cumsum(0))

    torch.manual_seed(1)
    net = Net(step, up=nn.Linear(D, 4 * D), down=nn.Linear(4 * D, D))
    assert all_names(net, (rows(64, D),)) == []


def test_random_numbers_stay_outside() -> None:
    """A loop reads the mask of a dropout, and does not draw it."""
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Linear(D, 4 * D), nn.GELU(), nn.Dropout(0.5), nn.GELU(), nn.Linear(4 * D, D)
    )
    joint = trace(net, (rows(64, D),)).joint
    graph = taken(joint, sites(CHUNKED_MLP, joint)[0]).module.graph
    read = [i for call in calls(graph, ROWS) for i in call.all_input_nodes]
    (masks,) = {i for i in read if i.meta["val"].dtype is torch.bool}
    assert masks.target is torch.ops.aten.gt.Scalar


def test_convolutions_are_left_to_their_own_rule() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 3))
    found = all_names(net, (rows(20, 3, 8, 8),))
    assert found
    assert all(name.startswith("chunked_convolutions ") for name in found)

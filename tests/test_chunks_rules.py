"""Losses a few rows at a time: which are found, which rows they leave out, and in a step."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxremat.compat.joint_graph import extract_forward_backward
from fxremat.errors import VerificationFailed
from fxremat.passes.halves import RECOMPUTED
from fxremat.passes.memory_estimation import estimate
from fxremat.passes.recompute import apply_plan
from fxremat.passes.variants.chunks.ignored_rows import Known, Value, result_of
from fxremat.passes.variants.chunks.rules import CHUNKED_ATTENTION, CHUNKED_LOSS, CHUNKED_MLP, RULES
from fxremat.runtime.chunks.operator import ROWS
from fxremat.runtime.chunks.program import dump, parse
from fxremat.verify.data_flow import check_data_flow, check_split
from tests.conftest import Golden
from tests.graphs import Net, again_after_tangents, calls, no_workspace, unit_time
from tests.row_nets import (
    LOSS,
    STEPS,
    WEIGHTS,
    D,
    V,
    gated,
    head,
    labels,
    rows,
    up_and_down,
    z_loss,
)
from tests.row_sites import Traced, check, names_of, taken, trace
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


def test_tied_weights_and_given_logits() -> None:
    torch.manual_seed(1)
    net = Net(
        lambda m, x, y: F.cross_entropy(F.linear(torch.tanh(m.table(x)), m.table.weight), y),
        table=nn.Embedding(V, D),
    )
    check(net, (labels(50), labels(50)), CHUNKED_LOSS)
    given = Net(lambda m, logits, y: F.cross_entropy(logits, y))
    check(given, (rows(50, V), labels(50)), CHUNKED_LOSS)


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


def test_no_gradients_ahead() -> None:
    """In float16, nor of logits that are a result."""
    net = Net(lambda m, x, y: F.cross_entropy(m.head(x).float(), y), head=head().half())
    x = rows(64, D).detach().half().requires_grad_()
    names = [*check(net, (x, labels(64)), CHUNKED_LOSS, tolerance=2e-2)]
    net = Net(lambda m, x, y: (F.cross_entropy(z := m.head(x), y), z), head=head())
    names += check(net, (rows(50, D), labels(50)), CHUNKED_LOSS)
    assert not any("at once" in name for name in names)


def test_a_loop_that_runs_again_gives_what_is_read() -> None:
    """Logits that are a result live still, so that a second run has no memory for them."""
    net = Net(lambda m, x, y: (F.cross_entropy(z := m.head(x), y), z), head=head())
    joint = trace(net, (rows(64, D), labels(64))).joint
    [site, *_] = [one for one in sites(CHUNKED_LOSS, joint) if "again" in one.name]
    found = estimate(
        taken(joint, site), unit_time, no_workspace, fused=False, device="cpu", name="test"
    )
    before = found.joint.module.graph
    steps = again_after_tangents(calls(before, ROWS)[0].name)(found.problem)

    planned = apply_plan(found, steps)
    graph = planned.module.graph
    check_data_flow(before, graph, ())
    count, saved = found.joint.num_forward_outputs, list(planned.saved)
    halves = extract_forward_backward(
        planned.module, saved, num_fwd_outputs=count, static_inputs=()
    )
    check_split(halves[1].graph, [one.name for one in saved], halves[0].graph)
    [again] = [one for one in calls(graph, ROWS) if RECOMPUTED in one.name]
    assert [V] in [list(one.shape[1:]) for one in calls(before, ROWS)[0].meta["val"]]
    assert {tuple(one.shape) for one in again.meta["val"]} == {(64, 1)}
    assert sorted(int(str(one.args[1])) for one in again.users) == list(
        range(len(again.meta["val"]))
    )
    program = parse(str(again.args[2]))
    again.update_arg(2, dump(replace(program, results=program.results[::-1])))
    with pytest.raises(VerificationFailed, match="computed differently"):
        check_data_flow(before, graph, ())


@pytest.mark.parametrize("count", [1, 2, 15, 17, 33])
def test_few_rows(count: int) -> None:
    """Too few rows for a chunk are left alone, a few more are not."""
    net = Net(lambda m, x, y: F.cross_entropy(m.head(x), y), head=head())
    if count <= 16:
        assert names_of(net, (rows(count, D), labels(count))) == []
    else:
        check(net, (rows(count, D), labels(count)), CHUNKED_LOSS)


# --- MLP ----------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh, None])
def test_mlp(activation: type[nn.Module] | None) -> None:
    net = gated() if activation is None else up_and_down(activation)
    assert all("again" in name for name in check(net, (rows(3, 17, D),), CHUNKED_MLP))


def test_two_mlps_have_their_own_sites() -> None:
    names = names_of(nn.Sequential(gated(), gated()), (rows(64, D),))
    assert len({name.split()[1] for name in names}) == 2


# --- attention ----------------------------------------------------------------------------


def attention(m: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    """Attention over [B, H, T, d] with a mask that is the same for all heads."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~m.mask, float("-inf"))
    return scores.softmax(-1) @ v


def test_attention() -> None:
    """By itself, and of a projection."""

    def step(m: Any, x: torch.Tensor) -> Any:
        q, k, v = (p.view(2, 24, 4, 4).transpose(1, 2) for p in m.qkv(x).split(D, -1))
        return m.out(attention(m, q, k, v).transpose(1, 2).reshape(2, 24, D))

    mask = torch.ones(24, 24, dtype=torch.bool).tril()
    given = tuple(rows(2, 4, 24, 8).detach().mul(f).requires_grad_() for f in (1.0, 0.7, 0.5))
    check(Net(attention, mask=mask), given, CHUNKED_ATTENTION)
    torch.manual_seed(1)
    net = Net(step, qkv=nn.Linear(D, 3 * D), out=nn.Linear(D, D), mask=mask)
    check(net, (rows(2, 24, D),), CHUNKED_ATTENTION)


# --- left alone ---------------------------------------------------------------------------


def test_sums_along_rows_and_unknown_sizes_are_left_alone() -> None:
    seen, inputs = Traced(), (rows(50, D), labels(50))
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 0)
    seen.compiled(LOSS)(*inputs)
    assert sites(CHUNKED_LOSS, seen.joint) == []
    torch.manual_seed(1)
    up, down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
    net = Net(lambda m, x: m.down(m.up(x).cumsum(0)), up=up, down=down)
    assert names_of(net, (rows(64, D),)) == []


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
    found = names_of(net, (rows(20, 3, 8, 8),))
    assert found
    assert all(name.startswith("chunked_convolutions ") for name in found)


# --- ignored rows -------------------------------------------------------------------------


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


LEFT_OUT: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "another number": (lambda m, x, y: F.cross_entropy(m.head(x), y, ignore_index=3), (Y % 9,)),
    "smoothing and weights": (STEPS["weighted"][0].function, (Y,)),
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
    "two labels": (lambda m, x, y: sum(LOSSES["two"](m.head(x), y)), (Y,)),
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


def ignored_by_sites(loss: Any, given: tuple[Any, ...]) -> dict[str, list[Any]]:
    """The same of each site in the step of a loss."""
    joint = trace(Net(loss, head=head()), (rows(COUNT, D), *given)).joint
    found = sites(CHUNKED_LOSS, joint)
    return {site.name: ignored(taken(joint, site).module.graph) for site in found}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_rows_are_left_out_of_all_loops(name: str) -> None:
    found = ignored_by_sites(*LEFT_OUT[name])
    assert any("at once" in name for name in found)
    assert all(None not in said for said in found.values())


@pytest.mark.parametrize("name", CHECKED)
def test_masked_rows(name: str) -> None:
    loss, given = CHECKED[name]
    graphs = check(Net(loss, head=head()), (rows(COUNT, D), *given), CHUNKED_LOSS)
    assert all(None not in ignored(graph) for graph in graphs.values())


@pytest.mark.parametrize("name", COMPUTED)
def test_rows_that_matter_are_computed(name: str) -> None:
    found = ignored_by_sites(*COMPUTED[name])
    assert found
    assert all({*said} == {None} for said in found.values())


def hugging_face(m: Any, x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Shifted labels, padded, and the sum divided by a number of items."""
    logits = m.head(x).float()
    shifted = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    loss = F.cross_entropy(logits.view(-1, V), shifted, ignore_index=-100, reduction="sum")
    return loss / count


def test_shifted_labels_that_are_left_out() -> None:
    """As trainers do it; few of them count."""
    y = labels(4, 16)
    y.view(-1)[:60] = -100
    net = Net(hugging_face, head=head(False))
    graphs = check(net, (rows(4, 16, D), y, torch.tensor(60)), CHUNKED_LOSS)
    assert any("at once" in name for name in graphs)
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


# --- regions ------------------------------------------------------------------------------


def block() -> Net:
    """Attention without heads, and an MLP."""
    parts = {"norm": nn.LayerNorm(D), "mlp": up_and_down(nn.GELU)}
    attend = F.scaled_dot_product_attention
    return Net(lambda m, x: x + m.mlp(m.norm(x + attend(x, x, x))), **parts)


@pytest.mark.slow
def test_a_deep_net_is_looked_at_fast() -> None:
    """Each layer has its own region; the stream between layers is none."""
    torch.manual_seed(1)
    step = nn.Sequential(*(block() for _ in range(12)))
    started = time.process_time()
    joint = trace(step, (rows(4, 32, D),)).joint
    seen = time.process_time()
    found = {site.name.split()[1] for rule in RULES for site in rule.find(joint)}
    assert len(found) == 12
    # Of twice as many layers it may take as long as the trace: work that grows with the square is
    # seen. In one run, so that a busy machine changes both.
    assert 2 * (time.process_time() - seen) < seen - started


def test_graph_of_a_loss_before_and_after(golden: Golden) -> None:
    step = Net(lambda m, x, y: F.cross_entropy(m.head(x), y), head=head(False))
    joint = trace(step, (rows(50, D), labels(50))).joint
    texts = [f"before\n\n{joint.module.graph}"]
    for site in sites(CHUNKED_LOSS, joint)[:2]:
        texts.append(f"{site.name}\n\n{taken(joint, site).module.graph}")
    golden("\n\n".join(texts))

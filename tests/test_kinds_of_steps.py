"""Steps of special kinds: sparse, jagged, in mixed precision, and through Inductor."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import fxremat
from fxremat.compat.tensors import SPARSE, plain_tensors
from fxremat.cost.workspaces import Workspaces
from fxremat.memory.measured_peak import measure_call
from fxremat.passes.recompute import apply_plan
from tests.end_to_end import compiled_by_fxremat, measured
from tests.graphs import Capture, Net, assert_plan_changes_nothing, batch, capture, linear
from tests.small import Stack, seeded, train

pytestmark = pytest.mark.usefixtures("fresh")


# --- inductor -----------------------------------------------------------------------------


def test_budgets_predictions_gradients_with_dropout_and_caches() -> None:
    """The same budget hits and still reports; another one never gets the cached graph."""
    model, x = seeded(lambda: Stack(1, dropout=0.2), 1024, 32)
    other, full = copy.deepcopy(model), fxremat.explain(model, x).store_all_peak_bytes
    plans = []
    for fraction in (0.8, 0.8, 0.7):
        torch._dynamo.reset()
        budget = int(fraction * full)
        call = compiled_by_fxremat(model, memory_budget=budget, variants="none")
        peak, report = measured(model, call, (x,)), fxremat.reports()[-1]
        assert report.recomputed
        assert peak <= budget
        assert abs(report.predicted_peak_bytes - peak) <= 0.01 * peak
        plans.append(report)
    assert [p.from_cache for p in plans] == [False, True, False]
    assert plans[0].plan == plans[1].plan
    ours = train(model, x, call)
    theirs = train(other, x, torch.compile(other))
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its)


@pytest.mark.slow
@pytest.mark.usefixtures("vectors")
def test_the_users_inductor_options_and_passes_stay() -> None:
    """And the peak is what was predicted, with kernels as users have them."""
    seen = []

    def theirs(graph: torch.fx.Graph) -> None:
        seen.append(len(list(graph.nodes)))

    model, x = seeded(lambda: Stack(1), 64, 32)
    inductor = {"post_grad_custom_post_pass": theirs}
    call = compiled_by_fxremat(model, memory_budget="8MiB", inductor=inductor)
    peak = measured(model, call, (x,))
    assert seen
    assert peak == fxremat.reports()[-1].predicted_peak_bytes


# --- autocast -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scratch_of_a_matmul(dtype: torch.dtype) -> None:
    x, y = (torch.randn(1024, 64).to(dtype) for _ in range(2))
    out = torch.empty(64, 64, dtype=dtype)
    taken = measure_call(lambda: torch.mm(x.t(), y, out=out), torch.device("cpu"))
    spaces = Workspaces(torch.device("cpu"))
    assert spaces.of_call(torch.ops.aten.mm.out, (x.t(), y), {"out": out}) == taken
    assert spaces.of_call(torch.ops.aten.mm.default, (x.t(), y), {}) == taken


@pytest.mark.slow
def test_the_predicted_peak_is_the_measured_one() -> None:
    model, x = seeded(lambda: Stack(2), 4096, 32)

    def compiled(**options: Any) -> Any:
        torch._dynamo.reset()
        made = torch.compile(model, backend="fxremat", options=options)

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = made(x)
            loss.backward()
            model.zero_grad()

        step()
        return step

    compiled()
    (full,) = fxremat.reports()
    step = compiled(memory_budget=int(0.7 * full.store_all_peak_bytes), variants="none")
    (report,) = fxremat.reports()
    measured = fxremat.measure_peak(step, held=(model, x))
    assert report.predicted_peak_bytes == measured.peak_bytes


# --- functional gradients -----------------------------------------------------------------


OPTIONS: dict[str, Any] = {"memory_budget": "64MiB", "executor": "aot_eager"}


MODEL = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))


def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    found: Tensor = functional_call(MODEL, weights, (x,)).square().mean()
    return found


def whole(weights: dict[str, Tensor], x: Tensor) -> Any:
    return grad(loss)(weights, x)


def per_sample(weights: dict[str, Tensor], x: Tensor) -> Any:
    return vmap(grad(loss), (None, 0))(weights, x)


@pytest.mark.parametrize("function", [whole, per_sample])
def test_a_budget_without_effect_is_told(function: Any, caplog: pytest.LogCaptureFixture) -> None:
    weights = {name: one.detach() for name, one in MODEL.named_parameters()}
    x = torch.randn(6, 4)
    run: Any = torch.compile(function, backend="fxremat", options=OPTIONS)
    with caplog.at_level(logging.WARNING, "fxremat"):
        torch.testing.assert_close(run(weights, x), function(weights, x))
    told = [one for one in caplog.records if "takes gradients itself" in one.getMessage()]
    assert len(told) == 1
    assert not fxremat.reports()


def test_an_evaluation_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    run: Any = torch.compile(MODEL, backend="fxremat", options=OPTIONS)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "fxremat"):
        run(torch.randn(6, 4))
    assert not caplog.records


# --- jagged tensors -----------------------------------------------------------------------


def jagged_gradients(model: nn.Module, **how: Any) -> list[Tensor | None]:
    """After a batch of one length and one of another."""

    def loss(x: Tensor) -> Tensor:
        found: Tensor = model(x).values().square().mean()
        return found

    torch._dynamo.reset()
    run: Any = torch.compile(loss, **how)
    model.zero_grad(set_to_none=True)
    for count in (20, 30):  # words, in three rows
        offsets = torch.tensor([0, 5, 9, count])
        run(torch.nested.nested_tensor_from_jagged(torch.ones(count, 8), offsets)).backward()
    return [one.grad for one in model.parameters()]


@pytest.mark.filterwarnings("ignore:NestedTensor does not implement")
def test_a_jagged_batch_trains_under_a_budget() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    expected = jagged_gradients(model, backend="aot_eager")
    found = jagged_gradients(model, backend="fxremat", options=OPTIONS)
    torch.testing.assert_close(found, expected)
    assert fxremat.reports()[-1].budget_bytes == 64 << 20


# --- sparse gradients ---------------------------------------------------------------------


def trained(model: nn.Module, **how: Any) -> list[Tensor]:
    """The gradients of the second of two steps."""
    torch._dynamo.reset()
    run = torch.compile(model, **how)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        run(torch.arange(32)).backward()
    return [one.grad.to_dense() for one in model.parameters() if one.grad is not None]


def test_a_budget_is_told_to_be_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    words, head = nn.Embedding(64, 8, sparse=True), nn.Linear(8, 1)
    model = Net(lambda net, x: net.head(net.words(x)).square().mean(), words=words, head=head)
    expected = trained(model, backend="aot_eager")
    with caplog.at_level(logging.WARNING, "fxremat"):
        found = trained(model, backend="fxremat", options={"memory_budget": "1MiB"})
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


# --- saved ends ---------------------------------------------------------------------------


def norm(*, seen: bool = False, wide: bool = False) -> Net:
    """Divides by root mean squares, or ``wide``, by roots; ``seen``: the mean is a result, too."""

    def step(net: Any, x: torch.Tensor) -> Any:
        x = net.first(x)
        mean = x.square() if wide else x.square().mean(-1, keepdim=True)
        loss = net.last(x * torch.rsqrt(mean + 1e-5)).sum()
        return loss + mean.sum() if seen else loss

    return Net(step, first=linear(32), last=linear(32))


def saved(seen: Capture) -> set[str]:
    """Operators whose results the backward reads."""
    planned = apply_plan(seen.found, seen.steps)
    return {node.name.split("_")[0] for node in planned.saved}


def test_the_root_is_saved_and_not_the_mean() -> None:
    seen = capture(norm(), [batch(8, 32)], fused=True)
    assert "rsqrt" in saved(seen)
    assert "mean" not in saved(seen)
    assert not any("rsqrt_inline" in node.name for node in seen.backward.graph.nodes)


def test_what_else_reads_the_beginning_keeps_it() -> None:
    """An elementwise op of as many elements is no statistic: its end would be another tensor."""
    seen = capture(norm(wide=True), [batch(8, 32)], fused=True)
    assert "rsqrt" not in saved(seen)


@pytest.mark.parametrize("net", [norm(), norm(seen=True), nn.LayerNorm(32), nn.Softmax(-1)])
def test_gradients_are_those_of_eager(net: nn.Module) -> None:
    assert_plan_changes_nothing(nn.Sequential(linear(32), net), [batch(8, 32)], fused=True)

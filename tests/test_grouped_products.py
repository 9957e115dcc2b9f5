"""Products of experts: what their calls are tried on, what they cost, and their backward."""

from __future__ import annotations

import importlib
import itertools
import operator
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.cost.call_times import CallTimes, made_call
from fxremat.cost.roofline import flops_of
from fxremat.runtime import grouped_products
from fxremat.runtime.grouped_products import grouped_outer, trace_experts
from tests.end_to_end import compiled_by_fxremat, measured, step
from tests.graphs import Net, calls, capture
from tests.single_calls import ATEN, call

HOST = torch.device("cpu")
GROUPED = ATEN._grouped_mm.default
ROWS, WIDTH, INSIDE, EXPERTS = 512, 32, 128, 4


def ends(of: int = 3) -> Tensor:
    return torch.zeros(of, dtype=torch.int32)


@pytest.mark.parametrize(
    ("one", "other", "flops"),
    [
        ((48, 8), (3, 8, 16), 2 * 48 * 8 * 16),
        ((8, 48), (48, 16), 2 * 48 * 8 * 16),
        ((3, 16, 8), (8, 48), 2 * 48 * 8 * 16),
    ],
    ids=["rows", "sums", "columns"],
)
def test_groups_are_as_large_as_each_other_where_a_call_is_timed(
    one: tuple[int, ...], other: tuple[int, ...], flops: int
) -> None:
    args = *(torch.empty(n, dtype=torch.bfloat16, device="meta") for n in (one, other)), ends()
    real, named = made_call(GROUPED, args, {}, HOST)
    by_name = made_call(GROUPED, args[:2], {"offs": args[2]}, HOST)
    assert real[2].tolist() == by_name[1]["offs"].tolist() == [16, 32, 48]
    assert named == {}
    node = call(GROUPED, *args)
    assert flops_of(node) == flops


@pytest.mark.usefixtures("undisturbed")
def test_of_operators_that_are_not_known_integers_stay_zero(tmp_path: Path) -> None:
    """In range whatever they say; and what has no schema is run as it is."""
    name = "fxremat_tests::by_offsets"
    torch.library.define(name, "(Tensor x, Tensor y, Tensor offs) -> Tensor")
    op = torch.ops.fxremat_tests.by_offsets.default
    real, _ = made_call(op, (torch.ones(6, 2), torch.ones(3, 2, 2), ends()), {}, HOST)
    assert real[2].tolist() == [0, 0, 0]
    product = CallTimes(HOST, tmp_path).of_call(operator.mul, (torch.ones(4), torch.ones(4)), {})
    assert product is not None


def test_a_product_of_each_group_of_rows() -> None:
    one, other = torch.randn(9, 4), torch.randn(9, 6)
    offs = torch.tensor([2, 2, 7])  # the second group has no rows, the last two rows no group
    found = grouped_outer(one, other, offs)
    parts = [one[:2].T @ other[:2], torch.zeros(4, 6), one[2:7].T @ other[2:7]]
    torch.testing.assert_close(found, torch.stack(parts))
    assert flops_of(call(grouped_outer, one, other, offs)) == 2 * 9 * 4 * 6


# --- the operator of transformers ---------------------------------------------------------


def _fallback(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    result = input.new_zeros(len(input), weight.shape[2])
    start = 0
    for one, end in zip(weight, offs.tolist(), strict=True):
        torch.mm(input[start:end], one, out=result[start:end])
        start = end
    return result


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weight, offs = ctx.saved_tensors
    _ = offs.tolist()  # tracing ends here
    raise AssertionError((gradient, rows, weight))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


@pytest.fixture(scope="module")
def experts() -> Iterator[None]:
    """Transformers' operator, or one like it where transformers is not installed."""
    name, module = "transformers::grouped_mm_fallback", "transformers.integrations.moe"
    with pytest.MonkeyPatch.context() as patch:
        try:
            __import__(module)
        except ImportError:
            schema = "(Tensor input, Tensor weight, Tensor offs) -> Tensor"
            torch.library.custom_op(name, _fallback, mutates_args=(), schema=schema)
            torch.library.register_fake(
                name, lambda input, weight, offs: input.new_empty(len(input), weight.shape[2])
            )
            torch.library.register_autograd(name, _backward, setup_context=_save)
            patch.setitem(sys.modules, module, ModuleType(module))
        trace_experts()
        yield


class Mixture(nn.Module):
    """Experts by turns: a matrix of each as it is, and one that is laid out transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INSIDE) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INSIDE) / INSIDE**0.5)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        product = torch.ops.transformers.grouped_mm_fallback
        inside: Tensor = nn.functional.silu(product(x, self.up, offs))
        outside: Tensor = product(inside, self.down.transpose(1, 2), offs)
        return x + outside


def mixtures() -> Net:
    def forward(net: Any, x: Tensor, offs: Tensor) -> Any:
        for block in net.blocks:
            x = block(x, offs)
        return x.square().mean()

    return Net(forward, blocks=nn.ModuleList(Mixture() for _ in range(4)))


def in_float64(model: nn.Module, x: Tensor, offs: Tensor) -> list[Tensor]:
    """Gradients by torch's own matmuls."""
    leaves = [one.detach().double().requires_grad_() for one in model.parameters()]
    total = x.double()
    bounds = [0, *offs.tolist()]
    for up, down in zip(leaves[::2], leaves[1::2], strict=True):
        parts = [
            nn.functional.silu(total[a:b] @ up[i]) @ down[i].T
            for i, (a, b) in enumerate(itertools.pairwise(bounds))
        ]
        total = total + torch.cat(parts)
    total.square().mean().backward()  # type: ignore[no-untyped-call]
    return [one.grad for one in leaves if one.grad is not None]


@pytest.mark.usefixtures("experts")
def test_layers_of_experts_are_one_graph_within_a_budget() -> None:
    torch.manual_seed(0)
    model, x = mixtures(), torch.randn(ROWS, WIDTH)
    inputs = x, torch.tensor([10, 10, 40, ROWS], dtype=torch.int32)
    plain = measured(model, torch.compile(model, backend="inductor"), inputs)
    torch._dynamo.reset()
    budget = plain * 4 // 5
    within = compiled_by_fxremat(model, memory_budget=budget)
    assert measured(model, within, inputs) <= budget
    assert len(fxremat.reports()) == 1
    step(model, within, inputs)
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    torch.testing.assert_close(gradients, in_float64(model, *inputs), check_dtype=False)
    assert [one.stride() for one in gradients] == [one.stride() for one in model.parameters()]


@pytest.mark.usefixtures("experts")
def test_frozen_experts_have_no_product_for_their_gradient() -> None:
    model = mixtures().requires_grad_(False)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    offs = torch.tensor([10, 10, 40, ROWS], dtype=torch.int32)
    graph = capture(model, (x, offs)).joint.module.graph
    assert len(calls(graph, torch.ops.transformers.grouped_mm_fallback)) == 16
    assert not calls(graph, grouped_outer)


@pytest.mark.usefixtures("experts")
def test_another_operator_of_that_name_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a transformers that is not known yet, or has none."""
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", ModuleType("moe"))
    monkeypatch.setattr(grouped_products, "_register", lambda product: pytest.fail("registered"))
    with monkeypatch.context() as other:
        other.setattr(grouped_products, "_ARGUMENTS", ["rows", "weight", "offs"])
        trace_experts()
    monkeypatch.setattr(grouped_products, "_NAME", "no_such_operator")
    trace_experts()


def test_plain_inductor_leaves_the_operator_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXREMAT_DISABLE", "1")
    module = importlib.import_module("fxremat.backend")
    monkeypatch.setattr(module, "trace_experts", lambda: pytest.fail("registered"))
    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    torch.testing.assert_close(compiled_by_fxremat(model, memory_budget="1GiB")(x), model(x))

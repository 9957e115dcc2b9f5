"""What ops take by their operands: rooflines, peaks as expressions, and scratch memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxremat
from fxremat.cost.call_times import operands
from fxremat.cost.device import GPUS, DeviceSpec, spec_of_card
from fxremat.cost.roofline import flops_of, roofline_us
from fxremat.cost.workspaces import Workspaces
from fxremat.errors import CannotVary
from fxremat.sizes import parse_bytes
from fxremat.whatif.peak_expression import SizeRange, Sizes, peak_expression
from tests.end_to_end import measured
from tests.graphs import batch, capture, mlp
from tests.single_calls import ATEN, KEY, call

SPEC = DeviceSpec("test", 1e12, 4e12, 1e9, 3.0, 1e9, 1e8, 20.0)
A, B = torch.empty(8, 16), torch.empty(16, 32)
HOST = torch.device("cpu")


@pytest.mark.parametrize(
    ("node", "flops"),
    [
        (call(ATEN.mm.default, A, B), 2 * 8 * 16 * 32),
        (call(ATEN.addmm.default, torch.empty(32), A, B), 2 * 8 * 16 * 32),
        (call(ATEN.bmm.default, torch.empty(3, 8, 16), torch.empty(3, 16, 32)), 3 * 8192),
        (call(ATEN.sin.default, A), 0),
        (call(ATEN.t.default, A), 0),
        (
            call(ATEN._scaled_dot_product_flash_attention_for_cpu.default, KEY, KEY, KEY),
            2 * 2 * 2 * 4 * 4 * 8,
        ),
        (
            call(ATEN.convolution.default, torch.empty(2, 3, 8, 8), torch.empty(4, 3, 3, 3), None,
                 [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
            2 * 2 * 4 * 36 * 3 * 9,
        ),
    ],
    ids=["mm", "addmm", "bmm", "sin", "t", "attention", "convolution"],
)  # fmt: skip
def test_floating_point_operations(node: fx.Node, flops: float) -> None:
    assert flops_of(node) == flops


def test_the_slower_of_compute_and_traffic_counts() -> None:
    node = call(ATEN.mm.default, A, B)
    few = roofline_us([node], 0, torch.float32, SPEC)
    many = roofline_us([node], 10**6, torch.float32, SPEC)
    assert few == pytest.approx(3.0 + 1e6 * 8192 / 1e12)
    assert many == pytest.approx(3.0 + 1000.0)
    half = roofline_us([node], 0, torch.bfloat16, SPEC)
    assert half == pytest.approx(3.0 + 1e6 * 8192 / 4e12)


def test_dynamic_sizes_are_counted_at_their_bound() -> None:
    x = batch(6, 8)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
    seen = capture(mlp(), [x])
    assert flops_of(seen.calls(ATEN.addmm)[0]) == 2 * 64 * 8 * 8


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "gpu"),
        ("NVIDIA RTX A1000", "gpu"),
        ("NVIDIA T400 4GB", "gpu"),
        ("NVIDIA A10G", "gpu"),
    ],
)
def test_a_card_is_known_by_the_words_of_its_name(card: str, name: str) -> None:
    assert spec_of_card(card).name == name


def test_convolutions_in_float32_are_computed_in_tf32_where_there_is_such() -> None:
    spec = {one.name: one for one in GPUS}
    for card, dtype, half in [("A100", torch.float32, True), ("V100", torch.float32, False),
                              ("A100", torch.float64, False)]:  # fmt: skip
        rate = spec[card].flops(dtype, is_convolution=True)
        assert rate == (spec[card].flops(torch.float16) / 2 if half else spec[card].flops(dtype))
    image, weight = torch.empty(8, 64, 32, 32), torch.empty(64, 64, 3, 3)
    node = call(ATEN.convolution.default, image, weight, None, [1, 1], [1, 1], [1, 1], False,
                [0, 0], 1)  # fmt: skip
    us = roofline_us([node], 0, torch.float32, spec["A100"]) - spec["A100"].launch_us
    assert us == pytest.approx(1e6 * flops_of(node) / (0.65 * 156e12))


# --- peak expression ----------------------------------------------------------------------


BATCH, SEQUENCE = SizeRange("batch", 2, 40), SizeRange("sequence", 3, 21)
Terms = tuple[int, int, int, int]


def _live(moments: list[Terms], sizes: Sizes) -> list[int]:
    batch, sequence = sizes["batch"], sizes.get("sequence", 7)
    return [
        a + b * batch + c * batch * sequence + d * batch * sequence**2 for a, b, c, d in moments
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, 9**5), *(st.integers(0, top) for top in (9999, 99, 9))),
        min_size=1,
        max_size=12,
    )
)
@settings(deadline=None, max_examples=25)
def test_equal_to_the_maximum_at_every_size(moments: list[Terms]) -> None:
    found = peak_expression(lambda sizes: _live(moments, sizes), (BATCH, SEQUENCE))
    assert found.multiple_of == 1
    for count, length in itertools.product((2, 3, 11, 23, 39, 40), (3, 4, 9, 20, 21)):
        sizes = {"batch": count, "sequence": length}
        assert found.at(sizes) == max(_live(moments, sizes))


def test_the_largest_size_within_a_budget() -> None:
    """What is below everywhere is left out. Without symbols it is a number."""
    moments = [(100, 5, 0, 0), (90, 5, 0, 0), (0, 9, 0, 0), (0, 7, 0, 0)]
    found = peak_expression(lambda sizes: _live(moments, sizes), (BATCH,))
    assert str(found) == "Max(9*batch, 5*batch + 100) for 2 <= batch <= 40"
    fits = {budget: found.largest("batch", budget) for budget in (109, 110, 225, 226, 359, 10**6)}
    assert fits == {109: 0, 110: 2, 225: 25, 226: 25, 359: 39, 10**6: 40}
    number = peak_expression(lambda sizes: [3, 7, 5], ())
    assert (number.at({}), str(number)) == (7, "7")


def test_allocators_round_so_multiples_are_exact_and_others_take_the_next() -> None:
    """64 bytes a size, rounded up to 512: exact at multiples of 8."""

    def live(sizes: Sizes) -> list[int]:
        return [1000 + -(-64 * sizes["batch"] // 512) * 512]

    found = peak_expression(live, (SizeRange("batch", 8, 800),))
    assert found.multiple_of == 8
    assert found.at({"batch": 16}) == 1000 + 1024
    assert found.at({"batch": 17}) == 1000 + 1536
    assert all(found.at({"batch": n}) == live({"batch": n})[0] for n in range(8, 801))


def test_what_is_no_polynomial_or_was_not_planned_for_is_refused() -> None:
    with pytest.raises(CannotVary, match="batch"):
        peak_expression(lambda sizes: [2 ** sizes["batch"]], (BATCH,))
    found = peak_expression(lambda sizes: [sizes["batch"]], (BATCH,))
    with pytest.raises(CannotVary, match="41 is not from 2 to 40"):
        found.at({"batch": 41})


class _Net(nn.Module):
    """A residual net; scores of a row with every other one make the bytes quadratic in rows."""

    def __init__(self, *, scores: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.scores = scores

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
            if self.scores:
                x = x + torch.softmax(x @ x.transpose(0, 1), -1) @ x
        return x.square().mean()


def _dynamic(rows: int, bound: int) -> torch.Tensor:
    x = torch.randn(rows, 32)
    torch._dynamo.mark_dynamic(x, 0, min=130, max=bound)
    return x


@pytest.mark.parametrize(
    ("executor", "bound", "budget"),
    [("aot_eager", 512, "5MiB"), pytest.param("inductor", 4096, "3MiB", marks=pytest.mark.slow)],
)
def test_of_a_plan_it_is_what_a_step_of_each_size_takes(
    executor: str, bound: int, budget: str
) -> None:
    """One plan for all sizes; the peak of real steps at sizes that were not looked at."""
    torch._dynamo.reset()
    model = _Net(scores=executor == "aot_eager")
    options: dict[str, Any] = {"executor": executor, "memory_budget": budget}
    found = fxremat.explain(model, _dynamic(bound // 3, bound), options=options)
    expression = found.peak_expression
    [size] = expression.ranges
    assert (size.low, size.high) == (130, bound)
    assert expression.at({size.name: bound}) == found.predicted_peak_bytes <= parse_bytes(budget)
    call = torch.compile(model, backend="fxremat", options=options)
    call(_dynamic(bound // 3, bound)).backward()
    for rows in (131, 137, 158, 200, 255, 301, 388, 467, 508, bound - 1):
        peak = measured(model, call, (torch.randn(rows, 32),))
        assert peak == expression.at({size.name: rows}), rows
    assert len(fxremat.reports()) == 1
    assert fxremat.reports()[0].recomputed
    torch._dynamo.reset()  # it has learnt that rows vary
    fixed = fxremat.explain(model, torch.randn(200, 32), options=options)
    assert fixed.peak_expression.at({}) == fixed.predicted_peak_bytes


# --- operands -----------------------------------------------------------------------------


X = torch.ops.aten
HOW = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def both(image: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    made = X.convolution.default(image, weight, None, *HOW)
    found = X.convolution_backward.default(gradient, image, weight, None, *HOW, [True, True, False])
    total: torch.Tensor = made.sum() + found[0].sum() + found[1].sum()
    return total


@pytest.fixture
def graph() -> fx.Graph:
    """A convolution of 16 images of 8 channels, and its gradients."""
    given = torch.randn(16, 8, 12, 10), torch.randn(24, 8, 3, 3), torch.randn(16, 24, 12, 10)
    return make_fx(both, tracing_mode="fake")(*given).graph


def call_of(graph: fx.Graph, target: object) -> fx.Node:
    found: fx.Node = next(node for node in graph.nodes if node.target is target)
    return found


def channels_last(args: object) -> list[bool]:
    assert isinstance(args, tuple)
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    return [one.is_contiguous(memory_format=torch.channels_last) for one in tensors]


def test_images_of_convolutions_have_their_channels_last(graph: fx.Graph) -> None:
    """Both operands of a convolution; of its gradients all but the weight; no others."""
    calls = (call_of(graph, op.default) for op in (X.convolution, X.convolution_backward, X.sum))
    convolution, gradients, summed = calls
    forward, backward = (operands(one, images_last=True)[0] for one in (convolution, gradients))
    assert channels_last(forward) == [True, True]
    assert channels_last(backward) == [True, True, False]
    assert backward[2:] == operands(gradients, images_last=False)[0][2:]
    assert [one.shape for one in forward[:2]] == [(16, 8, 12, 10), (24, 8, 3, 3)]
    assert channels_last(operands(convolution, images_last=False)[0]) == [False, False]
    assert channels_last(operands(summed, images_last=True)[0]) == [False]


def test_scratch_memory_is_that_of_the_layout(graph: fx.Graph) -> None:
    """It is what the same call takes of real tensors that lie so."""
    node = call_of(graph, X.convolution_backward.default)
    last = Workspaces(torch.device("cpu"), images_last=True).of_node(node)
    gradient, image = (
        torch.randn(shape).to(memory_format=torch.channels_last)
        for shape in ((16, 24, 12, 10), (16, 8, 12, 10))
    )
    args = (gradient, image, torch.randn(24, 8, 3, 3), None, *HOW, [True, True, False])
    assert last == Workspaces(torch.device("cpu")).of_call(node.target, args, {})
    assert last != Workspaces(torch.device("cpu")).of_node(node)

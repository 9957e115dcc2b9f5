"""Max-pool gradients gathered from offsets: the same, bit by bit, as scattered ones."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from fxremat.passes.joint_graph import STORED, JointGraph, read_joint_graph
from fxremat.passes.nodes import add_call
from fxremat.passes.variants import insertion
from fxremat.passes.variants.pool_gradient import RULES
from tests.conftest import Golden
from tests.examples import examples
from tests.graphs import Capture, capture, compiled, run_joint

ATEN = torch.ops.aten


class Pooled(nn.Module):
    """A product, so that the pool's input needs a gradient, and a pool."""

    def __init__(self, kernel: int, stride: int, padding: int, ceil: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.pool = nn.MaxPool2d(kernel, stride, padding, ceil_mode=ceil)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = self.pool(x * self.weight)
        return pooled


def joint_of(model: nn.Module, x: torch.Tensor) -> JointGraph:
    return capture(model, (x.requires_grad_(x.is_floating_point()),), fused=True).joint


def inputs_of(joint: JointGraph, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    values = [node.meta["val"] for node in (*joint.primals, *joint.tangents)]
    return [torch.randn(value.shape).to(value.dtype) for value in values]


def taken(joint: JointGraph) -> JointGraph:
    sites = insertion.find_sites(joint, RULES)
    assert len(sites) == 1
    return insertion.take(joint, sites)


def assert_same(joint: JointGraph, seed: int = 0) -> None:
    inputs = inputs_of(joint, seed)
    after = taken(joint)
    calls = {str(node.target) for node in after.module.graph.nodes}
    assert not any("scatter" in call or "offsets_to_indices" in call for call in calls)
    for old, new in zip(run_joint(joint, inputs), run_joint(after, inputs), strict=True):
        assert old.dtype == new.dtype
        assert torch.equal(old, new)


WINDOWS = [(2, 2, 0), (3, 2, 1), (3, 1, 1), (2, 3, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kernel", "stride", "padding"), WINDOWS)
def test_gathered_gradients_are_the_scattered_ones(
    kernel: int, stride: int, padding: int, dtype: torch.dtype
) -> None:
    joint = joint_of(Pooled(kernel, stride, padding).to(dtype), torch.randn(2, 3, 9, 8).to(dtype))
    assert_same(joint)


def test_gradients_are_stored_in_the_type_that_they_are_read_in() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), Pooled(3, 2, 1), nn.Conv2d(3, 2, 3))
    joint = joint_of(model.bfloat16(), torch.randn(2, 2, 12, 12).bfloat16())
    stored = [node for node in taken(joint).module.graph.nodes if STORED in node.name]
    assert [node.meta["val"].dtype for node in stored] == [torch.bfloat16]
    assert_same(joint)


@pytest.mark.parametrize("pool", [(2, 2, 0), (3, 3, 0)])
@pytest.mark.parametrize("size", [12, 13])
def test_where_windows_do_not_overlap_nothing_is_stored(
    pool: tuple[int, int, int], size: int
) -> None:
    """Also where some elements are in no window."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), Pooled(*pool), nn.Conv2d(3, 2, 2))
    joint = joint_of(model, torch.randn(2, 2, size, size + 3))
    assert not any(STORED in node.name for node in taken(joint).module.graph.nodes)
    assert_same(joint)


@examples(8)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(4, 9), st.integers(4, 9), st.booleans(),
    st.integers(0, 9),
)  # fmt: skip
def test_any_shape(kernel: int, stride: int, high: int, wide: int, ceil: bool, seed: int) -> None:
    joint = joint_of(Pooled(kernel, stride, kernel // 2, ceil), torch.randn(1, 2, high, wide))
    if insertion.find_sites(joint, RULES):  # a window of one element is no pool
        assert_same(joint, seed)


def test_ties_go_where_they_went() -> None:
    joint = joint_of(Pooled(3, 2, 1), torch.zeros(1, 1, 6, 6))
    inputs = [torch.zeros_like(each) if each.dim() == 4 else each for each in inputs_of(joint)]
    inputs[-1] = torch.arange(9.0).view(1, 1, 3, 3)
    for old, new in zip(run_joint(joint, inputs), run_joint(taken(joint), inputs), strict=True):
        assert torch.equal(old, new)


def test_a_dilated_pool_is_left_alone() -> None:
    class Dilated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.max_pool2d(x * self.weight, 2, dilation=2)

    assert insertion.find_sites(joint_of(Dilated(), torch.randn(1, 2, 8, 8)), RULES) == ()


def gradient_by_hand() -> JointGraph:
    """The gradient of a pool of windows of 2 by 2, node by node: the same in every torch."""
    graph, mode, prims = fx.Graph(), torch._subclasses.FakeTensorMode(), torch.ops.prims
    inputs = [graph.placeholder(name) for name in ("primals_1", "tangents_1")]
    with mode:
        for node, shape in zip(inputs, ([1, 1, 4, 4], [1, 1, 2, 2]), strict=True):
            node.meta["val"] = torch.empty(shape)
    x, gradients = inputs

    def call(target: Any, *args: Any) -> fx.Node:
        return add_call(graph, target, args, x)

    pool = prims._low_memory_max_pool_with_offsets.default
    both = call(pool, x, [2, 2], [2, 2], [0, 0], [1, 1], False)
    result, offsets = (call(operator.getitem, both, index) for index in range(2))
    back = prims._low_memory_max_pool_offsets_to_indices.default
    index = call(back, offsets, [2, 2], [4, 4], [2, 2], [0, 0], [1, 1])
    zeros = graph.call_function(ATEN.full.default, ([1, 16], 0), {"dtype": torch.float32})
    with mode:
        zeros.meta["val"] = torch.zeros(1, 16)
    given, places = (call(ATEN.view.default, each, [1, 4]) for each in (gradients, index))
    scattered = call(ATEN.scatter_add.default, zeros, 1, places, given)
    graph.output((result, call(ATEN.view.default, scattered, [1, 1, 4, 4])))
    return read_joint_graph(fx.GraphModule({}, graph), 1)


def test_sizes_that_are_not_known_are_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2))
    seen = Capture(fused=True)
    step = compiled(model, seen, dynamic=True)
    for size in (9, 12):
        step(torch.randn(1, 2, size, size)).sum().backward()
    assert insertion.find_sites(seen.joint, RULES) == ()


def test_graph_of_a_pool_gradient(golden: Golden) -> None:
    joint = gradient_by_hand()
    assert_same(joint)
    golden(f"before\n\n{joint.module.graph}\n\nafter\n\n{taken(joint).module.graph}\n")

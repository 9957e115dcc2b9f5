"""Gradients of pools from offsets, and of ops from their outputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from fxremat.passes.joint_graph import STORED, JointGraph, read_joint_graph
from fxremat.passes.nodes import adder
from fxremat.passes.variants import insertion
from fxremat.passes.variants.from_outputs import RULES
from fxremat.passes.variants.insertion import Rule, Site
from fxremat.passes.variants.pool_gradient import RULES as POOL_RULES
from tests.conftest import Golden
from tests.examples import examples
from tests.graphs import Capture, Net, batch, capture, compiled, linear, run_joint
from tests.variants import compare, crossing, gradients, joint_of, sites, stand_ins_of

ATEN = torch.ops.aten


def pooled(
    kernel: int, stride: int, padding: int, ceil: bool = False, dilation: int = 1, axes: int = 2
) -> Net:
    """A product, so that the pool's input needs a gradient, and a pool."""
    kind = nn.MaxPool2d if axes == 2 else nn.MaxPool3d
    pool = kind(kernel, stride, padding, dilation, ceil_mode=ceil)
    weight = nn.Parameter(torch.ones(()))
    return Net(lambda net, x: net.pool(x * net.weight), weight=weight, pool=pool)


def pool_joint(model: nn.Module, x: torch.Tensor) -> JointGraph:
    return capture(model, (x.requires_grad_(x.is_floating_point()),), fused=True).joint


def inputs_of(joint: JointGraph) -> list[torch.Tensor]:
    torch.manual_seed(0)
    values = [node.meta["val"] for node in (*joint.primals, *joint.tangents)]
    return [torch.randn(value.shape).to(value.dtype) for value in values]


def taken(joint: JointGraph) -> JointGraph:
    sites = insertion.find_sites(joint, POOL_RULES)
    assert len(sites) == 1
    return insertion.take(joint, sites)


def assert_same(joint: JointGraph, given: Sequence[Tensor] = ()) -> None:
    inputs, after = [*given] or inputs_of(joint), taken(joint)
    calls = {str(node.target) for node in after.module.graph.nodes}
    assert not any("scatter" in call or "indices" in call for call in calls)
    for old, new in zip(run_joint(joint, inputs), run_joint(after, inputs), strict=True):
        assert old.dtype == new.dtype
        assert torch.equal(old, new)


WINDOWS = [(2, one) for one in ((2, 2, 0), (3, 2, 1), (3, 1, 1), (2, 3, 0))]
WINDOWS += [(3, one) for one in ((2, 2, 0), (2, 2, 1), (2, 3, 1))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("axes", "window"), WINDOWS)
def test_gathered_gradients_are_the_scattered_ones(
    axes: int, window: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Of images and of volumes."""
    x = torch.randn(2, 3, *((9, 8) if axes == 2 else (8, 6, 7))).to(dtype)
    assert_same(pool_joint(pooled(*window, axes=axes).to(dtype), x))


def test_gradients_are_stored_in_the_type_that_they_are_read_in() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), pooled(3, 2, 1), nn.Conv2d(3, 2, 3))
    joint = pool_joint(model.bfloat16(), torch.randn(2, 2, 12, 12).bfloat16())
    stored = [node for node in taken(joint).module.graph.nodes if STORED in node.name]
    assert [node.meta["val"].dtype for node in stored] == [torch.bfloat16]
    assert_same(joint)


@pytest.mark.parametrize("pool", [(2, 2, 0), (3, 3, 0)])
@pytest.mark.parametrize("size", [12, 13])
def test_where_windows_do_not_overlap_nothing_is_stored(
    pool: tuple[int, int, int], size: int
) -> None:
    """Also where some elements are in no window."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), pooled(*pool), nn.Conv2d(3, 2, 2))
    joint = pool_joint(model, torch.randn(2, 2, size, size + 3))
    assert not any(STORED in node.name for node in taken(joint).module.graph.nodes)
    assert_same(joint)


@examples(8)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(4, 9), st.integers(4, 9), st.booleans(),
)  # fmt: skip
def test_any_shape(kernel: int, stride: int, high: int, wide: int, ceil: bool) -> None:
    joint = pool_joint(pooled(kernel, stride, kernel // 2, ceil), torch.randn(1, 2, high, wide))
    if insertion.find_sites(joint, POOL_RULES):  # a window of one element is no pool
        assert_same(joint)


def test_ties_go_where_they_went() -> None:
    joint = pool_joint(pooled(3, 2, 1), torch.zeros(1, 1, 6, 6))
    inputs = [torch.zeros_like(each) if each.dim() == 4 else each for each in inputs_of(joint)]
    inputs[-1] = torch.arange(9.0).view(1, 1, 3, 3)
    assert_same(joint, inputs)


def test_a_dilated_pool_is_left_alone() -> None:
    joint = pool_joint(pooled(2, 2, 0, dilation=2), torch.randn(1, 2, 8, 8))
    assert insertion.find_sites(joint, POOL_RULES) == ()


def gradient_by_hand() -> JointGraph:
    """The gradient of a pool of windows of 2 by 2, node by node: the same in every torch."""
    graph, mode, prims = fx.Graph(), torch._subclasses.FakeTensorMode(), torch.ops.prims
    x, gradients = map(graph.placeholder, ("primals_1", "tangents_1"))
    with mode:
        x.meta["val"], gradients.meta["val"] = torch.empty(1, 1, 4, 4), torch.empty(1, 1, 2, 2)
    call = adder(graph, x)
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
    assert insertion.find_sites(seen.joint, POOL_RULES) == ()


def test_graph_of_a_pool_gradient(golden: Golden) -> None:
    joint = gradient_by_hand()
    assert_same(joint)
    golden(f"before\n\n{joint.module.graph}\n\nafter\n\n{taken(joint).module.graph}\n")


# --- from outputs -------------------------------------------------------------------------

PLAIN, SCALED, ACTIVATION = RULES


def activated(norm: nn.Module, slope: float = 0.1) -> nn.Module:
    """A norm and a leaky ReLU, whose output alone is to be kept."""
    return nn.Sequential(norm, nn.LeakyReLU(slope))


NORMS: dict[str, tuple[Rule, Callable[[int], Any]]] = {
    "rms": (PLAIN, lambda n: nn.RMSNorm(n, elementwise_affine=False)),
    "batch": (PLAIN, lambda n: nn.BatchNorm1d(n, affine=False, track_running_stats=False)),
    "scaled rms": (SCALED, nn.RMSNorm),
    "scaled layer": (SCALED, nn.LayerNorm),
    "scaled batch": (SCALED, lambda n: nn.BatchNorm1d(n, track_running_stats=False)),
    "rms and leaky": (PLAIN, lambda n: activated(nn.RMSNorm(n, elementwise_affine=False))),
    "scaled rms and leaky": (SCALED, lambda n: activated(nn.RMSNorm(n))),
    "scaled batch and leaky": (
        SCALED, lambda n: activated(nn.BatchNorm1d(n, track_running_stats=False))
    ),
}  # fmt: skip
ACTIVATIONS = (
    nn.LeakyReLU(0.1), nn.ELU(), nn.ELU(2.0), nn.ELU(0.5), F.softplus, nn.Softplus(),
    nn.Softplus(2.0), nn.Softplus(0.5, 30.0),
)  # fmt: skip


def found(rule: Rule, middle: Any) -> tuple[JointGraph, list[Site]]:
    """The joint graph of an op between two products, of which the second keeps the op's output.

    And the rule's sites.
    """
    parts = {"first": linear(8), "middle": middle, "last": linear(8)}
    block = Net(lambda net, x: net.last(net.middle(net.first(x))), **parts)
    joint = joint_of(block, [batch(6, 8).requires_grad_()])
    return joint, sites(rule, joint)


def assert_close(joint: JointGraph, site: Site) -> None:
    """Stand-ins and gradients within a few units of float32."""
    for old, new in stand_ins_of(joint, site):
        torch.testing.assert_close(new, old, rtol=2e-5, atol=2e-5)
    expected, got = (gradients(joint, r) for r in compare(joint, site))
    scale = max(float(one.abs().max()) for one in expected)  # a sum that cancels has only noise
    for one, other in zip(expected, got, strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * scale


@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str) -> None:
    """Of an activated one the output alone is kept."""
    rule, make = NORMS[name]
    joint, (site,) = found(rule, make(8))
    assert_close(joint, site)
    assert not found(PLAIN if rule is SCALED else SCALED, make(8))[1]
    if "leaky" in name:
        before, after = (
            [n for n in crossing(each) if n.op == "call_function" and n.meta["val"].shape == (6, 8)]
            for each in (joint, insertion.take(joint, [site]))
        )
        assert len(before) > len(after) == 1
        assert after[0].target is torch.ops.aten.where.self


@pytest.mark.parametrize("slope", [0.0, -0.1])
def test_a_slope_that_cannot_be_undone(slope: float) -> None:
    norm = nn.RMSNorm(8, elementwise_affine=False)
    for site in found(PLAIN, activated(norm, slope))[1]:
        assert "where" not in site.name


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: Callable[[Tensor], Tensor]) -> None:
    joint, (site,) = found(ACTIVATION, activation)
    assert_close(joint, site)


@pytest.mark.parametrize(
    "middle",
    [torch.tanh, torch.sigmoid, F.relu, F.gelu, F.silu, nn.LeakyReLU(-0.1), torch.exp,
     nn.Softplus(1.0, 5.0),
     nn.LayerNorm(8, elementwise_affine=False)],  # its derivative reads the output already
)  # fmt: skip
def test_not_offered(middle: Any) -> None:
    rules = [PLAIN] if isinstance(middle, nn.LayerNorm) else RULES
    for rule in rules:
        assert found(rule, middle)[1] == []


def test_a_product_that_keeps_a_view_of_the_output() -> None:
    """As with tokens in (batch, length, width): the product takes them as one matrix."""
    middle = nn.Sequential(nn.RMSNorm(8, elementwise_affine=False), nn.Flatten(0, 1))
    model = nn.Sequential(nn.Linear(8, 8), nn.Unflatten(0, (2, 3)), middle, nn.Linear(8, 8))
    joint = joint_of(model, [batch(6, 8).requires_grad_()])
    (site,) = sites(PLAIN, joint)
    assert_close(joint, site)


def test_not_where_the_output_is_not_kept() -> None:
    joint = joint_of(lambda x: F.elu(x.sin()), [batch(4, 4).requires_grad_()])
    assert sites(ACTIVATION, joint) == []

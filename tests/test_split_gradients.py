"""Gradients of a convolution in two calls."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fxremat.core.problem import Problem
from fxremat.core.timeline import replay
from fxremat.core.variants import take as take_variants
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.memory_estimation import estimate
from fxremat.passes.variants import insertion
from fxremat.passes.variants.convolutions import SPLIT_GRADIENTS
from tests.conftest import Golden
from tests.examples import examples
from tests.graphs import Net, capture, no_workspace, run_joint, unit_time
from tests.graphs import joint_of_model as joint_of  # a test's text seeds its examples
from tests.variants import assert_alike


def split(joint: JointGraph) -> JointGraph:
    return insertion.take(joint, insertion.find_sites(joint, [SPLIT_GRADIENTS]))


def problem_of(joint: JointGraph, **inserted: Any) -> Problem:
    how: Any = {"fused": True, "device": "cpu", "name": "test"}
    return estimate(joint, unit_time, no_workspace, **how, **inserted).problem


def assert_same(joint: JointGraph, tolerance: float) -> None:
    torch.manual_seed(0)
    values = [node.meta["val"] for node in (*joint.primals, *joint.tangents)]
    inputs = [torch.randn(value.shape, dtype=value.dtype) for value in values]
    for old, new in zip(run_joint(joint, inputs), run_joint(split(joint), inputs), strict=True):
        assert old.dtype == new.dtype
        assert old.shape == new.shape
        torch.testing.assert_close(new, old, rtol=tolerance, atol=tolerance)


@examples(20)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2), st.integers(5, 9),
    st.sampled_from((1, 2)), st.booleans(), st.sampled_from((1, 2, 3)),
)  # fmt: skip
def test_any_convolution(
    kernel: int, stride: int, padding: int, dilation: int, size: int, groups: int, bias: bool,
    axes: int,
) -> None:  # fmt: skip
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    model = kind(
        2, 4, kernel, stride, padding, dilation, groups=groups, bias=bias, dtype=torch.float64
    )
    assert_same(joint_of(model, torch.randn(2, 2, *[size] * axes, dtype=torch.float64)), 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("of_input", "of_gradient"),
    [
        (torch.contiguous_format, torch.channels_last),
        (torch.channels_last, torch.contiguous_format),
        (torch.channels_last, torch.channels_last),
    ],
)
def test_gradients_lie_in_memory_as_those_of_one_call(
    of_input: torch.memory_format, of_gradient: torch.memory_format, dtype: torch.dtype
) -> None:
    """What follows a convolution may turn its gradient, as the linear layers of a ConvNeXt do."""

    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = net.conv(x.contiguous(memory_format=of_input))
        return made.clone(memory_format=of_gradient)

    conv = nn.Conv2d(4, 4, 3, padding=1, groups=4, dtype=dtype)
    joint = joint_of(Net(run, conv=conv), torch.randn(2, 4, 6, 5, dtype=dtype))
    (site,) = insertion.find_sites(joint, [SPLIT_GRADIENTS])
    assert_alike(joint, site)
    assert_same(joint, 5e-2 if dtype is torch.bfloat16 else 1e-5)


def test_one_gradient_and_a_transposed_convolution_are_left_alone() -> None:
    of_batch = capture(nn.Conv2d(2, 2, 3), (torch.randn(1, 2, 5, 5),)).joint
    transposed = joint_of(nn.ConvTranspose2d(2, 2, 3), torch.randn(1, 2, 5, 5))
    for joint in (of_batch, transposed):
        assert insertion.find_sites(joint, [SPLIT_GRADIENTS]) == ()


def test_the_input_is_gone_before_its_gradient_is_there() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1))
    joint = joint_of(model, torch.randn(4, 8, 16, 16))

    def peak(of: JointGraph) -> int:
        problem = problem_of(of)
        return max(replay(problem, problem.base_steps()).live_bytes[-4:])

    assert len(insertion.find_sites(joint, [SPLIT_GRADIENTS])) == 2
    taken = split(joint)
    assert peak(taken) <= peak(joint)
    calls = [n for n in taken.module.graph.nodes if n.op == "call_function"]
    assert all(n.target is not operator.getitem or n.args[1] != 0 for n in calls)


def test_graph_of_split_gradients(golden: Golden) -> None:
    joint = joint_of(nn.Conv2d(2, 2, 3), torch.randn(1, 2, 5, 5))
    golden(f"before\n\n{joint.module.graph}\n\nafter\n\n{split(joint).module.graph}\n")


def two_ways(net: Any, x: torch.Tensor) -> Any:
    """The gradient of one way waits for that of the other."""
    hidden = net.first(x).tanh()
    return (net.long(hidden) + net.short(hidden)).tanh()


def test_gradients_of_inputs_are_where_the_planner_has_them() -> None:
    """The graph with the variants is the problem that they were chosen for: in the same order."""
    first, short, one, other = (nn.Conv2d(8, 8, n, padding=n // 2) for n in (3, 1, 1, 1))
    net = Net(two_ways, first=first, short=short, long=nn.Sequential(one, nn.Tanh(), other))
    joint = joint_of(net, torch.randn(4, 8, 16, 16))
    sites = insertion.find_sites(joint, [SPLIT_GRADIENTS])
    assert len(sites) == 4
    offered = insertion.insert_all(joint, sites)
    whole = problem_of(offered.joint, inserted=offered.inserted)
    chosen = take_variants(whole, [site.name for site in sites])
    made = problem_of(split(joint))

    assert [op.name for op in made.ops] == [op.name for op in chosen.ops]
    peaks = [replay(one, one.base_steps()).peak_bytes for one in (chosen, made)]
    assert peaks[0] == peaks[1]

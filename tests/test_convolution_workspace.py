"""Convolutions a few images at a time, by other algorithms, and their gradients in two calls."""

from __future__ import annotations

import copy
import operator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

import fxremat
from fxremat.core.constants import IMAGE_PARTS
from fxremat.core.problem import Problem
from fxremat.core.timeline import replay
from fxremat.core.variants import take as take_variants
from fxremat.cost.workspaces import Workspaces
from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.memory_estimation import estimate
from fxremat.passes.variants import insertion
from fxremat.passes.variants.convolutions import CONVOLUTION_WORKSPACE, SPLIT_GRADIENTS
from fxremat.passes.variants.insertion import Rule
from fxremat.runtime.chunks import convolutions
from tests.conftest import Golden
from tests.end_to_end import compiled_by_fxremat, least, measured, observed
from tests.examples import examples
from tests.graphs import Net, capture, no_workspace, on_cuda, unit_time
from tests.graphs import joint_of_model as joint_of  # a test's text seeds its examples
from tests.variants import compare

ATEN = torch.ops.aten
KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def much(call: fx.Node) -> int:
    """More workspace than anything else."""
    return 2**40


def assert_each_is_the_same(
    joint: JointGraph, tolerance: float, rule: Rule = CONVOLUTION_WORKSPACE
) -> int:
    """Every site alone gives what the graph gives, laid out as it was; how many there are.

    The ``tolerance`` is relative to the largest element of each result.
    """
    sites = insertion.find_sites(joint, [rule], much)
    for site in sites:
        for old, new in zip(*compare(joint, site), strict=True):
            if old is not None:
                assert (old.dtype, old.shape, old.stride()) == (new.dtype, new.shape, new.stride())
                most = tolerance * float(old.abs().max())
                torch.testing.assert_close(new, old, rtol=0, atol=most)
    return len(sites)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("last", [False, True])
def test_every_form_gives_what_the_call_gives(
    dtype: torch.dtype, tolerance: float, last: bool
) -> None:
    model = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, dtype=dtype)
    x = torch.randn(7, 4, 9, 8, dtype=dtype)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    assert assert_each_is_the_same(joint_of(model, x), tolerance) == 4


@examples(25)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(0, 1), st.integers(1, 2), st.integers(5, 7),
    st.sampled_from((1, 2)), st.booleans(), st.sampled_from((1, 2, 3)), st.booleans(),
    st.integers(1, 9),
)  # fmt: skip
def test_any_convolution(
    kernel: int, stride: int, padding: int, dilation: int, size: int, groups: int, bias: bool,
    axes: int, transposed: bool, images: int,
) -> None:  # fmt: skip
    kind = (TRANSPOSED if transposed else KINDS)[axes - 1]
    model = kind(
        2, 4, kernel, stride, padding, dilation=dilation, groups=groups, bias=bias,
        dtype=torch.float64,
    )  # fmt: skip
    joint = joint_of(model, torch.randn(images, 2, *[size] * axes, dtype=torch.float64))
    parts = {-(-images // n) for n in IMAGE_PARTS} - {images}
    assert assert_each_is_the_same(joint, 1e-13) == 2 * len(parts)
    assert assert_each_is_the_same(joint, 1e-10, SPLIT_GRADIENTS) == (not transposed)


def test_16_bit_gradients_of_many_parts_are_rounded_once() -> None:
    """Each part adds 1; a sum in bfloat16 would stay at 256, for it cannot hold 257."""
    x, weight = torch.ones(512, 1, 1, 1), torch.ones(1, 1, 1, 1)
    how = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])
    args = (x.bfloat16(), x.bfloat16(), weight.bfloat16(), None, *how)
    parts = convolutions.CONVOLUTION_BACKWARD(*args, 1, "")[1]
    assert parts.item() == 512
    assert (torch.tensor(256.0).bfloat16() + 1).item() == 256


def test_what_needs_no_workspace_is_left_alone() -> None:
    """So are an empty batch, and one image."""
    joint = joint_of(nn.Conv2d(2, 2, 3), torch.randn(8, 2, 5, 5))
    assert insertion.find_sites(joint, [CONVOLUTION_WORKSPACE]) == ()
    assert len(insertion.find_sites(joint, [CONVOLUTION_WORKSPACE], much)) == 4
    assert insertion.find_sites(joint, [CONVOLUTION_WORKSPACE], lambda call: 1) == ()
    for images in (0, 1):
        joint = joint_of(nn.Conv2d(2, 2, 3), torch.randn(images, 2, 5, 5))
        assert insertion.find_sites(joint, [CONVOLUTION_WORKSPACE], much) == ()


def test_a_call_far_from_the_peak_is_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.MaxPool2d(8), nn.Conv2d(2, 2, 1))
    joint = joint_of(model, torch.randn(8, 2, 32, 32))

    def as_much_again(call: fx.Node) -> int:
        return int(sum(one.meta["val"].nbytes for one in call.all_input_nodes))

    spared = {
        site.spares for site in insertion.find_sites(joint, [CONVOLUTION_WORKSPACE], as_much_again)
    }
    sizes = {node.args[node.name != "convolution"].meta["val"].shape[2] for node in spared}  # type: ignore[union-attr]
    assert sizes == {32}


def test_parts_need_less_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 the CPU lays out the columns of all images."""
    monkeypatch.setattr("fxremat.cost.workspaces.cache_directory", lambda: tmp_path)
    spaces = Workspaces(torch.device("cpu"))
    x, weight = torch.ones(16, 8, 16, 16).double(), torch.ones(8, 8, 3, 3).double()
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    whole = spaces.of_call(ATEN.convolution.default, (x, weight, None, *how), {})
    parts = spaces.of_call(convolutions.CONVOLUTION, (x, weight, None, *how, 2, ""), {})
    assert parts < whole / 6
    more = (x, x, weight, None, *how, [True, True, False])
    whole = spaces.of_call(ATEN.convolution_backward.default, more, {})
    parts = spaces.of_call(convolutions.CONVOLUTION_BACKWARD, (*more, 2, ""), {})
    assert parts < whole / 6


@pytest.mark.parametrize("algorithm", ["", "deterministic", "native"])
def test_flags_are_as_before(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn, seen = torch.backends.cudnn, []
    before = (cudnn.enabled, cudnn.deterministic)

    def recorded(*args: Any) -> torch.Tensor:
        seen.append((cudnn.enabled, cudnn.deterministic))
        return F.conv2d(*args[:3])

    x, weight = torch.ones(2, 2, 5, 5), torch.ones(2, 2, 3, 3)
    how = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    with monkeypatch.context() as patch:
        convolution = SimpleNamespace(default=recorded)
        patch.setattr(convolutions, "_ATEN", SimpleNamespace(convolution=convolution))
        convolutions._convolution(x, weight, None, *how, 1, algorithm)
    wanted = {"": before, "native": (False, before[1]), "deterministic": (before[0], True)}
    assert seen == [wanted[algorithm]] * 2
    assert (cudnn.enabled, cudnn.deterministic) == before
    with pytest.raises(RuntimeError):
        convolutions._convolution(x, weight[:, :1], None, *how, 2, algorithm)
    assert (cudnn.enabled, cudnn.deterministic) == before


def test_on_cuda_algorithms_can_be_asked_for() -> None:
    """Torch's own is for plain order."""
    joint = on_cuda(joint_of(nn.Conv2d(2, 2, 3), torch.randn(1, 2, 5, 5)))
    sites = insertion.find_sites(joint, [CONVOLUTION_WORKSPACE], much)
    assert [site.name.split(":")[1:] for site in sites] == [
        ["convolution", "native"],
        ["convolution_backward", "native"],
        ["convolution_backward", "deterministic"],
    ]
    for site in sites:
        taken = insertion.take(joint, [site])
        for old, new in zip(joint.results, taken.results, strict=True):
            assert isinstance(old, fx.Node)
            assert isinstance(new, fx.Node)
            one, other = old.meta["val"], new.meta["val"]
            assert (one.shape, one.stride(), one.device) == (
                other.shape, other.stride(), other.device
            )  # fmt: skip
    x = torch.randn(1, 2, 5, 5).contiguous(memory_format=torch.channels_last)
    joint = on_cuda(joint_of(nn.Conv2d(2, 2, 3), x))
    (site,) = insertion.find_sites(joint, [CONVOLUTION_WORKSPACE], much)
    assert site.name.endswith(":convolution_backward:deterministic")


def test_graph_of_convolution_workspace(golden: Golden) -> None:
    joint = joint_of(nn.Conv2d(2, 2, 3), torch.randn(8, 2, 5, 5))
    sites = insertion.find_sites(joint, [CONVOLUTION_WORKSPACE], much)
    taken = insertion.take(joint, [site for site in sites if site.name.endswith(":2_images")])
    golden(f"before\n\n{joint.module.graph}\n\nafter\n\n{taken.module.graph}\n")


def test_a_net_whose_columns_are_too_large_fits() -> None:
    torch.manual_seed(0)
    first, second = (nn.Conv2d(channels, 16, 3, padding=1) for channels in (3, 16))
    net = Net(lambda m, x: m.second(F.relu(m.first(x))).square().mean(), first=first, second=second)
    step, inputs = net.double(), (torch.randn(32, 3, 16, 16).double(),)
    plain = least(step, inputs, executor="aot_eager", variants="none")
    budget = least(step, inputs, executor="aot_eager", variants=("convolution_workspace",))
    assert budget < 0.6 * plain
    twin = copy.deepcopy(step)
    call = compiled_by_fxremat(
        step, executor="aot_eager", memory_budget=budget, variants=("convolution_workspace",)
    )
    for one, other in zip(observed(step, call, inputs), observed(twin, twin, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert measured(step, call, inputs) == fxremat.reports()[-1].predicted_peak_bytes <= budget


# --- gradients in two calls -----------------------------------------------------------------


def split(joint: JointGraph) -> JointGraph:
    return insertion.take(joint, insertion.find_sites(joint, [SPLIT_GRADIENTS]))


def problem_of(joint: JointGraph, **inserted: Any) -> Problem:
    how: Any = {"fused": True, "device": "cpu", "name": "test"}
    return estimate(joint, unit_time, no_workspace, **how, **inserted).problem


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
    tolerance = 5e-2 if dtype is torch.bfloat16 else 1e-5
    assert assert_each_is_the_same(joint, tolerance, SPLIT_GRADIENTS) == 1


def test_one_gradient_is_left_alone() -> None:
    joint = capture(nn.Conv2d(2, 2, 3), (torch.randn(1, 2, 5, 5),)).joint
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

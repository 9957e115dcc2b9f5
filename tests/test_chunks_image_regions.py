"""Regions of images that are computed a few rows at a time: found, and as an operator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.grad import conv2d_weight

import fxremat
from fxremat.compat.inductor.generated_code import generate
from fxremat.cost.workspaces import Workspaces
from fxremat.passes.joint_graph import Role
from fxremat.passes.materialisation import materialise
from fxremat.passes.variants.chunks.inductor_kernels import LayOutRows
from fxremat.passes.variants.chunks.rules import CHUNKED_CONVOLUTIONS, find
from fxremat.passes.variants.insertion import find_sites, take
from fxremat.passes.variants.table import RULES
from fxremat.runtime.chunks.buffers import places_of_images
from fxremat.runtime.chunks.operator import ROWS, RunningStatistics
from fxremat.runtime.chunks.program import Program, Ref, dump
from tests.conftest import Golden
from tests.end_to_end import compiled_by_fxremat, least, measured, observed
from tests.graphs import Net, joint_of_model
from tests.loss_program import one
from tests.row_sites import (
    assert_close,
    check,
    in_double,
    names_of,
    taken,
    trace,
    workspace_too_large,
)
from tests.slowness import slow_but
from tests.variants import sites

WIDTH = 8
RULE = CHUNKED_CONVOLUTIONS


def images(*shape: int) -> torch.Tensor:
    """Fixed random images that have a gradient."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).requires_grad_()


def net(step: Callable[..., Any], **parts: nn.Module) -> Net:
    """A model of two convolutions, each with a normalisation, of which some are others."""
    torch.manual_seed(1)
    made: dict[str, nn.Module] = {
        "first": nn.Conv2d(3, WIDTH, 3, padding=1, bias=False), "norm": nn.BatchNorm2d(WIDTH),
        "second": nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False),
        "other": nn.BatchNorm2d(WIDTH),
    }  # fmt: skip
    made |= parts
    for part in made.values():
        if isinstance(part, nn.BatchNorm2d) and part.affine:  # else ReLUs of images look alike
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.uniform_(part.bias, -0.5, 0.5)
    return Net(step, **made)


def two_stages(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Convolution, normalisation and ReLU, twice."""
    h = F.relu(m.norm(m.first(x)))
    return F.relu(m.other(m.second(h))).square().mean()


def exact(model: nn.Module, x: torch.Tensor) -> dict[str, fx.Graph]:
    """Every site gives the values and gradients of the step, in float64."""
    return check(in_double(model), (in_double(x),), RULE, tolerance=1e-10)


def activated(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def step(m: Any, x: torch.Tensor) -> torch.Tensor:
        return activation(m.other(m.second(activation(m.norm(m.first(x)))))).square().mean()

    return step


def residual(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.relu(m.norm(m.first(x)))
    return F.relu(m.other(m.second(h)) + h).square().mean()


def side_by_side(m: Any, x: torch.Tensor) -> torch.Tensor:
    """What skips over a level, as in a U-Net."""
    h = F.relu(m.norm(m.first(x)))
    low = F.interpolate(F.avg_pool2d(m.low(h), 2), scale_factor=2)
    return F.relu(m.other(m.second(torch.cat((h, low), 1)))).square().mean()


def squeezed(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A narrow way from the values back to them."""
    h = F.relu(m.norm(m.first(x)))
    gate = torch.sigmoid(m.gate(h.mean((2, 3))))
    return F.relu(m.other(m.second(h * gate[:, :, None, None]))).square().mean()


def with_result(m: Any, x: torch.Tensor) -> Any:
    """What the user gets exists, whoever else could do without."""
    h = F.relu(m.norm(m.first(x)))
    return F.relu(m.other(m.second(h))).square().mean(), h


STEPS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "leaky": (activated(lambda h: F.leaky_relu(h, 0.1)), {}), "elu": (activated(F.elu), {}),
    "silu": (activated(F.silu), {}), "gelu": (activated(F.gelu), {}),
    "residual": (residual, {}), "a result of the graph": (with_result, {}),
    "side by side": (side_by_side, {
        "low": nn.Conv2d(WIDTH, WIDTH, 1),
        "second": nn.Conv2d(2 * WIDTH, WIDTH, 3, padding=1, bias=False)}),
    "squeezed": (squeezed, {"gate": nn.Linear(WIDTH, WIDTH)}),
}  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, WIDTH, 17])
def test_any_number_of_images(count: int) -> None:
    """Also as many as there are channels: no vector of channels is taken for one of images."""
    if count == 1:  # is left alone
        assert not names_of(net(two_stages), (images(1, 3, 6, 6),), [RULE])
    else:
        exact(net(two_stages), images(count, 3, 6, 6))


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "stride": {"second": nn.Conv2d(WIDTH, 16, 3, stride=2, bias=False)},
    "dilation": {"second": nn.Conv2d(WIDTH, WIDTH, 3, dilation=2, padding=2, bias=False)},
    "depthwise": {"second": nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH, bias=False)},
    "grouped": {"second": nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=2, bias=False)},
    "pointwise": {"second": nn.Conv2d(WIDTH, 2 * WIDTH, 1, bias=False),
                  "other": nn.BatchNorm2d(2 * WIDTH)},
    "transposed": {"second": nn.ConvTranspose2d(WIDTH, WIDTH, 3, 2, 1, 1, bias=False)},
    "transposed first": {"first": nn.ConvTranspose2d(3, WIDTH, 2, 2, bias=False)},
    "stride first": {"first": nn.Conv2d(3, WIDTH, 3, stride=2, padding=1, bias=False)},
    "without norm": {"norm": nn.Identity(), "other": nn.Identity(),
                     "first": nn.Conv2d(3, WIDTH, 3), "second": nn.Conv2d(WIDTH, WIDTH, 3)},
    "not affine": {"norm": nn.BatchNorm2d(WIDTH, affine=False)},
    "no running statistics": {"norm": nn.BatchNorm2d(WIDTH, track_running_stats=False)},
    "cumulative": {"norm": nn.BatchNorm2d(WIDTH, momentum=None)},
    "group norm": {"norm": nn.GroupNorm(2, WIDTH)},
    "instance norm": {"norm": nn.InstanceNorm2d(WIDTH, affine=True)},
}  # fmt: skip
CONVOLUTIONS["stride"]["other"] = nn.BatchNorm2d(16)
QUICK = [*STEPS, "stride", "depthwise", "pointwise", "transposed", "without norm", "cumulative"]
STEPS |= {kind: (two_stages, parts) for kind, parts in CONVOLUTIONS.items()}


@pytest.mark.parametrize("name", slow_but([*QUICK, "group norm"], STEPS))
def test_ways_through_and_kinds_of_convolutions(name: str) -> None:
    step, parts = STEPS[name]
    exact(net(step, **copy.deepcopy(parts)), images(7, 3, 6, 8))


@pytest.mark.parametrize("rank", [1, 3])
def test_other_numbers_of_axes(rank: int) -> None:
    make, norm = (getattr(nn, f"{kind}{rank}d") for kind in ("Conv", "BatchNorm"))
    parts = {
        "first": make(3, WIDTH, 3, bias=False), "norm": norm(WIDTH),
        "second": make(WIDTH, WIDTH, 3, bias=False), "other": norm(WIDTH),
    }  # fmt: skip
    exact(net(two_stages, **parts), images(7, 3, *[7] * rank))


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_scales_of_a_normalisation(value: float) -> None:
    """Zero, as residual networks begin, and below."""
    norm = nn.BatchNorm2d(WIDTH)
    model = net(two_stages, norm=norm)
    nn.init.constant_(norm.weight, value)
    exact(model, images(7, 3, 6, 6))


def test_values_far_from_zero() -> None:
    """The variance is no difference of large numbers: as good as that of all images at once."""
    x = images(7, 3, 6, 6).detach() * 0.01 + 100
    check(net(two_stages), (x,), RULE, tolerance=1e-3)


def test_evaluation() -> None:
    """With running statistics there is nothing to add up, so one loop less."""
    model = net(two_stages)
    model.eval()
    for graph in exact(model, images(7, 3, 6, 6)).values():
        assert sum(node.target is ROWS for node in graph.nodes) <= 3


def test_dropout_is_not_drawn_again() -> None:
    def step(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(F.relu(m.norm(m.first(x))), 0.3)
        return F.relu(m.other(m.second(h))).square().mean()

    seen = trace(net(step), (images(9, 3, 6, 6),))
    plain = seen.values(seen.joint)
    found = sites(RULE, seen.joint)
    assert found
    for site in found:
        values = seen.values(taken(seen.joint, site))
        assert torch.equal(values[-1], plain[-1])  # the next random number
        for new, old in zip(values, plain, strict=True):
            assert_close(new, old, 2e-5)


def test_bfloat16() -> None:
    """Statistics are of 32 bits, as without."""
    model = net(two_stages).bfloat16()
    x = images(32, 3, 6, 6).detach().bfloat16()
    seen, float64 = trace(model, (x,)), trace(copy.deepcopy(model).double(), (x.double(),))
    site = next(s for s in sites(RULE, seen.joint) if "again" in s.name)
    all_values = (
        seen.values(taken(seen.joint, site)),
        *(s.values(s.joint) for s in (seen, float64)),
    )
    first, last = seen.joint.num_forward_outputs, len(seen.joint.results)
    triples = zip(*(values[first:last] for values in all_values), strict=True)
    gradients = [each for each in triples if each != (None, None, None)]
    assert len(gradients) == len(list(model.parameters()))
    for new, old, best in gradients:
        assert new.dtype == torch.bfloat16
        worst = (old.double() - best).abs().max().item()
        assert (new.double() - best).abs().max().item() <= 2 * worst + 1e-3


def test_channels_last() -> None:
    """Results have the strides of what they stand for."""
    model = net(two_stages).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    exact(model, images(9, 3, 6, 6).detach().to(memory_format=torch.channels_last))


def test_graph_of_chunked_convolutions(golden: Golden) -> None:
    joint = joint_of_model(net(two_stages), images(9, 3, 6, 6).detach(), fused=True)
    site = next(s for s in find(joint, RULE.name) if "again" in s.name)
    taken = take(joint, [site])
    golden(f"before\n\n{joint.module.graph}\n\nafter\n\n{taken.module.graph}\n")


# --- the whole way ------------------------------------------------------------------------

OTHERS = ["pool_gradient", "split_gradients", "convolution_workspace"]


def pictures() -> Net:
    """Two large convolutions on few channels, then nothing big any more."""

    def step(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(m.norm(m.first(x)))
        return F.max_pool2d(F.relu(m.other(m.second(h))), 2).square().mean()

    first, second = (nn.Conv2d(n, 16, 3, padding=1, bias=False) for n in (3, 16))
    return Net(step, first=first, norm=nn.BatchNorm2d(16), second=second, other=nn.BatchNorm2d(16))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")  # others compile nets of the same class for other sizes
def test_far_fewer_bytes_and_the_same_step() -> None:
    """Below what whole convolutions need, and no more than was predicted."""
    torch.manual_seed(0)
    model, inputs = pictures(), (torch.randn(16, 3, 32, 32),)
    options: dict[str, Any] = {"variants": [*OTHERS, RULE.name], "solver": "greedy"}
    without = least(model, inputs, variants=OTHERS, solver="greedy")
    budget = without * 85 // 100
    twin = copy.deepcopy(model)
    call = compiled_by_fxremat(model, memory_budget=budget, **options)
    for new, old in zip(observed(model, call, inputs), observed(twin, twin, inputs), strict=True):
        assert_close(new, old, 2e-5)
    report = fxremat.reports()[-1]
    assert any(RULE.name in row.what for row in report.variants)
    assert measured(model, call, inputs) <= report.predicted_peak_bytes <= budget


def test_gradients_that_are_made_of_less_are_not_written() -> None:
    """That of a pool: two groups of loops read it, and each makes it from masks and offsets."""
    joint = joint_of_model(pictures(), torch.randn(16, 3, 32, 32), fused=True)
    rules = [rule for rule in RULES if rule.name in (RULE.name, "pool_gradient", "sign_masks")]
    sites = [s for s in find_sites(joint, rules) if "chunked" not in s.name]
    sites += [s for s in find_sites(joint, rules) if s.name.endswith("convolution late 1")]
    taken = take(joint, sites)
    found = materialise(taken, fused=True)
    assert found.inlined
    assert not found.inlined & found.written
    for node in found.inlined:
        assert taken.role[node] is not Role.FORWARD


# --- image operator -----------------------------------------------------------------------


HOW = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
IMAGE = WIDTH, 6, 6
CONVOLVED = one("aten.convolution.default", Ref(0), Ref(1), None, *HOW, row_shape=IMAGE)
ALONE = dump(Program(1, 1, (CONVOLVED,), (2,)))
"""x, w -> the convolution's result."""


def program() -> str:
    """x, w -> the convolution's result halved, its mean and variance, and a weight's gradient."""
    moments = (
        one(f"aten.var_mean.correction#{place}", Ref(2), [0, 2, 3], correction=1, kind="sum",
            row_shape=(WIDTH,))
        for place in range(2)
    )  # fmt: skip
    steps = (
        CONVOLVED, one("aten.mul.Tensor", Ref(2), 0.5, row_shape=IMAGE), *moments,
        one("aten.convolution_backward.default#1", Ref(3), Ref(0), Ref(1), None, *HOW,
            [False, True, False], kind="sum", row_shape=(WIDTH, 3, 3, 3)),
    )  # fmt: skip
    return dump(Program(1, 1, steps, (3, 4, 5, 6)))


def expected(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """The same of all images at once, in float64."""
    x, w = x.double(), w.double()
    c = F.conv2d(x, w, padding=1)
    variance, mean = torch.var_mean(c, (0, 2, 3))
    gradient = conv2d_weight(x, [*w.shape], c / 2, padding=1)  # type: ignore[no-untyped-call]
    return [c / 2, variance, mean, gradient]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sizes", [(8, 2, 1), (9, 4, 2), (5, 5, 5), (7, 1, 1)])
def test_the_operator(sizes: tuple[int, int, int], fused: bool) -> None:
    """Values, and bytes: what is predicted is enough, and not by more than odds and ends."""
    count, chunk, tile = sizes
    x, w = images(count, 3, 6, 6).detach(), images(WIDTH, 3, 3, 3).detach()
    args = ([x], [w], program(), chunk, tile, fused)
    found = ROWS(*args)
    for made_, best in zip(found, expected(x, w), strict=True):
        assert_close(made_, best, 1e-5)
    too_large = workspace_too_large(*args, measure=Workspaces(x.device).of_call)
    assert 0 <= too_large <= 16 * WIDTH * x.itemsize


def test_results_with_the_channels_last() -> None:
    """Same values; real and fake results lie alike, and take no more bytes than predicted."""
    x, w, text = images(9, 3, 6, 6).detach(), images(WIDTH, 3, 3, 3).detach(), ALONE
    assert places_of_images(text) == {0}
    assert places_of_images(program()) == set(), "what a kernel writes lies densely"
    args, last = ([x], [w], text, 4, 1), {"fused": True, "channels_last": True}
    (plain,), (found,) = ROWS(*args), ROWS(*args, **last)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, plain)
    torch.library.opcheck(ROWS, args, last, test_utils=("test_schema", "test_faketensor"))
    too_large = workspace_too_large(*args, **last, measure=Workspaces(x.device).of_call)
    assert 0 <= too_large <= 16 * WIDTH * x.itemsize


def rows_and(after: Callable[..., Any]) -> fx.GraphModule:
    """A graph of convolutions of a few images at a time, and what is made of them."""
    x, w = images(9, 3, 6, 6).detach(), images(WIDTH, 3, 3, 3).detach()

    def run(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
        return after(ROWS([x], [w], ALONE, 4, 1)[0], v)

    module = make_fx(run, tracing_mode="fake")(x, w, images(4, WIDTH, 3, 3).detach())
    LayOutRows().call(module)
    return module


def again(h: torch.Tensor) -> torch.Tensor:
    """Another call that has these rows."""
    summed = one("aten.sum.dim_IntList", Ref(0), [0], kind="sum", row_shape=IMAGE)
    (total,) = ROWS([h], [], dump(Program(1, 0, (summed,), (1,))), 4, 1)
    assert isinstance(total, torch.Tensor)
    return total


@pytest.mark.parametrize(
    ("after", "is_last"),
    [
        (lambda y, v: F.conv2d(F.relu(y), v), True),
        (lambda y, v: F.relu(y), False),  # no convolution, no such layout
        (lambda y, v: (y, F.conv2d(F.relu(y), v)), False),  # the caller sees it
        (lambda y, v: (again(y), F.conv2d(F.relu(y), v)), False),
        (lambda y, v: (again(F.relu(y)), F.conv2d(F.relu(y), v)), False),
    ],
)
def test_results_lie_as_inductor_lays_out_what_is_around(
    after: Callable[..., Any], is_last: bool
) -> None:
    module = rows_and(after)
    call = next(iter(module.graph.find_nodes(op="call_function", target=ROWS)))
    assert call.kwargs["fused"]
    assert call.kwargs.get("channels_last", False) is is_last
    for user in call.users:
        assert user.meta["val"].is_contiguous(memory_format=torch.channels_last) is is_last


def test_a_loop_writes_over_a_result_that_lies_in_its_order() -> None:
    module = rows_and(lambda y, v: [F.conv2d(F.relu(y), v)])
    (call,) = module.graph.find_nodes(op="call_function", target=ROWS)
    over = []
    for last in (True, False):
        call.kwargs = {**call.kwargs, "channels_last": last}
        source = generate(module, is_backward=False, seen_outputs=1).source
        over.append("# reuse" in source)
    assert over == [True, False]


def test_the_variance_of_values_far_from_zero() -> None:
    """Sums of squares would lose all digits."""
    moment = one("aten.var_mean.correction#0", Ref(0), [0, 2], correction=1, kind="sum",
                 row_shape=(4,))  # fmt: skip
    x = 1000 + 0.01 * torch.randn(32, 4, 8, generator=torch.Generator().manual_seed(5))
    statistics = RunningStatistics(moment, 0, x.device)
    for part in (x[:5], x[5:6], x[6:]):
        statistics.add(part)
    best = x.double().var((0, 2))
    assert (statistics.variance(1).double() - best).abs().max() <= 1e-3 * best.max()
    assert (statistics.mean.double() - x.double().mean((0, 2))).abs().max() <= 1e-3

"""Values saved in fewer bits: an untouched forward, errors as stated, optimal tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.variants import few_bit, lossy_saved
from fxremat.passes.variants.few_bit import optimal_steps
from fxremat.passes.variants.insertion import Site
from fxremat.passes.variants.lossy_saved import RULES
from tests import variants
from tests.conftest import Golden
from tests.examples import examples
from tests.slowness import slow_but

RULE = {rule.name: rule for rule in RULES}
FORMS = {"saved_8bit": 0.05, "saved_4bit": 1.0, "saved_fp8": 0.2, "saved_bf16": 0.05}


def squared(x: torch.Tensor) -> torch.Tensor:
    """The gradient of the input is 2 h cos(x): linear in the one saved value, h."""
    h = x.sin().cumsum(-1)
    return h * h


def errors(joint: JointGraph, *chosen: Site) -> list[float]:
    """Relative errors of the gradients; the forward has to be the same, bit by bit."""
    expected, other = variants.compare(joint, *chosen)
    count = joint.num_forward_outputs
    for one, two in zip(expected[:count], other[:count], strict=True):
        assert not isinstance(one, torch.Tensor) or torch.equal(one, two)
    pairs = zip(variants.gradients(joint, expected), variants.gradients(joint, other), strict=True)
    return [float((a - b).norm() / a.norm().clamp(min=1e-30)) for a, b in pairs]


# --- forms of one value -------------------------------------------------------------------


@cache
def normalised(dtype: torch.dtype) -> JointGraph:
    """Two layers with a layer norm, traced once for all forms."""
    net = nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.LayerNorm(20), nn.Linear(20, 5)).to(dtype)
    return variants.joint_of(net, [variants.leaf(9, 6, dtype=dtype)])


@pytest.mark.parametrize("dtype", variants.DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_near(name: str, dtype: torch.dtype) -> None:
    joint = normalised(dtype)
    with variants.small_values():
        where = variants.sites(RULE[name], joint)
    assert where  # in bf16 too: a layer norm computes in float32
    limit = FORMS[name] + (0.1 if dtype == torch.bfloat16 else 0)
    assert all(max(errors(joint, site)) < limit for site in where)


@pytest.mark.parametrize("fused", [True, False])
def test_all_values_at_once(fused: bool) -> None:
    net = nn.Sequential(nn.Linear(6, 20), nn.SiLU(), nn.LayerNorm(20), nn.Linear(20, 5))
    joint, where = variants.found(RULE["saved_8bit"], net, variants.leaf(9, 6), fused=fused)
    assert len(where) >= 3
    assert max(errors(joint, *where)) < 0.1


@examples(12)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4), st.permutations(range(4)),
    st.sampled_from(list(FORMS)),
)  # fmt: skip
def test_any_shape_and_order(shape: list[int], order: list[int], name: str) -> None:
    x = variants.in_order(shape, order).requires_grad_()
    joint, where = variants.found(RULE[name], lambda x: x.sin().logcumsumexp(0) ** 2, x)
    for site in where:
        variants.with_site(joint, site)  # sizes and strides are compared there
        assert all(torch.isfinite(torch.tensor(errors(joint, site))))


# --- few bits -----------------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[..., Any]] = {
    one.__name__: one
    for one in (
        F.gelu, F.silu, F.tanh, F.sigmoid, F.softplus, F.mish, F.elu, F.selu, F.hardswish,
        F.logsigmoid,
    )
}  # fmt: skip
ACTIVATIONS["gelu_tanh"] = nn.GELU(approximate="tanh")


def activated(activation: Callable[..., Any]) -> Callable[..., Any]:
    """A saved value, an activation, and something that hides whether its result is saved."""
    return lambda x: activation(x.cumsum(-1) * 1.0).cumsum(-1)


OTHERS = {"gelu": torch.bfloat16, "elu": torch.float64}


@pytest.mark.parametrize("name", slow_but(["gelu", "elu", "tanh"], ACTIVATIONS))
def test_any_activation_is_found(name: str) -> None:
    x = variants.leaf(30, 40, dtype=OTHERS.get(name, torch.float32))
    joint, where = variants.found(RULE["few_bit_activation"], activated(ACTIVATIONS[name]), x)
    assert len(where) == few_bit.MOST_BITS
    worst = [max(errors(joint, site)) for site in where]
    assert worst[3] < worst[0]
    assert worst[3] < 0.1


@given(st.integers(1, 15), st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=40))
def test_planes_tell_every_level_apart(boundaries: int, values: list[float]) -> None:
    """Packed, and read again: the level above as many boundaries as there are below a value."""
    x = torch.tensor([*values, math.nan, math.inf, -math.inf])
    edges = torch.linspace(-1.5, 1.5, boundaries).tolist()
    levels = torch.randn(boundaries + 1).tolist()

    def through(add: Callable[..., fx.Node], node: fx.Node) -> fx.Node:
        return few_bit.derivative(add, few_bit.planes_of(add, node, edges), levels, x)

    expected = torch.tensor(levels)[torch.bucketize(x, torch.tensor(edges))]
    assert torch.equal(variants.calls(x, through), expected)


# Integrals of the squared error over [-10, 10] for 1 to 4 bits, as the paper reports them.
PUBLISHED = {"gelu": (0.1410, 0.0406, 0.0119, 0.0031), "silu": (0.2150, 0.0479, 0.0170, 0.0045)}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_tables_are_as_good_as_those_of_the_paper(name: str) -> None:
    with variants.small_values():
        joint = variants.joint_of(activated(ACTIVATIONS[name]), [variants.leaf(30, 40)])
        (product,) = few_bit.products(joint)
    grid = torch.linspace(-few_bit.REACH, few_bit.REACH, few_bit.POINTS, dtype=torch.float64)
    for bits, published in enumerate(PUBLISHED[name], 1):
        error = off(product.table(bits), grid, product(grid)).square().mean() * 2 * few_bit.REACH
        assert float(error) == pytest.approx(published, rel=0.02)


def off(steps: few_bit.Steps, grid: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """How far the steps are from the values at the points of a grid."""
    code = torch.bucketize(grid, torch.tensor(steps.boundaries, dtype=grid.dtype))
    return torch.tensor(steps.levels, dtype=grid.dtype)[code] - values


@given(st.lists(st.floats(-5, 5), min_size=4, max_size=8), st.integers(1, 4))
def test_steps_are_optimal(values: list[float], levels: int) -> None:
    """No way to cut the grid is better."""
    grid = torch.arange(float(len(values)), dtype=torch.float64)
    data = torch.tensor(values, dtype=torch.float64)
    steps = optimal_steps(grid, data, levels)
    best = min(
        sum(float((p - p.mean()).square().sum()) for p in torch.tensor_split(data, cuts))
        for cuts in itertools.combinations(range(1, len(values)), levels - 1)
    )
    assert float(off(steps, grid, data).square().sum()) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("activation", [F.leaky_relu, F.hardsigmoid, F.relu6])
def test_piecewise_constant_derivatives_are_exact(activation: Callable[..., Any]) -> None:
    """Where f is found as a factor at all: as a mask it is a matter of packed_bits."""
    joint, where = variants.found(
        RULE["few_bit_activation"], activated(activation), variants.leaf(30, 40)
    )
    for site in where[1:]:
        assert max(errors(joint, site)) < 1e-6


# --- random matmul ------------------------------------------------------------------------


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A linear layer on a value of the forward, as a module has it or as a plain product."""
    h = x.sin().cumsum(0)
    return h @ w if len(w) == x.shape[1] else F.linear(h, w)


@pytest.mark.parametrize("dtype", variants.DTYPES)
@pytest.mark.parametrize("shape", [(6, 5), (5, 6)])
def test_weight_gradients_are_estimated(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, w = variants.leaf(40, 6, dtype=dtype), variants.leaf(*shape, dtype=dtype)
    joint, where = variants.found(RULE["random_matmul"], linear, x, w)
    assert [s.name.rsplit(":", 1)[1] for s in where] == list(lossy_saved.ROWS)
    for site in where:
        error = sorted(errors(joint, site))
        assert error[0] == 0  # the gradient of the input does not depend on it
        assert 0 < error[1] < 5


def test_estimates_have_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    joint, where = variants.found(
        RULE["random_matmul"], linear, variants.leaf(40, 6), variants.leaf(5, 6)
    )
    exact = variants.results(joint.module, variants.real_inputs(joint))
    estimates = []
    for seed in range(60):
        monkeypatch.setattr(lossy_saved, "seed_of", lambda node, seed=seed: seed)
        other = variants.results(variants.with_site(joint, where[0]), variants.real_inputs(joint))
        estimates.append(variants.gradients(joint, other)[1])
    every = torch.stack(estimates)
    error = (every.mean(0) - variants.gradients(joint, exact)[1]).abs()
    assert bool((error <= 5 * every.std(0) / len(estimates) ** 0.5 + 1e-4).all())


def read_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x.cumsum(0)
    return F.linear(h, w).sum() + (h * h).sum()


SMALL, LARGE = [variants.leaf(5, 6)], [variants.leaf(300, 400)]
LEFT: dict[str, tuple[str, Callable[..., Any], list[torch.Tensor]]] = {
    "inputs": ("saved_8bit", lambda x: x * x, SMALL),
    "results": ("saved_8bit", lambda x: x.cumsum(0).exp(), SMALL),
    "what is compared": ("saved_8bit", lambda x: x.cumsum(0).amax(0), SMALL),
    "what is divided by": ("saved_8bit", lambda x: x.cumsum(0).log(), SMALL),
    "cubes": ("few_bit_activation", lambda x: (x.cumsum(-1) * 1.0) ** 3, SMALL),
    "exponentials": ("few_bit_activation", lambda x: torch.exp(x.cumsum(-1) * 1.0), SMALL),
    "sines": ("few_bit_activation", lambda x: torch.sin(x.cumsum(-1) * 1.0), SMALL),
    "small derivatives that grow": (
        "few_bit_activation", lambda x: x.cumsum(-1).square().mean(), LARGE),
    "masks": ("few_bit_activation", lambda x: F.dropout(x.cumsum(0), 0.4), SMALL),
    "a matrix that others read": (
        "random_matmul", read_twice, [variants.leaf(40, 6), variants.leaf(5, 6)]),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_as_it_is(name: str) -> None:
    rule, function, inputs = LEFT[name]
    assert variants.found(RULE[rule], function, *inputs)[1] == []


def test_small_derivatives_that_do_not_grow() -> None:
    assert variants.found(
        RULE["few_bit_activation"], lambda x: F.gelu(x.cumsum(-1)).mean(), *LARGE
    )[1]


# --- the whole ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_but(["saved_8bit"], RULE))
def test_through_inductor(name: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64, bias=False), nn.GELU(), nn.Linear(64, 16, bias=False))
    x = torch.randn(32, 16)
    net(x).square().sum().backward()
    expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    picked = {"few_bit_activation": slice(3, 4), "random_matmul": slice(0, 1)}
    with variants.small_values(33):
        taken = variants.Taken(RULE[name], lambda where: where[picked.get(name, slice(None))])
        variants.inductor_with(net, taken)(x).square().sum().backward()
    made = [p.grad for p in net.parameters() if p.grad is not None]
    limit = {"random_matmul": 2.0, "saved_4bit": 0.3}.get(name, 0.1)
    for one, two in zip(made, expected, strict=True):
        assert float((one - two).norm() / two.norm()) < limit
    assert taken.bytes_after < taken.bytes_before


def test_a_value_in_four_bits(golden: Golden) -> None:
    joint, where = variants.found(RULE["saved_4bit"], squared, variants.leaf(3, 50))
    golden(variants.shown(joint, *[s for s in where if "cumsum" in s.name]))

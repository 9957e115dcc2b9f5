"""Values rebuilt from outputs: found by data flow, and the gradients that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.variants import insertion
from fxremat.passes.variants.from_outputs import RULES
from fxremat.passes.variants.insertion import Rule, Site
from tests.graphs import batch, linear
from tests.variants import compare, crossing, gradients, joint_of, sites, stand_ins_of

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
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "elu": F.elu,
    "elu 2": lambda x: F.elu(x, 2.0),
    "elu 1/2": lambda x: F.elu(x, 0.5),
    "softplus": F.softplus,
}


def between(middle: Callable[[Tensor], Tensor], width: int = 8) -> nn.Module:
    """An op between two products: the second keeps the op's output."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = linear(width), middle, linear(width)

        def forward(self, x: Tensor) -> Any:
            return self.last(self.middle(self.first(x)))

    return Block()


def found(rule: Rule, middle: Any, rows: int = 6, width: int = 8) -> tuple[JointGraph, list[Site]]:
    """The joint graph of such a block, and the rule's sites."""
    joint = joint_of(between(middle, width), [batch(rows, width).requires_grad_()])
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
    rule, make = NORMS[name]
    joint, (site,) = found(rule, make(8))
    assert_close(joint, site)
    assert not found(PLAIN if rule is SCALED else SCALED, make(8))[1]


@pytest.mark.parametrize("name", [name for name in NORMS if "leaky" in name])
def test_of_an_activated_norm_the_output_alone_is_kept(name: str) -> None:
    rule, make = NORMS[name]
    joint, (site,) = found(rule, make(8))
    after = insertion.take(joint, [site])
    large = {node.meta["val"].shape for node in joint.primals if node.meta["val"].shape[0] == 6}
    crossing_before, crossing_after = (
        [n for n in crossing(each) if n.op == "call_function" and n.meta["val"].shape in large]
        for each in (joint, after)
    )
    assert len(crossing_before) > len(crossing_after) == 1
    assert crossing_after[0].target is torch.ops.aten.where.self


@pytest.mark.parametrize("slope", [0.0, -0.1])
def test_a_slope_that_cannot_be_undone(slope: float) -> None:
    norm = nn.RMSNorm(8, elementwise_affine=False)
    for site in found(PLAIN, activated(norm, slope))[1]:
        assert "where" not in site.name


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    joint, (site,) = found(ACTIVATION, ACTIVATIONS[name])
    assert_close(joint, site)


@pytest.mark.parametrize(
    "middle",
    [torch.tanh, torch.sigmoid, F.relu, F.gelu, F.silu, lambda x: F.leaky_relu(x, -0.1), torch.exp],
)
def test_not_offered(middle: Any) -> None:
    for rule in RULES:
        assert found(rule, middle)[1] == []


def test_layer_norm_without_scale_needs_nothing() -> None:
    """Its derivative reads the output already."""
    assert found(PLAIN, nn.LayerNorm(8, elementwise_affine=False))[1] == []


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

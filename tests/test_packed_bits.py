"""Masks in bits: found where they are, and the same gradients bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from fxremat.passes.joint_graph import JointGraph
from fxremat.passes.nodes import fake
from fxremat.passes.variants import packed_bits
from fxremat.passes.variants.insertion import Rule, Site
from fxremat.passes.variants.packed_bits import RULES
from tests.conftest import Golden
from tests.variants import (
    DTYPES,
    Taken,
    assert_exact,
    calls,
    inductor_with,
    joint_of,
    leaf,
    shown,
    sites,
    small_values,
)

MASKS, SIGNS = RULES


def found(
    rule: Rule, function: Callable[..., Any], *inputs: torch.Tensor, fused: bool = True
) -> tuple[JointGraph, list[Site]]:
    """The joint graph of a step, and the sites of a rule, small ones included."""
    with small_values():
        joint = joint_of(function, inputs, fused)
        return joint, sites(rule, joint)


def masked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``where`` with a mask that the forward makes."""
    return torch.where(x.sin() > y.cos(), x * y, x - y).cos()


FORWARD_MASKS: dict[str, Callable[..., Any]] = {
    "dropout": lambda x, y: F.dropout(x * y, 0.3).sin(),
    "dropout module": nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)),
    "where": masked,
    "masked fill": lambda x, y: (x * y).masked_fill(y.sin() > 0.2, 0.5).sin(),
    "attention": lambda x, y: F.softmax(
        (x @ y.t()).masked_fill(torch.ones(5, 5).tril() == 0, -1e9), -1
    ),
}
LATE_MASKS: dict[str, Callable[..., Any]] = {
    "relu": lambda x, y: F.relu(x * y).sum(),
    "relu module": nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)),
    "hardtanh": lambda x, y: F.hardtanh(x * y) * y,
    "clamp": lambda x, y: (x * y).clamp(-0.1, 0.3) * y,
    "leaky": lambda x, y: F.leaky_relu(x * y) * y,
    "maximum": lambda x, y: torch.maximum(x.sin(), y.cos()) * 2,
}


def with_inputs(function: Any, dtype: torch.dtype) -> tuple[Any, list[torch.Tensor]]:
    """Of this type, with one or two inputs of 5 rows and 6 columns."""
    is_module = isinstance(function, nn.Module)
    return function.to(dtype) if is_module else function, [
        leaf(5, 6, dtype=dtype) for _ in range(1 if is_module else 2)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [n for n in FORWARD_MASKS if n != "attention"])
def test_masks_of_the_forward(name: str, dtype: torch.dtype) -> None:
    function, given = with_inputs(FORWARD_MASKS[name], dtype)
    joint, where = found(MASKS, function, *given)
    assert len(where) == 1
    assert_exact(joint, *where)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(LATE_MASKS))
def test_masks_that_the_backward_computes(name: str, dtype: torch.dtype) -> None:
    function, given = with_inputs(LATE_MASKS[name], dtype)
    joint, where = found(SIGNS, function, *given)
    _, others = found(MASKS, function, *given)
    assert len(where) + len(others) >= 1
    assert_exact(joint, *where)


def test_relu_keeps_no_float() -> None:
    with small_values():
        taken = Taken(SIGNS, list)
        x = leaf(64, 100)
        out = inductor_with(lambda x: F.relu(x.sin()).sum(), taken)(x)
        out.backward()
    assert taken.bytes_before == 4 * 6400
    assert taken.bytes_after == 800


@pytest.mark.parametrize("fused", [True, False])
def test_a_mask_among_several_results(fused: bool) -> None:
    joint, where = found(MASKS, lambda x: F.dropout(x.sin(), 0.4), leaf(7, 9), fused=fused)
    assert len(where) == 1
    assert_exact(joint, *where)


def test_a_constant_mask_and_an_input_are_left() -> None:
    mask = torch.rand(8, 8) > 0.5
    _, where = found(MASKS, lambda x: torch.where(mask, x, 0.0).sin(), leaf(8, 8))
    assert where == []


def test_small_masks_are_left() -> None:
    joint = joint_of(lambda x: F.relu(x.sin()), [leaf(10, 10)])
    assert sites(SIGNS, joint) == []
    joint = joint_of(lambda x: F.relu(x.sin()), [leaf(100, 100)])
    assert len(sites(SIGNS, joint)) == 1


def test_dynamic_sizes_are_left() -> None:
    x = leaf(8, 9)
    torch._dynamo.mark_dynamic(x, 0)
    _, where = found(SIGNS, lambda x: F.relu(x.sin()), x)
    assert where == []


def packed_and_back(add: Callable[..., fx.Node], mask: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Bits of a mask, and the mask made of them."""
    packed = packed_bits.pack(add, mask)
    return packed, packed_bits.unpack(add, packed, fake(mask))


@given(st.lists(st.integers(1, 19), max_size=4), st.permutations(range(4)))
def test_any_shape_and_order(shape: list[int], order: list[int]) -> None:
    """The bytes are as few as rounding up one dimension allows, and the strides the same again."""
    order = [d for d in order if d < len(shape)]
    x = torch.rand([shape[d] for d in order]).permute([order.index(d) for d in range(len(order))])
    x = x > 0.5
    bits, result = calls(x, packed_and_back)
    assert torch.equal(result, x)
    kept = [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]
    assert [s for s, n in zip(result.stride(), x.shape, strict=True) if n > 1] == kept
    assert bits.dtype == torch.uint8
    least = min((x.numel() // n * -(-n // 8) for n in shape), default=1)
    assert least <= bits.numel() <= max(1.25 * x.numel() / 8, least)


def test_channels_last() -> None:
    x = leaf(2, 3, 5, 7).detach().to(memory_format=torch.channels_last).requires_grad_()
    joint, where = found(SIGNS, lambda x: F.relu(x * 2).sum(), x)
    assert len(where) == 1
    assert_exact(joint, *where)


COMPILED: dict[str, Callable[..., Any]] = {
    "sign_masks": lambda x: F.relu(x.sin()),
    "packed_masks": lambda x: (x * 2).masked_fill(x > 0.2, 0.5),
}


@pytest.mark.parametrize(
    "rule", [MASKS, pytest.param(SIGNS, marks=pytest.mark.slow)], ids=lambda rule: rule.name
)
def test_through_inductor(rule: Rule) -> None:
    function = COMPILED[rule.name]
    x = leaf(13, 9)
    function(x).sum().backward()
    expected, x.grad = x.grad, None
    assert expected is not None
    with small_values():
        taken = Taken(rule, list)
        inductor_with(function, taken)(x).sum().backward()
    assert 0 < taken.bytes_after < taken.bytes_before
    torch.testing.assert_close(x.grad, expected)


def test_sign_mask_of_a_relu(golden: Golden) -> None:
    joint, where = found(SIGNS, lambda x: F.relu(x.sin()), leaf(3, 5))
    golden(shown(joint, *where))

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

from fxremat.passes.nodes import fake
from fxremat.passes.variants import packed_bits
from fxremat.passes.variants.insertion import Rule
from fxremat.passes.variants.packed_bits import RULES
from tests import variants
from tests.conftest import Golden

MASKS, SIGNS = RULES


def masked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``where`` with a mask that the forward makes."""
    return torch.where(x.sin() > y.cos(), x * y, x - y).cos()


FORWARD_MASKS: dict[str, Callable[..., Any]] = {
    "dropout": lambda x, y: F.dropout(x * y, 0.3).sin(),
    "dropout module": nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)),
    "where": masked,
    "masked fill": lambda x, y: (x * y).masked_fill(y.sin() > 0.2, 0.5).sin(),
}
LATE_MASKS: dict[str, Callable[..., Any]] = {
    "relu": lambda x, y: F.relu(x * y).sum(),
    "relu module": nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)),
    "hardtanh": lambda x, y: F.hardtanh(x * y) * y,
    "clamp": lambda x, y: (x * y).clamp(-0.1, 0.3) * y,
    "leaky": lambda x, y: F.leaky_relu(x * y) * y,
    "maximum": lambda x, y: torch.maximum(x.sin(), y.cos()) * 2,
}


@pytest.mark.parametrize("dtype", variants.DTYPES)
@pytest.mark.parametrize("name", [*FORWARD_MASKS, *LATE_MASKS])
def test_masks_of_the_forward_and_of_the_backward(name: str, dtype: torch.dtype) -> None:
    function, count = (FORWARD_MASKS | LATE_MASKS)[name], 2
    if isinstance(function, nn.Module):
        function, count = function.to(dtype), 1
    given = [variants.leaf(5, 6, dtype=dtype) for _ in range(count)]
    with variants.small_values():
        joint = variants.joint_of(function, given)
        late, early = variants.sites(SIGNS, joint), variants.sites(MASKS, joint)
    assert len(early) == 1 if name in FORWARD_MASKS else early or late
    variants.assert_exact(joint, *(early if name in FORWARD_MASKS else late))


@pytest.mark.parametrize("fused", [True, False])
def test_a_mask_among_several_results(fused: bool) -> None:
    x = variants.leaf(7, 9)
    joint, where = variants.found(MASKS, lambda x: F.dropout(x.sin(), 0.4), x, fused=fused)
    assert len(where) == 1
    variants.assert_exact(joint, *where)


def test_channels_last() -> None:
    x = variants.leaf(2, 3, 5, 7).detach().to(memory_format=torch.channels_last).requires_grad_()
    joint, where = variants.found(SIGNS, lambda x: F.relu(x * 2).sum(), x)
    assert len(where) == 1
    variants.assert_exact(joint, *where)


def test_a_constant_mask_an_input_and_dynamic_sizes_are_left() -> None:
    mask, x = torch.rand(8, 8) > 0.5, variants.leaf(8, 9)
    fixed = variants.found(MASKS, lambda x: torch.where(mask, x, 0.0).sin(), variants.leaf(8, 8))
    torch._dynamo.mark_dynamic(x, 0)
    dynamic = variants.found(SIGNS, lambda x: F.relu(x.sin()), x)
    assert fixed[1] == dynamic[1] == []


def test_small_masks_are_left() -> None:
    for size, count in ((10, 0), (100, 1)):
        joint = variants.joint_of(lambda x: F.relu(x.sin()), [variants.leaf(size, size)])
        assert len(variants.sites(SIGNS, joint)) == count


def packed_and_back(add: Callable[..., fx.Node], mask: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Bits of a mask, and the mask made of them."""
    packed = packed_bits.pack(add, mask)
    return packed, packed_bits.unpack(add, packed, fake(mask))


@given(st.lists(st.integers(1, 19), max_size=4), st.permutations(range(4)))
def test_any_shape_and_order(shape: list[int], order: list[int]) -> None:
    """The bytes are as few as rounding up one dimension allows, and the strides the same again."""
    x = variants.in_order(shape, order) > 0.5
    bits, result = variants.calls(x, packed_and_back)
    assert torch.equal(result, x)
    assert variants.form(result) == variants.form(x)
    assert bits.dtype == torch.uint8
    least = min((x.numel() // n * -(-n // 8) for n in shape), default=1)
    assert least <= bits.numel() <= max(1.25 * x.numel() / 8, least)


COMPILED: dict[str, Callable[..., Any]] = {
    "sign_masks": lambda x: F.relu(x.sin()).sum(),
    "packed_masks": lambda x: (x * 2).masked_fill(x > 0.2, 0.5),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_through_inductor(rule: Rule) -> None:
    """Of a ReLU no float is kept."""
    function = COMPILED[rule.name]
    x = variants.leaf(64, 100)
    function(x).sum().backward()
    expected, x.grad = x.grad, None
    assert expected is not None
    with variants.small_values():
        taken = variants.Taken(rule, list)
        variants.inductor_with(function, taken)(x).sum().backward()
    assert 0 < taken.bytes_after < taken.bytes_before
    assert rule is MASKS or (taken.bytes_before, taken.bytes_after) == (4 * 6400, 800)
    torch.testing.assert_close(x.grad, expected)


def test_sign_mask_of_a_relu(golden: Golden) -> None:
    joint, where = variants.found(SIGNS, lambda x: F.relu(x.sin()), variants.leaf(3, 5))
    golden(variants.shown(joint, *where))

"""Rooflines and device specs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from fxremat.compat.sizes import size_bound
from fxremat.cost.device import CPU, GPUS, DeviceSpec, device_spec, spec_of_card
from fxremat.cost.roofline import flops_of, roofline_us
from tests.graphs import batch, capture, mlp
from tests.single_calls import ATEN, KEY, call

SPEC = DeviceSpec("test", 1e12, 4e12, 1e9, 3.0, 1e9, 1e8, 20.0)
A, B = torch.empty(8, 16), torch.empty(16, 32)
HOST = torch.device("cpu")


def size(value: Any) -> int:
    return int(value)


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
    assert flops_of(node, size) == flops


def test_the_slower_of_compute_and_traffic_counts() -> None:
    node = call(ATEN.mm.default, A, B)
    few = roofline_us([node], 0, torch.float32, SPEC, size)
    many = roofline_us([node], 10**6, torch.float32, SPEC, size)
    assert few == pytest.approx(3.0 + 1e6 * 8192 / 1e12)
    assert many == pytest.approx(3.0 + 1000.0)
    half = roofline_us([node], 0, torch.bfloat16, SPEC, size)
    assert half == pytest.approx(3.0 + 1e6 * 8192 / 4e12)


def test_dynamic_sizes_are_counted_at_their_bound() -> None:
    x = batch(6, 8)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
    seen = capture(mlp(), [x])
    assert flops_of(seen.calls(ATEN.addmm)[0], size_bound) == 2 * 64 * 8 * 8


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
    us = roofline_us([node], 0, torch.float32, spec["A100"], size) - spec["A100"].launch_us
    assert us == pytest.approx(1e6 * flops_of(node, size) / (0.65 * 156e12))


def test_device_specs() -> None:
    assert device_spec(HOST) is CPU
    assert device_spec(torch.device("meta")).name == "gpu"
    for spec in (*GPUS, CPU):
        assert spec.flops(torch.bfloat16) >= spec.flops(torch.float32) > 0
        assert spec.flops(torch.float16) == spec.flops(torch.bfloat16)

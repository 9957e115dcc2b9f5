"""Times of ops: rooflines, device specs, and times measured by running."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from fxremat import compat
from fxremat.cost import op_times
from fxremat.cost.device import CPU, GPUS, DeviceSpec, device_spec
from fxremat.cost.op_times import call_key, measured_timer, numbers_path
from fxremat.cost.roofline import flops_of, roofline_us
from tests.graphs import batch, capture, mlp
from tests.single_calls import ATEN, KEY, call, item

SPEC = DeviceSpec("test", 1e12, 4e12, 1e9, 3.0, 1e9)
A, B = torch.empty(8, 16), torch.empty(16, 32)
HOST = torch.device("cpu")


def size(value: Any) -> int:
    return int(value)


# --- roofline ------------------------------------------------------------------------------


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
    ],
    ids=["mm", "addmm", "bmm", "sin", "t", "attention"],
)
def test_floating_point_operations(node: fx.Node, flops: float) -> None:
    assert flops_of(node, size) == flops


def test_convolutions_are_counted() -> None:
    image, weight = torch.empty(2, 3, 8, 8), torch.empty(4, 3, 3, 3)
    node = call(ATEN.convolution.default, image, weight, None, [1, 1], [0, 0], [1, 1], False,
                [0, 0], 1)  # fmt: skip
    assert flops_of(node, size) == 2 * 2 * 4 * 36 * 3 * 9


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
    assert flops_of(seen.calls(ATEN.addmm)[0], compat.size_bound) == 2 * 64 * 8 * 8


def test_device_specs() -> None:
    assert device_spec(HOST) is CPU
    assert device_spec(torch.device("meta")).name == "gpu"
    for spec in (*GPUS, CPU):
        assert spec.flops(torch.bfloat16) >= spec.flops(torch.float32) > 0
        assert spec.flops(torch.float16) == spec.flops(torch.bfloat16)


# --- measured ------------------------------------------------------------------------------


class Fallback:
    """A timer that says 1000 and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[fx.Node, ...]] = []

    def __call__(self, nodes: tuple[fx.Node, ...], traffic_bytes: int) -> float:
        self.asked.append(nodes)
        return 1000.0


def timer(directory: Path, fallback: Fallback) -> op_times.Timer:
    return measured_timer(
        fallback, HOST, directory=directory, size=compat.size_bound,
        outside_fake_mode=compat.outside_fake_mode,
    )  # fmt: skip


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls that were really run."""
    seen: list[str] = []
    real = op_times.measure_call

    def spy(node: fx.Node, size: Any, device: torch.device) -> float:
        seen.append(str(node.target))
        return real(node, size, device)

    monkeypatch.setattr(op_times, "measure_call", spy)
    return seen


def test_a_matmul_is_measured_once(tmp_path: Path, runs: list[str]) -> None:
    fallback = Fallback()
    time_of = timer(tmp_path, fallback)
    node = call(ATEN.mm.default, A, B)
    first = time_of((node,), 100)
    assert 0 < first < 1e6
    assert time_of((node,), 100) == first
    assert timer(tmp_path, fallback)((call(ATEN.mm.default, A, B),), 100) == first
    assert len(runs) == 1
    assert fallback.asked == []


def test_other_shapes_strides_and_dtypes_are_other_calls() -> None:
    nodes = [
        call(ATEN.mm.default, A, B),
        call(ATEN.mm.default, A, torch.empty(32, 16).t()),
        call(ATEN.mm.default, A[:4], B),
        call(ATEN.mm.default, A.double(), B.double()),
        call(ATEN.addmm.default, torch.empty(32), A, B),
        call(ATEN.addmm.default, torch.empty(32), A, B, beta=0.5),
    ]
    assert len({call_key(node, size) for node in nodes}) == len(nodes)


def test_loops_are_left_to_the_fallback(tmp_path: Path, runs: list[str]) -> None:
    fallback = Fallback()
    node = call(ATEN.sin.default, A)
    assert timer(tmp_path, fallback)((node,), 100) == 1000.0
    assert fallback.asked == [(node,)]
    assert runs == []


def test_views_and_items_are_free(tmp_path: Path) -> None:
    fallback = Fallback()
    attention = call(ATEN._scaled_dot_product_flash_attention_for_cpu.default, KEY, KEY, KEY)
    turned = call(ATEN.t.default, A)
    time_of = timer(tmp_path, fallback)
    assert time_of((turned, attention, item(attention, 0)), 100) < 1e6
    assert fallback.asked == []


def test_a_loop_beside_a_matmul_costs_its_traffic(tmp_path: Path) -> None:
    fallback = Fallback()
    matmul, loop = call(ATEN.mm.default, A, B), call(ATEN.sin.default, A)
    assert timer(tmp_path, fallback)((matmul, loop), 100) > 1000.0
    assert fallback.asked == [(loop,)]


def test_a_call_that_raises_is_left_to_the_fallback(tmp_path: Path) -> None:
    fallback = Fallback()
    node = call(ATEN.mm.default, A, B)
    node.args[1].meta["val"] = torch.empty(5, 5)  # type: ignore[union-attr]
    assert timer(tmp_path, fallback)((node,), 100) == 1000.0


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"a": "b"}', "\x00\x01"])
def test_a_damaged_file_counts_as_empty(tmp_path: Path, text: str, runs: list[str]) -> None:
    path = numbers_path(tmp_path, HOST)
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    node = call(ATEN.mm.default, A, B)
    assert timer(tmp_path, Fallback())((node,), 100) < 1e6
    assert len(runs) == 1
    data = json.loads(path.read_text(encoding="utf-8"))
    assert list(data) == [call_key(node, size)]


def test_what_another_process_wrote_meanwhile_stays(tmp_path: Path) -> None:
    time_of = timer(tmp_path, Fallback())
    path = numbers_path(tmp_path, HOST)
    path.parent.mkdir(parents=True)
    path.write_text('{"theirs": 5.0}', encoding="utf-8")
    time_of((call(ATEN.mm.default, A, B),), 100)
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["theirs"] == 5.0
    assert len(data) == 2
    assert list(path.parent.iterdir()) == [path]  # nothing half-written is left


def test_a_directory_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way", encoding="utf-8")
    assert timer(blocked, Fallback())((call(ATEN.mm.default, A, B),), 100) < 1e6


def test_fake_tensors_of_a_trace_are_measured_for_real(tmp_path: Path, runs: list[str]) -> None:
    seen = capture(mlp(), [batch(4, 8)])
    nodes = seen.calls(ATEN.addmm)
    with nodes[0].meta["val"].fake_mode:
        time_of = timer(tmp_path, Fallback())
        times = [time_of((n,), 0) for n in nodes]
    assert len(times) == 2
    assert times[0] == times[1]  # the same call twice
    assert len(runs) == 1


def test_files_are_kept_apart_by_device_and_torch_version(tmp_path: Path) -> None:
    path = numbers_path(tmp_path, HOST)
    assert path.parent.parent == tmp_path
    assert path.name.startswith("cpu-")
    assert torch.__version__.split("+")[0] in path.name

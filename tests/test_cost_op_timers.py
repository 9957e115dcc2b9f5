"""Times of ops: library calls, measured; calls made inside others; loops by measured rates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from fxremat.compat.sizes import size_bound
from fxremat.compat.tensors import outside_fake_mode
from fxremat.core.constants import CALL_US
from fxremat.cost import call_times, timing
from fxremat.cost.call_times import KIND, CallTimes, call_key
from fxremat.cost.device import DeviceSpec
from fxremat.cost.number_file import number_path
from fxremat.cost.op_timers import FUNCTIONS, LoopRates, Measured, Roofline
from fxremat.cost.timing import Timing
from fxremat.runtime.chunks.convolutions import CONVOLUTION, CONVOLUTION_BACKWARD
from fxremat.runtime.chunks.operator import ROWS
from tests.graphs import batch, capture, mlp
from tests.loss_program import CLASSES, inputs, program
from tests.single_calls import ATEN, KEY, call, item

A, B = torch.empty(8, 16), torch.empty(16, 32)
HOST = torch.device("cpu")
SPEC = DeviceSpec("test", 1e12, 4e12, 1e9, 3.0, 1e9, 1e8, 20.0)
A_LOOP = 1e9
"""Microseconds: longer than any call here takes, however busy the machine is."""


def loop_rates(call_us: float, bytes_per_s: float, functions: Mapping[str, float]) -> LoopRates:
    """Rates at which all sizes move alike, and other functions cost nothing."""

    def number_of(name: str) -> float:
        if name == "call_us":
            return call_us
        return functions.get(name, 0.0) if name in FUNCTIONS else bytes_per_s

    return LoopRates(number_of)


LOOPS = loop_rates(A_LOOP, 1e9, {})


def timer(directory: Path, loops: LoopRates = LOOPS) -> Measured:
    calls = CallTimes(HOST, directory, size_bound, outside_fake_mode)
    return Measured(calls, loops, Roofline(SPEC, on_cpu=True, fused=True))


def key_of(node: fx.Node) -> str:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return call_key(node.target, args, kwargs, int)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls that were really run."""
    seen: list[str] = []
    real = call_times.measure

    def spy(target: Any, *others: Any) -> Timing | None:
        seen.append(str(target))
        return real(target, *others)

    monkeypatch.setattr(call_times, "measure", spy)
    return seen


@pytest.fixture(autouse=True)
def _undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does: tests of times ask for no true ones."""
    monkeypatch.setattr(timing, "_interruptions", lambda device: 0)


def test_a_matmul_is_measured_once(tmp_path: Path, runs: list[str]) -> None:
    time_of = timer(tmp_path)
    node = call(ATEN.mm.default, A, B)
    first = time_of((node,), 100)
    assert 0 < first < A_LOOP
    assert time_of((node,), 100) == first
    assert timer(tmp_path)((call(ATEN.mm.default, A, B),), 100) == first
    assert len(runs) == 1


def test_other_shapes_strides_and_dtypes_are_other_calls() -> None:
    nodes = [
        call(ATEN.mm.default, A, B),
        call(ATEN.mm.default, A, torch.empty(32, 16).t()),
        call(ATEN.mm.default, A[:4], B),
        call(ATEN.mm.default, A.double(), B.double()),
        call(ATEN.addmm.default, torch.empty(32), A, B),
        call(ATEN.addmm.default, torch.empty(32), A, B, beta=0.5),
    ]
    assert len(set(map(key_of, nodes))) == len(nodes)


def test_views_and_items_are_free(tmp_path: Path) -> None:
    attention = call(ATEN._scaled_dot_product_flash_attention_for_cpu.default, KEY, KEY, KEY)
    turned = call(ATEN.t.default, A)
    assert timer(tmp_path)((turned, attention, item(attention, 0)), 100) < A_LOOP


def test_a_loop_beside_a_matmul_costs_its_traffic(tmp_path: Path) -> None:
    matmul, loop = call(ATEN.mm.default, A, B), call(ATEN.sin.default, A)
    alone = timer(tmp_path)((matmul,), 0)
    both = timer(tmp_path)((matmul, loop), 5000)
    assert both - alone == pytest.approx(A_LOOP + 5.0, abs=1e-3)


def test_a_call_that_raises_is_left_to_the_roofline(tmp_path: Path) -> None:
    node = call(ATEN.mm.default, A, B)
    node.args[1].meta["val"] = B.double()  # type: ignore[union-attr]
    assert timer(tmp_path)((node,), 100) == Roofline(SPEC, on_cpu=True, fused=True)((node,), 100)


# --- calls made inside ---------------------------------------------------------------------


def rows_call(chunk: int) -> fx.Node:
    x, y, w = inputs(64)
    node = fx.Graph().call_function(ROWS, ([x, y], [w.t(), w], program(), chunk, chunk))
    node.meta["val"] = ROWS([x, y], [w.t(), w], program(), chunk, chunk)
    return node


def test_matmuls_of_chunks_are_measured_in_their_sizes(tmp_path: Path, runs: list[str]) -> None:
    time_of = timer(tmp_path, loop_rates(1.0, 1e12, {}))
    node = rows_call(16)
    inside = Roofline(SPEC, on_cpu=True, fused=True).inside(node)
    assert inside.library
    found = time_of((node,), 0)
    assert len(runs) == len({call_key(one.target, one.args, {}, int) for one in inside.library})
    times = [time_of.calls.of_call(one.target, one.args, {}) for one in inside.library]
    library = sum(one.times * (us or 0.0) for one, us in zip(inside.library, times, strict=True))
    assert library > 0
    assert found >= library + inside.calls * CALL_US
    assert all(one.args[0].shape[0] == 16 or one.args[0].shape[1] == 16 for one in inside.library)


def test_functions_inside_chunks_take_their_time(tmp_path: Path) -> None:
    """What a loop computes of its elements, where that takes longer than to move them."""
    node = rows_call(16)
    inside = Roofline(SPEC, on_cpu=True, fused=True).inside(node)
    count = sum(count for name, count in inside.functions if name == "exp")
    assert count == 2 * 64 * CLASSES
    moving, computing = (
        timer(tmp_path, loop_rates(1.0, 1e12, costs))((node,), 0) for costs in ({}, {"exp": 50.0})
    )
    assert computing - moving == pytest.approx(count * 50.0 / 1e3 - inside.bytes / 1e6)


@pytest.mark.parametrize("images", [1, 2, 3])
def test_convolutions_of_some_images_are_measured_so(tmp_path: Path, images: int) -> None:
    x, w = torch.randn(6, 3, 8, 8), torch.randn(4, 3, 3, 3)
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    line = Roofline(SPEC, on_cpu=True, fused=True)
    forward = call(CONVOLUTION, x, w, None, *how, images, "")
    (one,) = line.inside(forward).library
    assert one.target is ATEN.convolution.default
    assert one.args[0].shape[0] == images
    assert one.times == 6 // images
    grad = torch.randn(6, 4, 8, 8)
    mask = [True, True, False]
    backward = call(CONVOLUTION_BACKWARD, grad, x, w, None, *how, mask, images, "")
    (one,) = line.inside(backward).library
    assert [a.shape[0] for a in one.args[:2]] == [images, images]
    time_of = timer(tmp_path, loop_rates(1.0, 1e12, {}))
    us = time_of.calls.of_call(one.target, one.args, {})
    assert us is not None
    assert time_of((backward,), 0) >= one.times * us > 0


def test_another_algorithm_is_left_to_the_roofline(tmp_path: Path, runs: list[str]) -> None:
    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    node = call(CONVOLUTION, x, w, None, *how, 1, "native")
    found = timer(tmp_path)((node,), 100)
    assert found == Roofline(SPEC, on_cpu=True, fused=True)((node,), 100)
    assert runs == []


# --- busy machines -------------------------------------------------------------------------


def test_what_is_always_disturbed_counts_and_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[str]
) -> None:
    counted = iter(range(10**9))
    monkeypatch.setattr(timing, "_interruptions", lambda device: next(counted))
    monkeypatch.setattr(timing, "BUSY_TIMING_S", 1e-3)
    monkeypatch.setattr(timing, "_seconds", lambda call, device: 5e-4)
    node, time_of = call(ATEN.mm.default, A, B), timer(tmp_path)
    assert time_of((node,), 100) == time_of((node,), 100) == pytest.approx(500.0)
    assert len(runs) == 1  # it is not tried for each node anew
    assert not number_path(tmp_path, HOST, KIND).exists()


def test_what_has_no_room_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[str]
) -> None:
    monkeypatch.setattr(call_times, "_available_memory", lambda: 4 * (A.nbytes + B.nbytes) - 1)
    monkeypatch.setattr(call_times, "quickest", lambda *given: pytest.fail("it was run"))
    node = call(ATEN.mm.default, A, B)
    assert timer(tmp_path)((node,), 100) == Roofline(SPEC, on_cpu=True, fused=True)((node,), 100)


# --- files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"a": "b"}', "\x00\x01"])
def test_a_damaged_file_counts_as_empty(tmp_path: Path, text: str, runs: list[str]) -> None:
    path = number_path(tmp_path, HOST, KIND)
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    node = call(ATEN.mm.default, A, B)
    assert timer(tmp_path)((node,), 100) < A_LOOP
    assert len(runs) == 1
    assert list(json.loads(path.read_text(encoding="utf-8"))) == [key_of(node)]


def test_what_another_process_wrote_meanwhile_stays(tmp_path: Path) -> None:
    time_of = timer(tmp_path)
    path = number_path(tmp_path, HOST, KIND)
    path.parent.mkdir(parents=True)
    path.write_text('{"theirs": 5.0}', encoding="utf-8")
    time_of((call(ATEN.mm.default, A, B),), 100)
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["theirs"] == 5.0
    assert len(data) == 2
    assert list(path.parent.iterdir()) == [path]  # nothing half-written is left


def test_fake_tensors_of_a_trace_are_measured_for_real(tmp_path: Path, runs: list[str]) -> None:
    seen = capture(mlp(), [batch(4, 8)])
    nodes = seen.calls(ATEN.addmm)
    with nodes[0].meta["val"].fake_mode:
        time_of = timer(tmp_path)
        times = [time_of((n,), 0) for n in nodes]
    assert len(times) == 2
    assert times[0] == times[1]  # the same call twice
    assert len(runs) == 1

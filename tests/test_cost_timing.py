"""Times of ops: how they are measured, kept in a file, and shared by ops of one kind."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from fxremat.core.constants import CALL_US
from fxremat.cost import call_times, op_timers, timing
from fxremat.cost.call_times import KIND, CallTimes, call_key
from fxremat.cost.device import DeviceSpec
from fxremat.cost.number_file import NumberFile, number_path
from fxremat.runtime.chunks.convolutions import CONVOLUTION, CONVOLUTION_BACKWARD
from fxremat.runtime.chunks.operator import ROWS
from tests.graphs import batch, capture, mlp
from tests.loss_program import CLASSES, inputs, program
from tests.single_calls import ATEN, KEY, call, item

pytestmark = pytest.mark.usefixtures("undisturbed")

HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)
ROOFLINE = op_timers.Roofline(DeviceSpec("test", 1e12, 4e12, 1e9, 3.0, 1e9, 1e8, 20.0), True, True)

# --- the clock ----------------------------------------------------------------------------


class Machine:
    """Every run takes its seconds times how slow the machine is just now."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slowness, self.now, self.reference = 1.0, 0.0, timing.reference_of(HOST, directory)
        self.matmuls = 0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(timing, "_seconds", self.run)

    def run(self, call: Callable[[], object], device: torch.device) -> float:
        is_reference = isinstance(call(), torch.Tensor)
        self.matmuls += is_reference
        took = self.slowness * (1e-3 if is_reference else 7e-3)
        self.now += took
        return took

    def timed(self, after: float = 60.0) -> float:
        self.now += after
        return timing.quickest(lambda: None, HOST, self.reference).us


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize("slowness", [0.8, 1.0, 1.3])
def test_a_machine_that_changes_its_clock_gives_the_same_times(
    machine: Machine, slowness: float, tmp_path: Path
) -> None:
    """Another process goes on from the clock on disk."""
    assert machine.timed() == pytest.approx(7000.0)
    machine.slowness = slowness
    assert machine.timed() == pytest.approx(7000.0)
    machine.reference, machine.slowness = timing.reference_of(HOST, tmp_path), 2 * slowness
    assert machine.timed() == pytest.approx(7000.0)


def test_where_the_clock_is_not_known_times_are_left_as_they_are(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a GPU it never is."""
    waited = count()
    monkeypatch.setattr(timing, "waiting_s", lambda device: next(waited))
    machine.slowness = 1.3
    assert machine.timed() == pytest.approx(1.3 * 7000.0)
    assert timing.reference_of(GPU, tmp_path) is None
    assert isinstance(timing.reference_of(HOST, tmp_path), timing.ReferenceMatmul)


# --- one process on a GPU -----------------------------------------------------------------


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock file of a GPU that need not be here."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    gpu = SimpleNamespace(uuid="a-gpu")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    return tmp_path / "fxremat-timing-a-gpu.lock"


def _is_free(lock: Path) -> bool:
    """Whether another process would get the lock: one file opened twice has two locks."""
    handle = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def test_others_wait_while_a_call_is_timed(lock: Path) -> None:
    """And no longer than that, also where timing fails."""
    with timing.alone_on(GPU):
        assert not _is_free(lock)
    assert _is_free(lock)
    with pytest.raises(RuntimeError), timing.alone_on(GPU):
        raise RuntimeError("out of memory")
    assert _is_free(lock)


# --- number file --------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that has a name, and nothing else."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    return torch.device("cuda")


@pytest.mark.parametrize("setting", ["benchmark", "deterministic", "enabled"])
def test_numbers_of_a_gpu_are_those_of_the_kernels_it_takes(
    setting: str, gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = number_path(tmp_path, gpu, "workspaces")
    assert "H100" in before.name
    cudnn: Any = torch.backends.cudnn
    monkeypatch.setattr(cudnn, setting, not getattr(cudnn, setting))
    after = number_path(tmp_path, gpu, "workspaces")
    assert before != after
    NumberFile(before).add("a call", 1.0)
    assert NumberFile(before).numbers == {"a call": 1.0}
    assert NumberFile(after).numbers == {}


def test_numbers_of_a_cpu_are_those_of_its_threads(tmp_path: Path) -> None:
    host, threads = torch.device("cpu"), torch.get_num_threads()
    before = number_path(tmp_path, host, "workspaces")
    torch.set_num_threads(threads + 1)
    try:
        assert number_path(tmp_path, host, "workspaces") != before
    finally:
        torch.set_num_threads(threads)


# --- op timers ----------------------------------------------------------------------------


A, B = torch.empty(8, 16), torch.empty(16, 32)
A_LOOP = 1e9
"""Microseconds: longer than any call here takes, however busy the machine is."""


def rates_of(
    call_us: float, bytes_per_s: float, functions: Mapping[str, float]
) -> op_timers.LoopRates:
    """Rates at which all sizes move alike, and other functions cost nothing."""

    def number_of(name: str) -> float:
        if name == "call_us":
            return call_us
        return functions.get(name, 0.0) if name in op_timers.FUNCTIONS else bytes_per_s

    return op_timers.LoopRates(number_of)


LOOPS = rates_of(A_LOOP, 1e9, {})


def timer(directory: Path, loops: op_timers.LoopRates = LOOPS) -> op_timers.Measured:
    return op_timers.Measured(CallTimes(HOST, directory), loops, ROOFLINE)


def key_of(node: fx.Node) -> str:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return call_key(node.target, args, kwargs)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls that were really run."""
    seen: list[str] = []
    real = timing.TimedNumbers.number

    def spy(numbers: timing.TimedNumbers, key: str, measure: Callable[[], Any]) -> float | None:
        return real(numbers, key, lambda: seen.append(key) or measure())  # type: ignore[func-returns-value]

    monkeypatch.setattr(timing.TimedNumbers, "number", spy)
    return seen


def test_a_call_finds_nothing_of_its_operands_in_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the caches hold is written before each run, and does not count."""
    ran = list[str]()
    monkeypatch.setattr(torch.Tensor, "fill_", lambda each, _: ran.append(f"fill {len(each)}"))
    timed = CallTimes(HOST, tmp_path).numbers.us(lambda: ran.append("call"), cold=True)
    assert ran[0] == "call", "not counted"
    assert ran[1:3] == [f"fill {2 * timing.largest_cache()}", "call"]
    assert len(ran) % 2 == 1
    assert timed.us < 1e5
    assert timing.largest_cache() >= 2**20


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


def test_a_loop_beside_a_matmul_costs_its_traffic(tmp_path: Path) -> None:
    """Views and items are free."""
    matmul, loop = call(ATEN.mm.default, A, B), call(ATEN.sin.default, A)
    alone = timer(tmp_path)((matmul,), 0)
    both = timer(tmp_path)((matmul, loop), 5000)
    assert both - alone == pytest.approx(A_LOOP + 5.0, abs=1e-3)
    attention = call(ATEN._scaled_dot_product_flash_attention_for_cpu.default, KEY, KEY, KEY)
    turned = call(ATEN.t.default, A)
    assert timer(tmp_path)((turned, attention, item(attention, 0)), 100) < A_LOOP


# --- calls made inside --------------------------------------------------------------------


HOW = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def rows_call(chunk: int) -> fx.Node:
    x, y, w = inputs(64)
    node = fx.Graph().call_function(ROWS, ([x, y], [w.t(), w], program(), chunk, chunk))
    node.meta["val"] = ROWS([x, y], [w.t(), w], program(), chunk, chunk)
    return node


def test_matmuls_of_chunks_are_measured_in_their_sizes(tmp_path: Path, runs: list[str]) -> None:
    time_of = timer(tmp_path, rates_of(1.0, 1e12, {}))
    inside = ROOFLINE.inside(node := rows_call(16))
    assert inside.library
    found = time_of((node,), 0)
    assert len(runs) == len({call_key(one.target, one.args, {}) for one in inside.library})
    times = [time_of.calls.of_call(one.target, one.args, {}) for one in inside.library]
    library = sum(one.times * (us or 0.0) for one, us in zip(inside.library, times, strict=True))
    assert library > 0
    assert found >= library + inside.calls * CALL_US
    assert all(one.args[0].shape[0] == 16 or one.args[0].shape[1] == 16 for one in inside.library)


def test_functions_inside_chunks_take_their_time(tmp_path: Path) -> None:
    """What a loop computes of its elements, where that takes longer than to move them."""
    inside = ROOFLINE.inside(node := rows_call(16))
    count = sum(count for name, count in inside.functions if name == "exp")
    assert count == 2 * 64 * CLASSES
    moving, computing = (
        timer(tmp_path, rates_of(1.0, 1e12, costs))((node,), 0) for costs in ({}, {"exp": 50.0})
    )
    assert computing - moving == pytest.approx(count * 50.0 / 1e3 - inside.bytes / 1e6)


@pytest.mark.parametrize("images", [1, 2, 3])
def test_convolutions_of_some_images_are_measured_so(tmp_path: Path, images: int) -> None:
    x, w = torch.randn(6, 3, 8, 8), torch.randn(4, 3, 3, 3)
    forward = call(CONVOLUTION, x, w, *HOW, images, "")
    (one,) = ROOFLINE.inside(forward).library
    assert one.target is ATEN.convolution.default
    assert one.args[0].shape[0] == images
    assert one.times == 6 // images
    grad = torch.randn(6, 4, 8, 8)
    mask = [True, True, False]
    backward = call(CONVOLUTION_BACKWARD, grad, x, w, *HOW, mask, images, "")
    (one,) = ROOFLINE.inside(backward).library
    assert [a.shape[0] for a in one.args[:2]] == [images, images]
    time_of = timer(tmp_path, rates_of(1.0, 1e12, {}))
    us = time_of.calls.of_call(one.target, one.args, {})
    assert us is not None
    assert time_of((backward,), 0) >= one.times * us > 0


def test_what_cannot_be_timed_is_left_to_the_roofline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[str]
) -> None:
    """Another algorithm, what has no room, and a call that raises, which is the only one to run."""
    node = call(CONVOLUTION, torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), *HOW, 1, "native")
    assert timer(tmp_path)((node,), 100) == ROOFLINE((node,), 100)
    assert runs == []
    node = call(ATEN.mm.default, A, B)
    with monkeypatch.context() as patch:
        patch.setattr(call_times, "_available_memory", lambda: 4 * (A.nbytes + B.nbytes) - 1)
        patch.setattr(timing, "quickest", lambda *given: pytest.fail("it was run"))
        assert timer(tmp_path)((node,), 100) == ROOFLINE((node,), 100)
    node.args[1].meta["val"] = B.double()  # type: ignore[union-attr]
    assert timer(tmp_path)((node,), 100) == ROOFLINE((node,), 100)


# --- files --------------------------------------------------------------------------------


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
    """The same call twice, once."""
    nodes = capture(mlp(), [batch(4, 8)]).calls(ATEN.addmm)
    with nodes[0].meta["val"].fake_mode:
        time_of = timer(tmp_path)
        first, second = (time_of((n,), 0) for n in nodes)
    assert first == second
    assert len(runs) == 1


# --- loop rates ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exponent", "ns"),
    [(2, 0.0), (3.0, 0.0), (-2, 7.0), (0.5, 5.0), (2.5, 100.0), (-0.5, 100.0), (40, 100.0)],
)
def test_a_power_costs_what_inductor_computes_for_it(exponent: float, ns: float) -> None:
    """Small whole ones are products, as the square in every RMSNorm."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    power = graph.call_function(torch.ops.aten.pow.Tensor_Scalar, (x, exponent))
    power.meta["val"] = torch.ones(1000)
    numbers = {"pow": 100.0, "sqrt": 5.0, "div": 7.0, "call_us": 0.0}
    rates = op_timers.LoopRates(
        {op_timers.bandwidth_name(op_timers.TRAFFIC[0]): 1e15, **numbers}.__getitem__
    )
    assert rates.us([power], 8) == pytest.approx(ns, abs=1e-6)


def test_what_is_asked_for_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = op_timers.measured_rates(HOST, tmp_path)
    exp, neg = first.loop_us([("exp", 10**9)], 0), first.loop_us([("neg", 10**9)], 0)
    moved, call = first.move_us(op_timers.TRAFFIC[1]), first.call_us
    assert neg == 0.0
    assert min(exp, moved, call) > 0
    kept = NumberFile(number_path(tmp_path, HOST, op_timers.KIND)).numbers
    sizes = [op_timers.bandwidth_name(size) for size in op_timers.TRAFFIC[:2]]
    assert kept.keys() == {"call_us", "moving_us", "exp", *sizes}

    monkeypatch.setattr(timing, "quickest", mock.Mock(side_effect=AssertionError))
    again = op_timers.measured_rates(HOST, tmp_path)
    assert again.loop_us([("exp", 10**9)], 0) == exp
    assert again.move_us(op_timers.TRAFFIC[1]) == moved
    with pytest.raises(AssertionError):
        again.loop_us([("tanh", 10**9)], 0)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float64], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("name", op_timers.FUNCTIONS)
def test_functions_can_be_timed(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever the dtype is of tensors that nobody gives one."""

    def once(call: Callable[[], object], *_: object) -> timing.Timing:
        call()
        return timing.Timing(50.0, 0.0)

    monkeypatch.setattr(timing, "quickest", once)
    rates = op_timers.measured_rates(HOST, tmp_path)
    assert rates.loop_us([(name, 1)], 0) == 0.0  # no dearer than to move

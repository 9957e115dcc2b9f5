"""When copies run: speeds, order in graphs, and what the engine for CUDA tells its streams."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx_inner
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from benchmarks import copying
from benchmarks.copying import copy_trace
from fxremat.compat.configuration import inductor_config
from fxremat.errors import InvalidOption
from fxremat.runtime import cuda_engine
from fxremat.runtime.copies import (
    measure_copy_speed,
    to_device,
    to_host,
    wait_device,
    wait_host,
)
from tests import host_copies
from tests.host_copies import CPU, DEVICES, LAYOUTS, TENTH, fetched, of, sent

_nothing_held = host_copies.nothing_held

ATEN = torch.ops.aten
KB_PER_S = 1000.0
SLOW = (1000 * KB_PER_S, 1000 * KB_PER_S)

# --- when ---------------------------------------------------------------------------------


def test_waiting_takes_bytes_over_speed() -> None:
    with copying.set_copy_speed(*SLOW, latency_s=0.05), copy_trace() as records:
        fetched(sent(TENTH))
    steps = ["to_host", "wait_host", "to_device", "wait_device"]
    assert [(record.what, record.nbytes) for record in records] == [(s, 100_000) for s in steps]
    for record in of(records, "to_host") + of(records, "to_device"):
        assert 0.15 <= record.end_s - record.start_s < 0.3
    assert sum(r.end_s - r.start_s for r in records if "wait" in r.what) > 0.25


def test_one_copy_at_a_time_in_each_direction_and_both_directions_at_once() -> None:
    there = sent(TENTH)
    with copying.set_copy_speed(*SLOW), copy_trace() as records:
        hosts = [to_host(TENTH) for _ in range(2)]
        backs = [to_device(there, CPU) for _ in range(2)]
        for host, back in zip(hosts, backs, strict=True):
            wait_host(host, TENTH)
            wait_device(back, there)
    for direction in ("to_host", "to_device"):
        first, second = of(records, direction)
        assert first.end_s <= second.start_s
    there_first, back_first = of(records, "to_host")[0], of(records, "to_device")[0]
    assert back_first.start_s < there_first.end_s
    assert there_first.start_s < back_first.end_s


def test_computation_goes_on_meanwhile() -> None:
    start = time.perf_counter()
    with copying.set_copy_speed(latency_s=0.5), copy_trace() as records:
        host = to_host(TENTH)
        time.sleep(0.5)
        wait_host(host, TENTH)
    assert 0.5 <= time.perf_counter() - start < 0.95
    (waited,) = of(records, "wait_host")
    assert waited.end_s - waited.start_s < 0.45


@pytest.mark.parametrize("speed", [(0.0, None), (None, -1.0), (float("nan"), None)])
def test_speeds_that_cannot_be(speed: tuple[float | None, float | None]) -> None:
    with pytest.raises(InvalidOption, match="bytes_per_s"):
        copying.set_copy_speed(*speed)
    with pytest.raises(InvalidOption, match="latency_s"):
        copying.set_copy_speed(latency_s=-1.0)


@pytest.mark.parametrize("device", DEVICES)
def test_measured_speed(device: str) -> None:
    with copying.set_copy_speed(1e6, 4e6):
        to_host_speed, to_device_speed = measure_copy_speed(device)
    if device == "cpu":
        assert 0.5e6 < to_host_speed <= 1e6
        assert 2e6 < to_device_speed <= 4e6
    else:
        assert to_host_speed > 1e8
        assert to_device_speed > 1e8


# --- the operators ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float32", "int64", "transposed", "sliced", "empty"])
def test_operators_are_what_they_say(name: str) -> None:
    """Without the test of opcheck that compares results, which are not there yet."""
    x = LAYOUTS[name]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for operator, arguments in ((to_host, (x,)), (to_device, (x, CPU))):
        torch.library.opcheck(operator, arguments, test_utils=checks, raise_exception=True)
    fetched(sent(x))  # comes after the copies that nobody waits for


def test_without_contents() -> None:
    with FakeTensorMode():
        x = torch.empty(5, 7).t()
        host = to_host(x)
        wait_host(host, x)
        back = to_device(host, torch.device("cuda", 0))
        wait_device(back, host)
    assert (host.device, back.device) == (CPU, torch.device("cuda", 0))
    assert host.stride() == back.stride() == (1, 7)
    assert to_host(torch.empty(2, device="meta")).device == CPU


def test_waits_are_no_dead_code_and_starts_without_use_are() -> None:
    module = graph_of(forward, *inputs())
    calls = [node.target for node in module.graph.nodes]
    module.graph.eliminate_dead_code()
    assert [node.target for node in module.graph.nodes] == calls
    assert all(node.is_impure() for node in module.graph.nodes if node.target is wait_host)
    assert not any(node.is_impure() for node in module.graph.nodes if node.target is to_host)


# --- graphs -------------------------------------------------------------------------------


def forward(a: Any, w: Any) -> tuple[Any, Any]:
    """Sends a value away while a matrix product runs, and hands out the host tensor."""
    m = ATEN.mul.Tensor(a, 2.0)
    host = to_host(m)
    product = ATEN.mm.default(m, w)
    wait_host(host, m)
    return ATEN.mm.default(product, w), host


def backward(product: Any, host: Any, w: Any) -> tuple[Any, Any]:
    """Fetches the host tensor twice, while a matrix product runs."""
    back = to_device(host, CPU)
    again = to_device(host, CPU)
    product = ATEN.mm.default(product, w)
    wait_device(back, host)
    wait_device(again, host)
    return ATEN.add.Tensor(product, back), ATEN.cos.default(again)


def one_graph(a: Any, w: Any) -> tuple[Any]:
    """Both halves."""
    return (backward(*forward(a, w), w)[0],)


def without_wait(a: Any) -> tuple[Any]:
    """Computes with what has not arrived."""
    host = to_host(a)
    wait_host(host, a)
    return (ATEN.mul.Tensor(to_device(host, CPU), 2.0),)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """A transposed matrix and one that shrinks products with it."""
    generator = torch.Generator().manual_seed(0)
    a, w = torch.randn(2, 32, 32, generator=generator)
    return a.t(), w / 8


def expected(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What `backward` after `forward` computes."""
    return 2 * a + 2 * a @ w @ w @ w


def graph_of(function: Callable[..., Any], *arguments: torch.Tensor) -> fx.GraphModule:
    """The function as the graph that a partitioner would hand out."""
    module = fx.symbolic_trace(function)
    FakeTensorProp(module).propagate(*arguments)
    return module


def run_interpreted(module: fx.GraphModule, *arguments: torch.Tensor) -> Any:
    return fx.Interpreter(module).run(*arguments)


def run_inductor(module: fx.GraphModule, *arguments: torch.Tensor) -> Any:
    """Inductor keeps the order of the graph, and nothing on disk."""
    with inductor_config.patch(reorder_for_peak_memory=False, force_disable_caches=True):
        compiled: Any = compile_fx_inner(module, list(arguments))
    return compiled(list(arguments))


RUNNERS = {"interpreted": run_interpreted, "inductor": run_inductor}
Run = Callable[..., Any]


@pytest.fixture(params=RUNNERS)
def run(request: pytest.FixtureRequest) -> Run:
    return RUNNERS[request.param]


def test_in_one_graph(run: Run) -> None:
    """Copies run beside the computation, in the order of the graph."""
    a, w = inputs()
    module = graph_of(one_graph, a, w)
    with copying.set_copy_speed(latency_s=0.02), copy_trace() as records:
        (result,) = run(module, a, w)
    torch.testing.assert_close(result, expected(a, w))
    there, back = of(records, "to_host")[0], of(records, "to_device")[0]
    waited = of(records, "wait_host")[0]
    assert there.start_s < waited.end_s
    assert there.end_s <= back.start_s


def test_across_two_graphs(run: Run) -> None:
    a, w = inputs()
    with copying.set_copy_speed(latency_s=0.02):
        product, host = run(graph_of(forward, a, w), a, w)
        assert torch.equal(host, 2 * a)
        assert host.stride() == a.stride()
        result, cosine = run(graph_of(backward, product, host, w), product, host, w)
    torch.testing.assert_close(result, expected(a, w))
    torch.testing.assert_close(cosine, (2 * a).cos())


def test_a_missing_wait_is_seen(run: Run) -> None:
    a, _ = inputs()
    with copying.set_copy_speed(latency_s=0.3):
        (result,) = run(graph_of(without_wait, a), a)
        assert result.isnan().all()
    fetched(sent(a))  # comes after the copy that nobody waits for


# --- the engine for CUDA, against streams that only keep a log ----------------------------


class LogEvent:
    """An event; ``query`` says yes once ``reached`` is set. A millisecond lies between any two."""

    reached = False
    made = 0

    def __init__(self, enable_timing: bool = False) -> None:
        LogEvent.made += 1
        self.timed = enable_timing
        self.milliseconds = LogEvent.made

    def query(self) -> bool:
        return LogEvent.reached

    def synchronize(self) -> None:
        assert self.timed

    def elapsed_time(self, other: LogEvent) -> float:
        assert self.timed
        assert other.timed
        return float(other.milliseconds - self.milliseconds)


class LogStream:
    def __init__(self, name: str, log: list[Any]) -> None:
        self.name = name
        self.log = log
        self.device = CPU

    def record_event(self, event: LogEvent | None = None) -> LogEvent:
        event = event or LogEvent()
        self.log.append((self.name, "record", event))
        return event

    def wait_event(self, event: LogEvent) -> None:
        self.log.append((self.name, "wait", event))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What an engine for CUDA tells its streams; they are named in the order they are made."""
    entries: list[Any] = []
    names = iter(["out", "in"])
    computing = LogStream("compute", entries)

    @contextmanager
    def inside(stream: LogStream) -> Iterator[None]:
        entries.append((stream.name, "copy", None))
        yield

    monkeypatch.setattr(LogEvent, "reached", False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: LogStream(next(names), entries))
    monkeypatch.setattr(torch.cuda, "Event", LogEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(
        cuda_engine, "_pinned_like", lambda x: torch.empty_strided(x.size(), x.stride())
    )
    return entries


def test_cuda_orders_by_events(log: list[Any]) -> None:
    engine = cuda_engine.CudaEngine()
    x = torch.randn(5, 7).t()
    host = engine.start_to_host(x)
    engine.wait("wait_host", host, x.device)
    back = engine.start_to_device(host, CPU)
    engine.wait("wait_device", back, CPU)
    assert torch.equal(back, x)
    assert back.stride() == host.stride() == x.stride()
    assert [(stream, what) for stream, what, _ in log] == [
        ("compute", "record"), ("out", "wait"), ("out", "copy"), ("out", "record"),
        ("compute", "wait"), ("compute", "record"), ("in", "wait"), ("in", "wait"),
        ("in", "copy"), ("in", "record"), ("compute", "wait"),
    ]  # fmt: skip
    events = [event for *_, event in log]
    assert events[0] is events[1]
    assert events[3] is events[4] is events[7]  # the fetch waits for what filled host
    assert events[5] is events[6]
    assert events[9] is events[10]
    engine.wait("wait_device", back, CPU)
    assert len(log) == len(events)  # it has ended: nothing to order


def test_cuda_holds_what_nobody_waited_for_until_it_is_copied(log: list[Any]) -> None:
    engine = cuda_engine.CudaEngine()
    host = engine.start_to_host(torch.zeros(3))
    engine.wait("wait_host", host, CPU)
    storage = weakref.ref(engine.start_to_device(host, CPU).untyped_storage())
    engine.start_to_device(host, CPU)
    assert storage() is not None
    LogEvent.reached = True
    engine.start_to_device(host, CPU)
    assert storage() is None


def test_cuda_records_times_of_the_device(log: list[Any]) -> None:
    engine = cuda_engine.CudaEngine()
    before = time.perf_counter()
    with copy_trace() as records:
        host = engine.start_to_host(torch.zeros(3))
        engine.wait("wait_host", host, CPU)
        assert not records
    copied, waited = records
    assert [(one.what, one.nbytes) for one in records] == [("to_host", 12), ("wait_host", 12)]
    assert before < copied.start_s < copied.end_s < waited.start_s < waited.end_s < before + 1
    assert copied.end_s - copied.start_s == pytest.approx(0.001)


@pytest.mark.gpu
def test_cuda_copies_beside_the_computation() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    fetched(sent(x), "cuda")
    torch.mm(x, x)
    with copy_trace() as records:
        host = to_host(x)
        for _ in range(20):
            torch.mm(x, x)
        wait_host(host, x)
    (copied,), (waited,) = of(records, "to_host"), of(records, "wait_host")
    assert copied.end_s - copied.start_s > 0
    assert copied.start_s <= waited.end_s
    torch.cuda.synchronize()
    assert torch.equal(host, x.cpu())

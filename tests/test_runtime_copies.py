"""Copies beside the computation: values, order, time, memory, and compiled graphs with them.

The copies are slow here on purpose; whatever does not wait for them computes with garbage.
"""

from __future__ import annotations

import gc
import os
import signal
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

from fxremat import runtime
from fxremat.compat import inductor_config
from fxremat.cost.peak import measure_peak
from fxremat.errors import HostMemoryExceeded, InvalidOption
from fxremat.runtime import dense_layout, host_memory
from fxremat.runtime.copies import cpu_engine, cuda_engine, weights
from fxremat.runtime.copies.operators import to_device, to_host, wait_device, wait_host
from fxremat.runtime.copy_engine import Engine, Pending
from fxremat.runtime.copy_trace import CopyRecord

CPU = torch.device("cpu")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
ATEN = torch.ops.aten
KB_PER_S = 1000.0
TENTH = torch.zeros(25_000)  # 100 kB: a tenth of a second at 1 MB/s
SLOW = (1000 * KB_PER_S, 1000 * KB_PER_S)

RANDOM = torch.Generator().manual_seed(0)


def random(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers that take none from other tests."""
    return torch.randn(*size, dtype=dtype, generator=RANDOM)


LAYOUTS: dict[str, torch.Tensor] = {
    "float32": random(5, 7),
    "bfloat16": random(5, 7).bfloat16(),
    "int64": torch.arange(35).view(5, 7),
    "bool": torch.arange(35).view(5, 7) % 3 == 0,
    "complex": random(5, 7, dtype=torch.complex64),
    "conjugated": random(5, 7, dtype=torch.complex64).conj(),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(4, 0, 3),
    "transposed": random(5, 7).t(),
    "permuted": random(2, 3, 4, 5).permute(0, 3, 1, 2),
    "sliced": random(5, 7)[1:4, 2::2],
    "expanded": random(5, 1).expand(5, 7),
}


@pytest.fixture(autouse=True)
def _nothing_held(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test leaves host memory held by copies, and none counts what others left."""
    own = host_memory.HostMemory()
    for module in (host_memory, cpu_engine, cuda_engine, weights):
        monkeypatch.setattr(module, "HOST_MEMORY", own)
    yield
    if runtime.host_bytes().now_bytes:
        gc.collect()  # what pytest keeps of an error that was expected
    assert runtime.host_bytes().now_bytes == 0


def sent(x: torch.Tensor) -> torch.Tensor:
    """``x`` in host memory, arrived."""
    host: torch.Tensor = to_host(x)
    wait_host(host, x)
    return host


def fetched(host: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    """``host`` on the device, arrived."""
    x: torch.Tensor = to_device(host, torch.device(device))
    wait_device(x, host)
    return x


def of(records: list[CopyRecord], what: str) -> list[CopyRecord]:
    return [record for record in records if record.what == what]


# --- what arrives ------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trip(name: str, device: str) -> None:
    x = LAYOUTS[name] if device == "cpu" else LAYOUTS[name].to(device)
    with runtime.set_copy_speed(latency_s=0.002):
        host = sent(x)
        back = fetched(host, device)
    assert host.device == CPU
    assert back.device == x.device
    for arrived in (host, back):
        assert arrived.dtype == x.dtype
        assert arrived.stride() == x.stride()
        assert arrived.shape == x.shape
    assert torch.equal(back, x)


def test_extent_covers_gaps() -> None:
    assert dense_layout.extent(LAYOUTS["transposed"]) == 35
    assert dense_layout.extent(LAYOUTS["sliced"]) == 2 * 7 + 2 * 2 + 1
    assert dense_layout.extent(LAYOUTS["expanded"]) == 5
    assert dense_layout.extent(LAYOUTS["empty"]) == 0
    assert dense_layout.extent_bytes(LAYOUTS["bfloat16"]) == 70


def test_contents_are_not_there_before_the_wait() -> None:
    with runtime.set_copy_speed(latency_s=0.05):
        for name in ("float32", "bfloat16", "complex", "transposed"):
            x = LAYOUTS[name]
            host = to_host(x)
            assert host.isnan().all()
            wait_host(host, x)
            back = to_device(host, CPU)
            assert back.isnan().all()
            wait_device(back, host)
        whole = to_host(LAYOUTS["int64"])
        assert (whole == -1).all()
        truth = to_host(LAYOUTS["bool"])
        assert truth.all()
        wait_host(whole, LAYOUTS["int64"])
        wait_host(truth, LAYOUTS["bool"])


@pytest.mark.parametrize("device", DEVICES)
def test_a_host_tensor_can_be_fetched_again(device: str) -> None:
    x = torch.randn(10, device=device)
    host = sent(x)
    first, second = to_device(host, x.device), to_device(host, x.device)
    wait_device(second, host)
    wait_device(first, host)
    assert torch.equal(first, x)
    assert torch.equal(second, x)
    assert torch.equal(fetched(host, device), x)


@pytest.mark.parametrize("device", DEVICES)
def test_a_fetch_comes_after_the_copy_to_host_that_nobody_waited_for(device: str) -> None:
    x = torch.randn(1000, device=device)
    with runtime.set_copy_speed(latency_s=0.02):
        host = to_host(x)
        back = to_device(host, x.device)
        wait_device(back, host)
    assert torch.equal(back, x)
    wait_host(host, x)


def test_only_plain_tensors_and_known_devices() -> None:
    with pytest.raises(ValueError, match="only strided"):
        to_host(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="'meta'; there are cpu, cuda"):
        to_device(torch.zeros(3), torch.device("meta"))


# --- when --------------------------------------------------------------------------------


def test_waiting_takes_bytes_over_speed() -> None:
    with runtime.set_copy_speed(*SLOW, latency_s=0.05), runtime.copy_trace() as records:
        fetched(sent(TENTH))
    assert [record.what for record in records] == [
        "to_host",
        "wait_host",
        "to_device",
        "wait_device",
    ]
    for record in records:
        assert record.nbytes == 100_000
    for record in of(records, "to_host") + of(records, "to_device"):
        assert 0.15 <= record.end_s - record.start_s < 0.3
    assert sum(r.end_s - r.start_s for r in records if "wait" in r.what) > 0.25


def test_one_copy_at_a_time_in_each_direction_and_both_directions_at_once() -> None:
    there = sent(TENTH)
    with runtime.set_copy_speed(*SLOW), runtime.copy_trace() as records:
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


def test_directions_have_speeds_of_their_own() -> None:
    with runtime.set_copy_speed(1000 * KB_PER_S, None), runtime.copy_trace() as records:
        fetched(sent(TENTH))
    there, back = of(records, "to_host")[0], of(records, "to_device")[0]
    assert there.end_s - there.start_s >= 0.1
    assert back.end_s - back.start_s < 0.1


def test_computation_goes_on_meanwhile() -> None:
    start = time.perf_counter()
    with runtime.set_copy_speed(latency_s=0.5), runtime.copy_trace() as records:
        host = to_host(TENTH)
        time.sleep(0.5)
        wait_host(host, TENTH)
    assert 0.5 <= time.perf_counter() - start < 0.95
    (waited,) = of(records, "wait_host")
    assert waited.end_s - waited.start_s < 0.45


def test_speed_set_for_good_and_for_a_while() -> None:
    try:
        runtime.set_copy_speed(latency_s=0.01)
        with runtime.set_copy_speed(1.0, 2.0, latency_s=3.0):
            assert cpu_engine.ENGINE.speeds["to_host"] == cpu_engine.CopySpeed(1.0, 3.0)
            assert cpu_engine.ENGINE.speeds["to_device"].seconds(4) == 5.0
        assert cpu_engine.ENGINE.speeds["to_host"].seconds(4) == 0.01
    finally:
        runtime.set_copy_speed()
    assert cpu_engine.ENGINE.speeds["to_host"].seconds(10**12) == 0.0


@pytest.mark.parametrize("speed", [(0.0, None), (None, -1.0), (float("nan"), None)])
def test_speeds_that_cannot_be(speed: tuple[float | None, float | None]) -> None:
    with pytest.raises(InvalidOption, match="bytes_per_s"):
        runtime.set_copy_speed(*speed)
    with pytest.raises(InvalidOption, match="latency_s"):
        runtime.set_copy_speed(latency_s=-1.0)


@pytest.mark.parametrize("device", DEVICES)
def test_measured_speed(device: str) -> None:
    with runtime.set_copy_speed(1e6, 4e6):
        to_host_speed, to_device_speed = runtime.measure_copy_speed(device)
    if device == "cpu":
        assert 0.5e6 < to_host_speed <= 1e6
        assert 2e6 < to_device_speed <= 4e6
    else:
        assert to_host_speed > 1e8
        assert to_device_speed > 1e8


# --- memory ------------------------------------------------------------------------------


def test_host_memory_is_not_memory_of_the_device() -> None:
    """x, then x and y, then y and what is fetched: never three tensors."""

    def step() -> None:
        x = torch.ones(50_000)
        host = sent(x)
        del x
        y = torch.ones(50_000)
        torch.add(y, fetched(host), out=y)

    assert measure_peak(step).above_start_bytes == 400_000
    assert runtime.host_bytes().peak_bytes == 200_000


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_copied_is_freed_after_the_wait(device: str) -> None:
    x = torch.ones(1000, device=device)
    storage = weakref.ref(x.untyped_storage())
    host = to_host(x)
    wait_host(host, x)
    assert storage() is not None
    del x
    assert storage() is None
    back = fetched(host, device)
    there = weakref.ref(host.untyped_storage())
    del host
    assert there() is None
    assert back.sum() == 1000


def test_account_of_host_memory() -> None:
    first = sent(torch.zeros(100))
    second = sent(torch.zeros(50, dtype=torch.bfloat16))
    assert runtime.host_bytes() == runtime.HostBytes(500, 500)
    view = first[3:]
    del first
    assert runtime.host_bytes().now_bytes == 500
    del view
    assert runtime.host_bytes() == runtime.HostBytes(100, 500)
    runtime.reset_host_peak()
    assert runtime.host_bytes() == runtime.HostBytes(100, 100)
    del second


class Offload(torch.autograd.Function):
    """Saves its input in host memory, as a transformed graph does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(sent(x))
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * fetched(ctx.saved_tensors[0]).cos()


def offload(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = Offload.apply(x)  # type: ignore[no-untyped-call]
    return y


def test_a_backward_that_runs_and_one_that_does_not() -> None:
    x = torch.randn(100, requires_grad=True)
    y = offload(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, x.detach().cos())
    assert runtime.host_bytes().now_bytes == 0
    y = offload(x)
    assert runtime.host_bytes().now_bytes == 400
    del y
    assert runtime.host_bytes() == runtime.HostBytes(0, 400)


@pytest.mark.parametrize("device", DEVICES)
def test_cap(device: str) -> None:
    x = torch.zeros(100, device=device)
    with runtime.set_host_memory_cap(1000):
        held = [sent(x), sent(x)]
        with pytest.raises(HostMemoryExceeded, match=r"400 bytes.*800 bytes.*1,000 bytes") as error:
            to_host(x)
        assert (error.value.wanted_bytes, error.value.held_bytes) == (400, 800)
        assert error.value.cap_bytes == 1000
        held.pop()
        held.append(sent(x))
        assert runtime.host_bytes() == runtime.HostBytes(800, 800)
    held.append(sent(x))
    with pytest.raises(InvalidOption):
        runtime.set_host_memory_cap(-1)


def test_an_allocation_that_fails_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(cpu_engine, "_mapped_like", refuse)
    with pytest.raises(MemoryError):
        to_host(TENTH)
    assert runtime.host_bytes().now_bytes == 0


# --- what goes wrong ---------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_waiting_for_nothing(device: str) -> None:
    x = torch.zeros(3, device=device)
    with pytest.raises(RuntimeError, match="wait_device: no copy into this tensor"):
        wait_device(x, torch.zeros(3))
    with pytest.raises(RuntimeError, match="started by fxremat::to_host"):
        wait_host(torch.zeros(3), x)


@pytest.mark.parametrize("device", DEVICES)
def test_waiting_again(device: str) -> None:
    """A backward that runs twice, for retain_graph, waits twice."""
    x = torch.ones(3, device=device)
    host = sent(x)
    wait_host(host, x)
    back = to_device(host, x.device)
    wait_device(back, host)
    wait_device(back, host)
    assert torch.equal(back, x)


def test_a_copy_that_fails_says_so_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("broken wire")

    x = torch.zeros(3)
    storage = weakref.ref(x.untyped_storage())
    with monkeypatch.context() as broken:
        broken.setattr(cpu_engine, "_copy_bytes", fail)
        host = to_host(x)
        with pytest.raises(RuntimeError, match=r"copy to_host failed.*broken wire"):
            wait_host(host, x)
        with pytest.raises(RuntimeError, match="no copy"):
            wait_host(host, x)
        unwaited = to_host(x)
        back = to_device(unwaited, CPU)
        with pytest.raises(RuntimeError, match=r"copy to_device failed.*broken wire"):
            wait_device(back, unwaited)
    del host, unwaited, back
    assert torch.equal(fetched(sent(x)), x)
    del x
    assert storage() is None


def test_tensors_that_died_without_a_wait_are_freed() -> None:
    host = sent(TENTH)
    storage = weakref.ref(to_device(host, CPU).untyped_storage())
    fetched(host)  # comes after the copy that nobody waits for
    assert storage() is None


def test_a_dead_tensor_is_not_mistaken_for_a_new_one() -> None:
    memory = bytearray(40)
    pending: Pending[str] = Pending()
    dead = torch.frombuffer(memory, dtype=torch.uint8)
    address = dead.data_ptr()
    pending.add(dead, "transfer")
    assert pending.get(dead[3:].view(37, 1)) == "transfer"
    del dead
    alive = torch.frombuffer(memory, dtype=torch.uint8)
    assert alive.data_ptr() == address
    assert pending.get(alive) is None


def test_a_fork_loses_copies_but_hangs_nowhere() -> None:
    x = torch.randn(100)
    with runtime.set_copy_speed(latency_s=0.3):
        host = to_host(x)
        child = os.fork()
        if child == 0:
            os._exit(_in_the_child(host, x))
        wait_host(host, x)
    assert torch.equal(host, x)
    assert _exit_code(child) == 0


def _in_the_child(host: torch.Tensor, x: torch.Tensor) -> int:
    """0 if the copy of the parent is unknown here, and new ones work."""
    try:
        wait_host(host, x)
    except RuntimeError:
        return 0 if torch.equal(fetched(sent(x)), x) else 2
    except BaseException:
        return 3
    return 1


def _exit_code(child: int, timeout_s: float = 20.0) -> int:
    """The child's; it is killed if it takes too long."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# --- the operators -----------------------------------------------------------------------


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
    module = graph_of(one_graph, *inputs())
    calls = [node.target for node in module.graph.nodes]
    module.graph.eliminate_dead_code()
    assert [node.target for node in module.graph.nodes] == calls
    assert all(node.is_impure() for node in module.graph.nodes if node.target is wait_host)
    assert not any(node.is_impure() for node in module.graph.nodes if node.target is to_host)


# --- graphs ------------------------------------------------------------------------------


def one_graph(a: Any, w: Any) -> tuple[Any]:
    """Sends a value away while three matrix products run, and gets it back."""
    m = ATEN.mul.Tensor(a, 2.0)
    host = to_host(m)
    product = ATEN.mm.default(m, w)
    wait_host(host, m)
    product = ATEN.mm.default(product, w)
    back = to_device(host, CPU)
    product = ATEN.mm.default(product, w)
    wait_device(back, host)
    return (ATEN.add.Tensor(product, back),)


def forward(a: Any, w: Any) -> tuple[Any, Any]:
    """The first half of `one_graph`, which hands out the host tensor."""
    m = ATEN.mul.Tensor(a, 2.0)
    host = to_host(m)
    product = ATEN.mm.default(m, w)
    wait_host(host, m)
    return ATEN.mm.default(product, w), host


def backward(product: Any, host: Any, w: Any) -> tuple[Any, Any]:
    """The second half, which fetches the host tensor twice."""
    back = to_device(host, CPU)
    again = to_device(host, CPU)
    product = ATEN.mm.default(product, w)
    wait_device(back, host)
    wait_device(again, host)
    return ATEN.add.Tensor(product, back), ATEN.cos.default(again)


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
    """What `one_graph`, and `backward` after `forward`, compute."""
    return 2 * a + 2 * a @ w @ w @ w


def graph_of(function: Callable[..., Any], *arguments: torch.Tensor) -> fx.GraphModule:
    """The function as the graph that a partitioner would hand out."""
    module = fx.symbolic_trace(function)
    FakeTensorProp(module).propagate(*arguments)
    return module


@contextmanager
def inductor() -> Iterator[None]:
    """Inductor keeps the order of the graph, and nothing on disk."""
    with inductor_config.patch(reorder_for_peak_memory=False, force_disable_caches=True):
        yield


def run_interpreted(module: fx.GraphModule, *arguments: torch.Tensor) -> Any:
    return fx.Interpreter(module).run(*arguments)


def run_inductor(module: fx.GraphModule, *arguments: torch.Tensor) -> Any:
    with inductor():
        compiled: Any = compile_fx_inner(module, list(arguments))
    return compiled(list(arguments))


RUNNERS = {"interpreted": run_interpreted, "inductor": run_inductor}
Run = Callable[..., Any]


@pytest.fixture(params=RUNNERS)
def run(request: pytest.FixtureRequest) -> Run:
    return RUNNERS[request.param]


def test_in_one_graph(run: Run) -> None:
    a, w = inputs()
    module = graph_of(one_graph, a, w)
    with runtime.set_copy_speed(latency_s=0.02):
        (result,) = run(module, a, w)
    torch.testing.assert_close(result, expected(a, w))


def test_across_two_graphs(run: Run) -> None:
    a, w = inputs()
    with runtime.set_copy_speed(latency_s=0.02):
        product, host = run(graph_of(forward, a, w), a, w)
        assert torch.equal(host, 2 * a)
        assert host.stride() == a.stride()
        result, cosine = run(graph_of(backward, product, host, w), product, host, w)
    torch.testing.assert_close(result, expected(a, w))
    torch.testing.assert_close(cosine, (2 * a).cos())


def test_a_missing_wait_is_seen(run: Run) -> None:
    a, _ = inputs()
    with runtime.set_copy_speed(latency_s=0.3):
        (result,) = run(graph_of(without_wait, a), a)
        assert result.isnan().all()
    fetched(sent(a))  # comes after the copy that nobody waits for


def test_inductor_keeps_the_order_and_overlaps() -> None:
    a, w = inputs()
    module = graph_of(one_graph, a, w)
    with runtime.set_copy_speed(latency_s=0.02), runtime.copy_trace() as records:
        run_inductor(module, a, w)
    there, back = of(records, "to_host")[0], of(records, "to_device")[0]
    waited = of(records, "wait_host")[0]
    assert there.start_s < waited.end_s
    assert there.end_s <= back.start_s


# --- the engine for CUDA, against streams that only keep a log ---------------------------


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
    """A stream that writes down what it is told."""

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
    engine: Engine = cuda_engine.CudaEngine()
    x = torch.randn(5, 7).t()
    host = engine.start_to_host(x)
    engine.wait("wait_host", host, x.device)
    back = engine.start_to_device(host, CPU)
    engine.wait("wait_device", back, CPU)
    assert torch.equal(back, x)
    assert back.stride() == host.stride() == x.stride()
    assert [(stream, what) for stream, what, _ in log] == [
        ("compute", "record"),
        ("out", "wait"),
        ("out", "copy"),
        ("out", "record"),
        ("compute", "wait"),
        ("compute", "record"),
        ("in", "wait"),
        ("in", "wait"),
        ("in", "copy"),
        ("in", "record"),
        ("compute", "wait"),
    ]
    events = [event for *_, event in log]
    assert events[0] is events[1]
    assert events[3] is events[4] is events[7]  # the fetch waits for what filled host
    assert events[5] is events[6]
    assert events[9] is events[10]
    engine.wait("wait_device", back, CPU)
    assert len(log) == len(events)  # it has ended: nothing to order


def test_cuda_holds_what_nobody_waited_for_until_it_is_copied(log: list[Any]) -> None:
    engine: Engine = cuda_engine.CudaEngine()
    host = engine.start_to_host(torch.zeros(3))
    engine.wait("wait_host", host, CPU)
    storage = weakref.ref(engine.start_to_device(host, CPU).untyped_storage())
    engine.start_to_device(host, CPU)
    assert storage() is not None
    LogEvent.reached = True
    engine.start_to_device(host, CPU)
    assert storage() is None


def test_cuda_records_times_of_the_device(log: list[Any]) -> None:
    engine: Engine = cuda_engine.CudaEngine()
    before = time.perf_counter()
    with runtime.copy_trace() as records:
        host = engine.start_to_host(torch.zeros(3))
        engine.wait("wait_host", host, CPU)
        assert not records
    copied, waited = records
    assert (copied.what, copied.nbytes, waited.what, waited.nbytes) == (
        "to_host",
        12,
        "wait_host",
        12,
    )
    assert before < copied.start_s < copied.end_s < waited.start_s < waited.end_s < before + 1
    assert copied.end_s - copied.start_s == pytest.approx(0.001)


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_cuda_copies_beside_the_computation() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    fetched(sent(x), "cuda")
    torch.mm(x, x)
    with runtime.copy_trace() as records:
        host = to_host(x)
        for _ in range(20):
            torch.mm(x, x)
        wait_host(host, x)
    (copied,), (waited,) = of(records, "to_host"), of(records, "wait_host")
    assert copied.end_s - copied.start_s > 0
    assert copied.start_s <= waited.end_s
    torch.cuda.synchronize()
    assert torch.equal(host, x.cpu())

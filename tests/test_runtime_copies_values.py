"""Copies, slow on purpose, beside the computation: what arrives, memory, and errors."""

from __future__ import annotations

import os
import signal
import time
import weakref
from typing import Any

import pytest
import torch

from benchmarks import copying
from fxremat.errors import HostMemoryExceeded
from fxremat.memory.measured_peak import measure_peak
from fxremat.runtime import cpu_engine
from fxremat.runtime.copies import to_device, to_host, wait_device, wait_host
from fxremat.runtime.host_memory import size_of_extent
from tests import host_copies
from tests.host_copies import CPU, DEVICES, LAYOUTS, TENTH, fetched, sent

_nothing_held = host_copies.nothing_held

# --- what arrives -------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trip(name: str, device: str) -> None:
    x = LAYOUTS[name] if device == "cpu" else LAYOUTS[name].to(device)
    with copying.set_copy_speed(latency_s=0.002):
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
    bytes_of = {
        "transposed": 35 * 4,
        "sliced": 19 * 4,
        "expanded": 5 * 4,
        "empty": 0,
        "bfloat16": 70,
    }
    assert {name: size_of_extent(LAYOUTS[name]) for name in bytes_of} == bytes_of


def test_contents_are_not_there_before_the_wait() -> None:
    with copying.set_copy_speed(latency_s=0.05):
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
def test_a_host_tensor_can_be_fetched_again_and_waited_for_again(device: str) -> None:
    """A backward that runs twice, for retain_graph, does both."""
    x = torch.randn(10, device=device)
    host = sent(x)
    wait_host(host, x)
    first, second = to_device(host, x.device), to_device(host, x.device)
    for fetch in (second, first, first):
        wait_device(fetch, host)
    assert torch.equal(first, x)
    assert torch.equal(second, x)
    assert torch.equal(fetched(host, device), x)


@pytest.mark.parametrize("device", DEVICES)
def test_a_fetch_comes_after_the_copy_to_host_that_nobody_waited_for(device: str) -> None:
    x = torch.randn(1000, device=device)
    with copying.set_copy_speed(latency_s=0.02):
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


# --- memory -------------------------------------------------------------------------------


def test_host_memory_is_not_memory_of_the_device() -> None:
    """x, then x and y, then y and what is fetched: never three tensors."""

    def step() -> None:
        x = torch.ones(50_000)
        host = sent(x)
        del x
        y = torch.ones(50_000)
        torch.add(y, fetched(host), out=y)

    assert measure_peak(step).above_start_bytes == 400_000
    assert copying.host_bytes().peak_bytes == 200_000


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
    assert copying.host_bytes() == copying.HostBytes(500, 500)
    view = first[3:]
    del first
    assert copying.host_bytes().now_bytes == 500
    del view
    assert copying.host_bytes() == copying.HostBytes(100, 500)
    copying.reset_host_peak()
    assert copying.host_bytes() == copying.HostBytes(100, 100)
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
    assert copying.host_bytes().now_bytes == 0
    y = offload(x)
    assert copying.host_bytes().now_bytes == 400
    del y
    assert copying.host_bytes() == copying.HostBytes(0, 400)


@pytest.mark.parametrize("device", DEVICES)
def test_cap(device: str) -> None:
    x = torch.zeros(100, device=device)
    with copying.set_host_memory_cap(1000):
        held = [sent(x), sent(x)]
        with pytest.raises(HostMemoryExceeded, match=r"400 bytes.*800 bytes.*1,000 bytes") as error:
            to_host(x)
        assert (error.value.wanted_bytes, error.value.held_bytes) == (400, 800)
        assert error.value.cap_bytes == 1000
        held.pop()
        held.append(sent(x))
        assert copying.host_bytes() == copying.HostBytes(800, 800)
    held.append(sent(x))


def test_an_allocation_that_fails_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(cpu_engine, "mapped_like", refuse)
    with pytest.raises(MemoryError):
        to_host(TENTH)
    assert copying.host_bytes().now_bytes == 0


# --- what goes wrong ----------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_waiting_for_nothing(device: str) -> None:
    x = torch.zeros(3, device=device)
    with pytest.raises(RuntimeError, match="wait_device: no copy into this tensor"):
        wait_device(x, torch.zeros(3))
    with pytest.raises(RuntimeError, match="started by fxremat::to_host"):
        wait_host(torch.zeros(3), x)


def test_a_copy_that_fails_says_so_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("broken wire")

    x = torch.zeros(3)
    storage = weakref.ref(x.untyped_storage())
    with monkeypatch.context() as broken:
        broken.setattr(cpu_engine, "_copy_memory", fail)
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
    engine = cpu_engine.CpuEngine()
    dead = torch.frombuffer(memory, dtype=torch.uint8)
    address = dead.data_ptr()
    engine._copies[dead.untyped_storage()] = transfer = engine._start("to_host", dead, dead)
    assert engine._copies[dead[3:].view(37, 1).untyped_storage()] is transfer
    transfer.wait()
    del dead
    alive = torch.frombuffer(memory, dtype=torch.uint8)
    assert alive.data_ptr() == address
    assert alive.untyped_storage() not in engine._copies


def test_a_fork_loses_copies_but_hangs_nowhere() -> None:
    x = torch.randn(100)
    with copying.set_copy_speed(latency_s=0.3):
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

"""The operators that copy between a device and host memory.

    host = to_host(x)       ...     wait_host(host, x)        the copy reads x until here
    x2 = to_device(host)    ...     wait_device(x2, host)     the copy reads host until here

A wait says in its schema that it changes the tensor that the copy writes. So every reader of the
tensor stays behind the wait, in FX and in Inductor, and no pass takes the wait for dead code. What
the copy reads is an argument of the wait only so that its memory is not given to anything else
before. A copy keeps sizes, strides and dtype. Nothing may read or write its target before the wait,
nor write its source.

    w = fetch(host, device)         a copy on the device, complete when the call is over
    host = put(x)                   a copy in host memory, complete when the call is over

Each is the gradient of the other: what a graph reads through ``fetch`` gets its gradient through
``put``. Complete means on the host too: CPU optimizers write weights and read gradients between two
steps, and no stream knows of them. A graph in which these copies are started and waited for apart
ends with ``settle(host)``: the host goes on when the device has done all that it was asked to.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from fxremat.runtime import cpu_engine, cuda_engine, optimizer_steps
from fxremat.runtime.copy_engine import Direction, Engine
from fxremat.runtime.host_memory import run_of_memory
from fxremat.runtime.kernels import COPIES, WAITS, register

_ENGINES: dict[str, Engine[Any]] = {"cpu": cpu_engine.ENGINE, "cuda": cuda_engine.ENGINE}


def _engine(device: torch.device) -> Engine[Any]:
    engine = _ENGINES.get(device.type)
    if engine is None:
        raise ValueError(
            f"cannot copy between host memory and {device.type!r}; there are {', '.join(_ENGINES)}"
        )
    return engine


def _fake_copy(x: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)


@register("(Tensor x) -> Tensor", COPIES, _fake_copy)
def to_host(x: torch.Tensor) -> torch.Tensor:
    """Start copying x; the tensor in host memory, without its contents yet.

    `HostMemoryExceeded` if that tensor would exceed the cap.
    """
    return _engine(x.device).start_to_host(x)


@register("(Tensor(a!) host, Tensor x) -> ()", WAITS)
def wait_host(host: torch.Tensor, x: torch.Tensor) -> None:
    """What is computed from now on comes after the copy of x.

    RuntimeError if there is no such copy or, on the CPU, if it failed.
    """
    _engine(x.device).wait("wait_host", host, x.device)


@register("(Tensor host, Device device) -> Tensor", COPIES, _fake_copy)
def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Allocate on a device and start copying; without contents yet.

    The copy comes after the copy to host that fills ``host``, waited for or not. The same host
    tensor can be fetched any number of times.
    """
    optimizer_steps.before_reading(host)
    return _engine(device).start_to_device(host, device)


@register("(Tensor(a!) x, Tensor host) -> ()", WAITS)
def wait_device(x: torch.Tensor, host: torch.Tensor) -> None:
    """What is computed from now on comes after the copy into x.

    RuntimeError if there is no such copy or, on the CPU, if it failed.
    """
    _engine(x.device).wait("wait_device", x, x.device)


# --- weights in host memory -------------------------------------------------------------------


def host_copy(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of ``x``, wherever it is, in the host memory from which ``device`` fetches.

    Its bytes count as held host memory: `HostMemoryExceeded` if they would exceed the cap.
    ValueError for tensors that are not strided, and for devices that cannot fetch.
    """
    host = _engine(device).new_host_tensor(x)
    with torch.no_grad():
        run_of_memory(host).copy_(run_of_memory(x))
    return host


def _finish(device: torch.device) -> None:
    """Let the host wait for the copies that ``device`` waits for."""
    optimizer_steps.now_on(device)()


@register("(Tensor host, Device device) -> Tensor", COPIES, _fake_copy)
def fetch(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, with the sizes, strides and dtype of ``host``.

    Its gradient arrives in host memory.
    """
    x: torch.Tensor = to_device(host, device)
    wait_device(x, host)
    _finish(x.device)
    return x


@register("(Tensor x) -> Tensor", COPIES, _fake_copy)
def put(x: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, with the sizes, strides and dtype of ``x``.

    Its gradient arrives on the device of ``x``. `HostMemoryExceeded` if it would exceed the cap.
    """
    host: torch.Tensor = to_host(x)
    wait_host(host, x)
    _finish(x.device)
    return host


@register("(Tensor(a!) host, Device device) -> ()", WAITS)
def settle(host: torch.Tensor, device: torch.device) -> None:
    """The host waits until the device has done all it was asked before, and for optimizer steps.

    Those are the steps that began in this backward. ``host`` is a tensor that the graph gives to
    its caller, so that the call is not left out.
    """
    _finish(device)
    optimizer_steps.finish()


def _keep_strides(ctx: Any, inputs: tuple[torch.Tensor, torch.device], output: object) -> None:
    ctx.strides = inputs[0].stride()


def _gradient_of_fetch(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return put(_with_strides(gradient, ctx.strides)), None


def _keep_device(ctx: Any, inputs: tuple[torch.Tensor], output: object) -> None:
    ctx.device = inputs[0].device


def _gradient_of_put(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    x: torch.Tensor = fetch(gradient, ctx.device)
    return x


def _with_strides(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """``x`` laid out in the order of ``strides``, copied on its device if it has other ones.

    autograd keeps a gradient that is laid out like its parameter and copies any other, to memory
    of torch's allocator.
    """
    if all(n == 1 or a == b for n, a, b in zip(x.size(), x.stride(), strides, strict=True)):
        return x
    order = sorted(range(x.dim()), key=lambda d: strides[d], reverse=True)
    back = sorted(range(x.dim()), key=lambda d: order[d])
    return x.permute(order).contiguous().permute(back)


torch.library.register_autograd("fxremat::fetch", _gradient_of_fetch, setup_context=_keep_strides)
torch.library.register_autograd("fxremat::put", _gradient_of_put, setup_context=_keep_device)


# --- how fast copies are ----------------------------------------------------------------------


def measure_copy_speed(device: torch.device | str) -> tuple[float, float]:
    """Bytes per second to the host, and to the device, while the other direction is busy too.

    Ever larger tensors are copied, to 16 MiB each, until that takes long enough to be measured.
    It holds at most 64 MiB of host memory, which count for the cap, and as much on the device.
    """
    nbytes, there, back = 2**14, 0.0, 0.0
    while nbytes < 2**24 and max(there, back) < 0.02:
        nbytes *= 4
        x = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        _seconds_of_a_copy(x, "to_host")  # fills the pool of host memory
        there, back = _seconds_of_a_copy(x, "to_host"), _seconds_of_a_copy(x, "to_device")
    return nbytes / there, nbytes / back


def _seconds_of_a_copy(x: torch.Tensor, direction: Direction) -> float:
    """Of one of three copies one after the other, while as many go the other way."""
    host = to_host(x)
    wait_host(host, x)
    _finish(x.device)
    begin = perf_counter()
    pairs = [(to_host(x), to_device(host, x.device)) for _ in range(3)]

    def wait(way: Direction) -> None:
        for copied, fetched in pairs:
            if way == "to_host":
                wait_host(copied, x)
            else:
                wait_device(fetched, host)

    wait(direction)
    _finish(x.device)
    seconds = (perf_counter() - begin) / len(pairs)
    wait("to_host")
    wait("to_device")
    return seconds

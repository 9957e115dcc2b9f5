"""Operators for what stays in host memory and visits the device: weights, and their gradients.

    w = fetch(host, device)         a copy on the device, complete when the call is over
    host = put(x)                   a copy in host memory, complete when the call is over

Each is the gradient of the other: what a graph reads through ``fetch`` gets its gradient through
``put``. Both only make new tensors, so a graph may fetch the same weight as often as it likes.
Apart from the four operators of `fxremat.runtime.copies.operators` there is nothing to wait for,
which is also why neither runs beside the computation.

Complete means on the host too: CPU optimizers write weights and read gradients between two steps,
and no stream knows of them. A graph in which these copies are started and waited for apart ends
with ``settle(host)``: the host goes on when the device has done all that it was asked to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxremat.compat.configuration import OpOverload
from fxremat.runtime.copies import cpu_engine, cuda_engine
from fxremat.runtime.copies.operators import to_device, to_host, wait_device, wait_host
from fxremat.runtime.dense_layout import check_copyable, extent_bytes, run_of_memory
from fxremat.runtime.gradients import optimizer_steps
from fxremat.runtime.host_memory import HOST_MEMORY

_TAGS = (
    # Gradients reach the optimizer with the strides that the graph was traced with.
    torch.Tag.needs_exact_strides,
    torch.Tag.pt2_compliant_tag,
    torch.Tag.cudagraph_unsafe,
)

_EMPTY_LIKE: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cpu": cpu_engine._mapped_like,
    "cuda": cuda_engine._pinned_like,
}


def host_copy(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of ``x``, wherever it is, in the host memory from which ``device`` fetches.

    Its bytes count as held host memory: `HostMemoryExceeded` if they would exceed the cap.
    ValueError for tensors that are not strided, and for devices that cannot fetch.
    """
    check_copyable(x)
    empty_like = _EMPTY_LIKE.get(device.type)
    if empty_like is None:
        raise ValueError(f"{device.type!r} cannot fetch; there are {', '.join(_EMPTY_LIKE)}")
    host = HOST_MEMORY.allocate(extent_bytes(x), lambda: empty_like(x))
    with torch.no_grad():
        run_of_memory(host).copy_(run_of_memory(x))
    return host


def _finish(device: torch.device) -> None:
    """Let the host wait for the copies that ``device`` waits for."""
    optimizer_steps.now_on(device)()


def _fetch(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    x: torch.Tensor = to_device(host, device)
    wait_device(x, host)
    _finish(x.device)
    return x


def _put(x: torch.Tensor) -> torch.Tensor:
    host: torch.Tensor = to_host(x)
    wait_host(host, x)
    _finish(x.device)
    return host


def _settle(host: torch.Tensor, device: torch.device) -> None:
    _finish(device)
    optimizer_steps.finish()


def _fake_settle(host: torch.Tensor, device: torch.device) -> None:
    """There is nothing to wait for."""


def _fake_fetch(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)


def _fake_put(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu")


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


def _register(name: str, schema: str, real: Any, fake: Any, tags: Any = _TAGS) -> OpOverload:
    qualified = f"fxremat::{name}"
    torch.library.define(qualified, schema, tags=tags)
    torch.library.impl(qualified, "default", torch.no_grad()(real))
    torch.library.register_fake(qualified, fake)
    overload: OpOverload = getattr(torch.ops.fxremat, name).default
    return overload


fetch = _register("fetch", "(Tensor host, Device device) -> Tensor", _fetch, _fake_fetch)
"""``fetch(host, device)``: a copy on the device, with the sizes, strides and dtype of ``host``.

Its gradient arrives in host memory."""

put = _register("put", "(Tensor x) -> Tensor", _put, _fake_put)
"""``put(x)``: a copy in host memory, with the sizes, strides and dtype of ``x``.

Its gradient arrives on the device of ``x``. `HostMemoryExceeded` if it would exceed the cap."""

settle = _register(
    "settle",
    "(Tensor(a!) host, Device device) -> ()",
    _settle,
    _fake_settle,
    tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),
)
"""``settle(host, device)``: the host waits until the device has done all it was asked before,
and until the optimizer steps are over that began in this backward.

``host`` is a tensor that the graph gives to its caller, so that the call is not left out."""

torch.library.register_autograd("fxremat::fetch", _gradient_of_fetch, setup_context=_keep_strides)
torch.library.register_autograd("fxremat::put", _gradient_of_put, setup_context=_keep_device)

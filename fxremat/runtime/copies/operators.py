"""The operators: a copy is one call that starts it and one that waits for it.

    host = to_host(x)       ...     wait_host(host, x)        the copy reads x until here
    x2 = to_device(host)    ...     wait_device(x2, host)     the copy reads host until here

A wait says in its schema that it changes the tensor that the copy writes. Nothing changes after
it that did not change before, but so every reader of the tensor stays behind the wait, in FX and
in Inductor, and no pass takes the wait for dead code. What the copy reads is an argument of the
wait only so that its memory is not given to anything else before.

A copy keeps sizes, strides and dtype. Nothing may read or write its target before the wait, nor
write its source. Inductor is not asked to force strides upon arguments: it would put a clone of
the source into the copy and then end the clone's life before the wait.
"""

from __future__ import annotations

from typing import Any

import torch

from fxremat.compat.configuration import OpOverload
from fxremat.runtime.copies import cpu_engine, cuda_engine
from fxremat.runtime.copy_engine import Engine
from fxremat.runtime.gradients import optimizer_steps

_STARTS = (
    # Inductor then neither pads the source nor, as the node was put in by a pass, forces strides.
    torch.Tag.needs_exact_strides,
    torch.Tag.pt2_compliant_tag,
    torch.Tag.cudagraph_unsafe,
)
_WAITS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)

_ENGINES: dict[str, Engine] = {"cpu": cpu_engine.ENGINE, "cuda": cuda_engine.ENGINE}


def _engine(device: torch.device) -> Engine:
    engine = _ENGINES.get(device.type)
    if engine is None:
        raise ValueError(
            f"cannot copy between host memory and {device.type!r}; there are {', '.join(_ENGINES)}"
        )
    return engine


def _to_host(x: torch.Tensor) -> torch.Tensor:
    return _engine(x.device).start_to_host(x)


def _wait_host(host: torch.Tensor, x: torch.Tensor) -> None:
    _engine(x.device).wait("wait_host", host, x.device)


def _to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    optimizer_steps.before_reading(host)
    return _engine(device).start_to_device(host, device)


def _wait_device(x: torch.Tensor, host: torch.Tensor) -> None:
    _engine(x.device).wait("wait_device", x, x.device)


def _fake_to_host(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu")


def _fake_to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)


def _fake_wait(target: torch.Tensor, source: torch.Tensor) -> None:
    """Waiting changes nothing that a tensor without contents has."""


def _register(name: str, schema: str, tags: Any, real: Any, fake: Any) -> OpOverload:
    qualified = f"fxremat::{name}"
    torch.library.define(qualified, schema, tags=tags)
    torch.library.impl(qualified, "default", torch.no_grad()(real))
    torch.library.register_fake(qualified, fake)
    overload: OpOverload = getattr(torch.ops.fxremat, name).default
    return overload


to_host = _register("to_host", "(Tensor x) -> Tensor", _STARTS, _to_host, _fake_to_host)
"""``to_host(x)``: start copying x; the tensor in host memory, without its contents yet.

`HostMemoryExceeded` if that tensor would exceed the cap."""

wait_host = _register(
    "wait_host", "(Tensor(a!) host, Tensor x) -> ()", _WAITS, _wait_host, _fake_wait
)
"""``wait_host(host, x)``: what is computed from now on comes after the copy of x.

RuntimeError if there is no such copy or, on the CPU, if it failed."""

to_device = _register(
    "to_device",
    "(Tensor host, Device device) -> Tensor",
    _STARTS,
    _to_device,
    _fake_to_device,
)
"""``to_device(host, device)``: allocate there and start copying; without contents yet.

The copy comes after the copy to host that fills ``host``, waited for or not. The same host tensor
can be fetched any number of times."""

wait_device = _register(
    "wait_device", "(Tensor(a!) x, Tensor host) -> ()", _WAITS, _wait_device, _fake_wait
)
"""``wait_device(x, host)``: what is computed from now on comes after the copy into x.

RuntimeError if there is no such copy or, on the CPU, if it failed."""

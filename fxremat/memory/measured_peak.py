"""The measured peak: bytes allocated on a device while a function runs.

It is the running maximum of the profiler's memory events. On the CPU it comes on top of the bytes
of what the caller says it holds; memory inside libraries that do not use torch's allocator is not
seen. On CUDA it is absolute, in the allocator's blocks of 512 bytes. What is reserved there besides
counts what was cached before. Run the function once or twice before, so that compiling and tuning
are not measured. The allocator's own peak statistics are the caller's, and are left as they are.

Tensors in host memory, such as weights that `fxremat.offload` moved there, are on no device: they
do not count, even where the CPU is the device and both look alike.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fxremat.compat.measuring import profiler_memory_events
from fxremat.memory.arena import ARENAS
from fxremat.memory.storages import Storages, storages_of
from fxremat.runtime.host_memory import is_host

DeviceLike = torch.device | str | None


@dataclass(frozen=True)
class MeasuredPeak:
    """Bytes at the start, at most while running, and the difference.

    ``reserved_bytes`` is what CUDA's allocator held of the device at the start, or at the end if
    that is more; None elsewhere.
    """

    peak_bytes: int
    start_bytes: int
    above_start_bytes: int
    device: str
    reserved_bytes: int | None = None


def _bytes_before(storages: Storages, device: torch.device) -> Callable[[], int]:
    """Gives the bytes of what is there now, after something has run.

    These are ``storages``, and the arenas that it used, with what lay in them: it needs their bytes
    whether something lies there or not. Empty ones are given back now, for else nobody would see
    them go.
    """
    there = [one for one in list(ARENAS) if one.device == device]
    for one in there:
        one.rest()
    before = [(one, one.address, one.nbytes, one.entered) for one in there if one.block is not None]

    def count() -> int:
        used = [(at, nbytes) for one, at, nbytes, entered in before if one.entered > entered]
        outside = (
            nbytes
            for address, nbytes in storages.items()
            if not any(begin <= address < begin + size for begin, size in used)
        )
        return sum(outside) + sum(nbytes for _, nbytes in used)

    return count


def measure_peak(
    fn: Callable[[], object], *, held: Iterable[Any] = (), device: DeviceLike = None
) -> MeasuredPeak:
    """Run ``fn`` once and measure its peak on ``device``.

    ``held`` is what lives on the device before: modules, optimizers, tensors, containers of
    them. On CPU ``start_bytes`` are its bytes; on CUDA everything allocated is counted anyway.
    Without ``device``, that of the first held tensor, or the CPU.
    """
    held = list(held)
    where = _device_of(held) if device is None else torch.device(device)
    gc.collect()  # garbage of before, freed while fn runs, would hide bytes of fn
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"cannot measure on {where.type!r}; measure_peak knows cpu and cuda")
    if where.type == "cpu":
        before = _bytes_before(storages_of(_tensors(held), where), where)
        above = _profiled(fn, where)
        start = before()
        return MeasuredPeak(start + above, start, above, str(where))
    torch.cuda.synchronize(where)
    start, reserved = torch.cuda.memory_allocated(where), torch.cuda.memory_reserved(where)
    above = _profiled(fn, where)
    reserved = max(reserved, torch.cuda.memory_reserved(where))
    return MeasuredPeak(start + above, start, above, str(where), reserved)


def measure_call(fn: Callable[[], object], device: torch.device) -> int:
    """The bytes that a short call takes above what was there before; quickly.

    Garbage of before is neither looked for nor freed meanwhile. On CUDA no profiler is asked, for
    the caller may have one running. The peak is known there if there never was a higher one. Else
    it is at most what the call allocates in all, which is as much if it frees nothing before its
    end.
    """
    with uncollected():
        return _counted(fn, device) if device.type == "cuda" else _profiled(fn, device)


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, Python's cyclic collector is off: it frees nothing, and takes no time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _device_of(held: Iterable[Any]) -> torch.device:
    tensors = [tensor for tensor in _tensors(held) if not is_host(tensor)]
    return tensors[0].device if tensors else torch.device("cpu")


def _profiled(fn: Callable[[], object], device: torch.device) -> int:
    """Bytes above the start, by the profiler; what the allocator does is CPU activity."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        fn()
    return _running_peak(profiler_memory_events(prof), device.type.upper())


def _running_peak(events: Iterable[tuple[int, int, str]], kind: str = "CPU") -> int:
    """Most bytes allocated at once; events of the same nanosecond stay in recorded order."""
    in_order = sorted(events, key=lambda event: event[0])
    changes = (nbytes for _, nbytes, device in in_order if device == kind)
    return max(accumulate(changes, initial=0))


def _counted(fn: Callable[[], object], device: torch.device) -> int:
    """Bytes above the start, by the counters of CUDA's allocator, which are only read."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)
    fn()
    torch.cuda.synchronize(device)
    after, name = torch.cuda.memory_stats(device), "allocated_bytes.all"
    in_all = after[f"{name}.allocated"] - before[f"{name}.allocated"]
    return int(min(in_all, after[f"{name}.peak"] - before[f"{name}.current"]))


def held_bytes(*things: Any, device: DeviceLike = None) -> int:
    """Bytes of the storages that ``things`` hold, each storage once.

    Modules count with parameters, buffers and gradients, optimizers with their state, tensors
    with their gradient, tensors of subclasses with their parts. With ``device``, only what lives
    there. Host memory of `fxremat.runtime` is left out.
    """
    where = None if device is None else torch.device(device)
    return sum(storages_of(_tensors(things), where).values())


def _tensors(thing: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a tensor, module, optimizer or container, gradients included."""
    if isinstance(thing, torch.Tensor):
        yield thing
        if thing.is_leaf and thing.grad is not None:
            yield thing.grad
    else:
        for part in _parts(thing):
            yield from _tensors(part)


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, torch.nn.Module):
        return [*thing.parameters(), *thing.buffers()]
    if isinstance(thing, torch.optim.Optimizer):
        return [*thing.state.keys(), *thing.state.values()]
    if isinstance(thing, Mapping):
        return thing.values()
    if isinstance(thing, (list, tuple, set, frozenset)):
        return thing
    if isinstance(thing, (str, bytes, int, float, complex, type(None))):
        return ()
    raise TypeError(
        f"cannot count the bytes of a {type(thing).__name__}; "
        "give tensors, modules, optimizers or containers of them"
    )

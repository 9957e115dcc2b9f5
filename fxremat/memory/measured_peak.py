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
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fxremat.compat.measuring import profiler_memory_events
from fxremat.compat.tensors import plain_tensors
from fxremat.memory.arena import ARENAS, Arena
from fxremat.runtime.host_memory import is_host, is_on

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


@dataclass(frozen=True)
class ArenasBefore:
    """The arenas of a device at some moment: where each lies, its bytes, and how often it was used.

    What runs afterwards has used some of them, whose bytes it needs whether something lies in them
    or not.
    """

    each: tuple[tuple[Arena, int, int, int], ...]

    @classmethod
    def on(cls, device: torch.device) -> ArenasBefore:
        """As they are now; empty ones are given back, for else nobody would see them go."""
        for one in list(ARENAS):
            if one.device == device:
                one.rest()
        there = [one for one in list(ARENAS) if one.device == device and one.block is not None]
        return cls(tuple((one, one.address, one.nbytes, one.entered) for one in there))

    def bytes_with(self, storages: Mapping[int, int]) -> int:
        """Of storages, by their addresses then, and of those arenas that were used since.

        What lay in such an arena counts with it.
        """
        used = [(at, size) for one, at, size, entered in self.each if one.entered > entered]
        outside = (
            nbytes
            for address, nbytes in storages.items()
            if not any(begin <= address < begin + size for begin, size in used)
        )
        return sum(outside) + sum(size for _, size in used)


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
        storages, arenas = _storages(held, where), ArenasBefore.on(where)  # before fn changes them
        above = _profiled(fn, where)
        start = arenas.bytes_with(storages)
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
    current = peak = 0
    for _, nbytes, device in sorted(events, key=lambda event: event[0]):
        if device == kind:
            current += nbytes
            peak = max(peak, current)
    return peak


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
    return sum(_storages(things, None if device is None else torch.device(device)).values())


def _storages(things: Iterable[Any], device: torch.device | None) -> dict[int, int]:
    """Bytes of the storages by their addresses."""
    sizes: dict[int, int] = {}
    for tensor in (part for each in _tensors(things) for part in plain_tensors(each)):
        if not is_host(tensor) if device is None else is_on(tensor, device):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


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

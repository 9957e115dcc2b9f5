"""The profiler's memory events, and what measuring must leave as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import profiler
from torch.profiler import profile


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Whatever runs inside draws no number that the user's program would have drawn."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if started else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def memory_filled() -> Iterator[None]:
    """Inside, what is allocated and not written always holds the same."""
    mode = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch._C._set_deterministic_fill_uninitialized_memory(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch._C._set_deterministic_algorithms(mode, warn_only=only_warns)
        torch._C._set_deterministic_fill_uninitialized_memory(fills)


def random_states() -> list[torch.Tensor]:
    """The state of each generator that calls draw from unless they are given another."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if started else ())]


def keep_busy(device: torch.device) -> None:
    """Have a GPU do nothing for some 0.2 ms, in which the host asks it for what is to be timed."""
    with torch.cuda.device(device):
        torch.cuda._sleep(400_000)  # type: ignore[no-untyped-call]


def recorded_allocations(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """What CUDA's allocator did while ``run`` ran, as `torch.cuda.memory._snapshot` gives it."""
    record: Any = torch.cuda.memory._record_memory_history
    record(context=None, stacks="python")
    try:
        run()
        torch.cuda.synchronize(device)
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot(device)
    finally:
        record(enabled=None)
    return snapshot


def profiler_runs() -> bool:
    """Whether torch's profiler records now, on any thread."""
    runs: bool = profiler._is_profiler_enabled
    return runs


def profiler_memory_events(prof: profile) -> list[tuple[int, int, str]]:
    """(start in ns, bytes allocated or, negative, freed, "CPU" or other), in recorded order."""
    results: Any = prof.profiler.kineto_results if prof.profiler is not None else None
    if results is None:
        raise RuntimeError("the profiler holds no results; read them after its with block")
    return [
        (event.start_ns(), event.nbytes(), event.device_type().name)
        for event in results.events()
        if event.name() == "[memory]"
    ]

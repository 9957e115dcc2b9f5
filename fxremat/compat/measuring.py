"""The profiler's memory events, and what measuring must leave as it was."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import accumulate
from typing import Any

import torch
from torch.autograd import profiler, profiler_legacy
from torch.profiler import profile

from fxremat.compat.backward import running_backward, watch_backwards, when_backward_returns


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


_ON_THREAD = threading.local()
"""``recording`` is the `HostRecording` that records in this thread, if one does."""


class HostRecording:
    """What torch's allocator gives and takes of host memory in this thread, until it is stopped.

    torch's older profiler tells every block. It knows the size of one that is freed if a recording
    saw it allocated; another one counts as if it were not freed. A profiler that the user starts
    meanwhile ends the recording, for a thread has but one. Inside of a backward none can end, for
    that gives each node the profiler which ran when it began: there it ends when that returns. One
    that another thread stops ends when its own thread asks for one again.
    """

    is_left = False

    @staticmethod
    def is_possible() -> bool:
        """Whether one can begin: no profiler runs, and no backward."""
        return not profiler_runs() and _recording() is None and running_backward() is None

    def __init__(self) -> None:
        if not self.is_possible():
            raise RuntimeError("a profiler or a backward runs in this thread; let it end before")
        watch_backwards()
        _give_way_to_profilers()
        legacy: Any = profiler_legacy
        autograd: Any = torch.autograd
        autograd._enable_profiler_legacy(legacy.profile(profile_memory=True).config())
        autograd._enable_record_function(False)  # of memory alone; a step has many operators
        _ON_THREAD.recording = self

    def stop(self) -> int | None:
        """The most bytes that were allocated at once above those at the start.

        None if a profiler ended it, where another thread began it, or inside of a backward.
        """
        by_thread = self.end()
        if by_thread is None:
            return None
        changes: list[int] = [
            event.cpu_memory_usage()
            for events in by_thread
            for event in events
            if event.kind() == "memory_alloc"
        ]
        return max(accumulate(changes, initial=0))

    def end(self) -> Any:
        """What each thread did; None where `stop` gives None."""
        if getattr(_ON_THREAD, "recording", None) is not self:
            self.is_left = True
            return None
        if running_backward() is not None:
            when_backward_returns(self.end)
            return None
        _ON_THREAD.recording = None
        autograd: Any = torch.autograd
        autograd._enable_record_function(True)
        return autograd._disable_profiler_legacy()


def _recording() -> HostRecording | None:
    """That of this thread."""
    recording: HostRecording | None = getattr(_ON_THREAD, "recording", None)
    if recording is not None and recording.is_left and running_backward() is None:
        recording.end()
        return None
    return recording


def _give_way_to_profilers() -> None:
    """From now on a profiler that starts ends the recording of its thread."""
    starts: Any = [
        (profiler, "_run_on_profiler_start"),
        (profiler_legacy, "_enable_profiler_legacy"),
    ]
    for module, name in starts:
        start = getattr(module, name)
        if not hasattr(start, "gives_way"):
            setattr(module, name, _after_recording(start))


def _after_recording(start: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(start)
    def started(*args: Any) -> Any:
        if recording := _recording():
            recording.end()
        return start(*args)

    started.gives_way = True  # type: ignore[attr-defined]
    return started

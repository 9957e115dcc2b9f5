"""How long a call takes on a device: its quickest runs, alone, at one clock of the machine.

Runs that other programs disturb do not count: a thread that waits for a core, and all that wait for
it, would count as work. Where each run waits long, long calls are told from short ones by that
alone: whoever chose by such times would compute all in the smallest parts. A core's clock, and the
neighbours on its chip, change how long the same matmul takes by a quarter within minutes. Times are
kept on disk and added up, so those of a CPU are divided by how much longer than at first a fixed
matmul takes just now. On a GPU they are left as they are. Numbers are kept on disk, but for those
of calls that were disturbed each time.
"""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fxremat.compat.inductor.kernels import wait_for_vectors
from fxremat.compat.measuring import keep_busy
from fxremat.compat.ranks import is_a_rank
from fxremat.compat.tensors import outside_fake_mode
from fxremat.core.constants import CORE_TURN_S, MOST_WAITING, TILE_BYTES, TIME_DOUBT
from fxremat.cost.number_file import NumberFile, number_path
from fxremat.errors import FxrematError
from fxremat.sizes import parse_bytes

TIMING_S = 4 * CORE_TURN_S
"""Timing a call ends after this, whether its runs agree or not."""
BUSY_TIMING_S = 10 * TIMING_S
"""Where others disturb each run, timing ends after this; a clock is taken to last as long."""
LOOK_S = CORE_TURN_S / 10
"""Between two looks at how long threads have waited, which take up to a tenth of this."""
CALLS_BETWEEN_EVENTS = 10
"""On CUDA: the clock of events is no finer than half a microsecond, which ten calls share."""
CLOCK = "reference_matmul"
"""Of numbers on disk: what the reference matmul took when it was first timed."""
_CLOCK_KEY = "us of mm 256x512x512"


class MachineIsBusy(FxrematError):
    """Other programs take the cores: what is to be planned gets a plan by figures of a device."""

    is_no_fault = True

    def __str__(self) -> str:
        return "other programs use the CPU's cores, so ops cannot be timed"


class Timing(NamedTuple):
    """Microseconds of a call; for this part of its run, or more, threads waited for a core."""

    us: float
    waited: float

    @property
    def disturbed(self) -> bool:
        """Whether other programs had a core in each of its runs."""
        return self.waited > TIME_DOUBT


@dataclass
class ReferenceMatmul:
    """A matmul of fixed sizes on the CPU: it stays in a cache, and takes about a millisecond."""

    file: NumberFile
    us: float | None = None
    """What it took lately; None where it was disturbed."""
    timed_at: float = -math.inf

    def slowdown(self) -> float:
        """How many times as long as at first it takes now; 1 where that is not known."""
        if time.monotonic() - self.timed_at > BUSY_TIMING_S:
            made = partial(torch.ones, dtype=torch.float32)
            a, b, out = made(256, 512), made(512, 512), made(0)
            found = quickest(lambda: torch.mm(a, b, out=out), a.device)
            self.us = None if found.disturbed else found.us
            self.timed_at = time.monotonic()
        if self.us is None:
            return 1.0
        if _CLOCK_KEY not in self.file.numbers:
            self.file.add(_CLOCK_KEY, self.us)
        return self.us / self.file.numbers[_CLOCK_KEY]


def reference_of(device: torch.device, directory: Path) -> ReferenceMatmul | None:
    """The reference for times on a CPU, kept below ``directory``; None for other devices."""
    if device.type != "cpu":
        return None
    return ReferenceMatmul(NumberFile(number_path(directory, device, CLOCK)))


def quickest(
    call: Callable[[], object],
    device: torch.device,
    reference: ReferenceMatmul | None = None,
    before: Callable[[], object] | None = None,
) -> Timing:
    """The quickest run in which no other program had one of our cores.

    Such runs are made until two of them agree. With a ``reference`` the time is that at the clock
    at which it was first timed. Where the machine is too busy for any such run, it is the quickest
    of those that waited least: more than the call takes. What is to run ``before`` each run is not
    timed.
    """
    slowdown = 1.0 if reference is None else reference.slowdown()
    call()
    counted, least, spent, enough = list[float](), (math.inf, math.inf), 0.0, TIMING_S / 8
    with alone_on(device):
        while spent < (TIMING_S if len(counted) > 1 else BUSY_TIMING_S):
            runs, took, waited = _looked_at(call, device, before)
            spent += took
            if waited > TIME_DOUBT:
                least = min(least, (waited, min(runs)))  # others have disturbed it
                continue
            counted = sorted((*counted, *runs))[:2]
            enough -= took
            if enough < 0 and len(counted) > 1 and counted[1] <= counted[0] * (1 + TIME_DOUBT):
                break
    waited, seconds = (0.0, counted[0]) if counted else least
    return Timing(1e6 * seconds / slowdown, waited)


def _looked_at(
    call: Callable[[], object], device: torch.device, before: Callable[[], object] | None
) -> tuple[list[float], float, float]:
    """Seconds of runs, of all that was done, and the part for which threads waited for a core."""
    waited, runs, took = waiting_s(device), list[float](), 0.0
    while took < LOOK_S:
        if before is not None:
            took += _seconds(before, device)
        runs.append(_seconds(call, device))
        took += runs[-1] * _calls_of(device)
    return runs, took, (waiting_s(device) - waited) / took


_UNSURE: defaultdict[Path, dict[str, float | None]] = defaultdict(dict)
"""What is not kept, by file: None for what has no room, and what was disturbed each time.

It is not timed again in this process: in a later iteration the calls would need memory beside what
is trained."""


def forget_unsure() -> None:
    """Time anew what was disturbed, or had no room."""
    _UNSURE.clear()


@dataclass
class TimedNumbers:
    """Numbers of one ``kind`` by what they are of, timed once, and kept below ``directory``."""

    device: torch.device
    directory: Path
    kind: str

    def __post_init__(self) -> None:
        self.file = NumberFile(number_path(self.directory, self.device, self.kind))
        self.unsure = _UNSURE[self.file.path]
        self.reference = reference_of(self.device, self.directory)

    def number(self, key: str, measure: Callable[[], tuple[float | None, float]]) -> float | None:
        """The number of this key. ``measure`` gives it, and how disturbed it was (`Timing.waited`).

        It is called where tensors are real, and nothing is compiled that could take a core. Raises
        `MachineIsBusy` where it was disturbed too much, but among ranks, which plan alike.
        """
        if key not in self.file.numbers and key not in self.unsure:
            wait_for_vectors()
            with outside_fake_mode(), torch.no_grad():
                found, waited = measure()
            if waited > MOST_WAITING and not is_a_rank():
                raise MachineIsBusy
            if found is None or waited > TIME_DOUBT:
                self.unsure[key] = found
            else:
                self.file.add(key, found)
        return self.file.numbers.get(key, self.unsure.get(key))

    def us(self, call: Callable[[], object], *, cold: bool = False) -> Timing:
        """Of a call, on this device; ``cold``: a CPU's caches hold nothing of what it reads."""
        before = self._empty_caches if cold and self.device.type == "cpu" else None
        return quickest(call, self.device, self.reference, before)

    @cached_property
    def _empty_caches(self) -> Callable[[], object]:
        """Writes twice what the largest cache holds, in memory that torch does not count."""
        memory = bytearray(2 * largest_cache())
        return partial(torch.frombuffer(memory, dtype=torch.uint8).fill_, 1)


@cache
def largest_cache() -> int:
    """Bytes of the CPU's largest cache, as Linux tells them; else those that tiles are made for."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    with suppress(OSError, ValueError):
        return max(parse_bytes(one.read_text(encoding="ascii").strip() + "iB") for one in sizes)
    return TILE_BYTES


def _calls_of(device: torch.device) -> int:
    """How many calls are one run."""
    return CALLS_BETWEEN_EVENTS if device.type == "cuda" else 1


def waiting_s(device: torch.device) -> float:
    """For how many seconds our threads have waited for a core of the CPU; told by Linux alone."""
    waited = 0
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task") if device.type == "cpu" else ():
            with suppress(OSError):  # it has ended
                told = Path(f"/proc/self/task/{thread}/schedstat").read_bytes()
                waited += int(told.split()[1])
    return waited / 1e9


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run; on CUDA by its own clock, while the host is ahead of the device."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize(device)
    keep_busy(device)
    begin.record()
    for _ in range(_calls_of(device)):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _calls_of(device)


@contextmanager
def alone_on(device: torch.device) -> Iterator[None]:
    """Wait until no other process of this machine times anything on ``device``.

    On CUDA alone, where another process's kernels run between ours and count as ours; on a CPU, a
    run that lost a core is noticed. Nothing is waited for where no lock file can be opened.
    """
    with ExitStack() as held:
        if device.type == "cuda":
            # named by the GPU itself: processes may number them differently
            name = getattr(torch.cuda.get_device_properties(device), "uuid", device.index)
            with suppress(OSError):
                path = Path(tempfile.gettempdir()) / f"fxremat-timing-{name}.lock"
                fcntl.flock(held.enter_context(path.open("a")), fcntl.LOCK_EX)
        yield

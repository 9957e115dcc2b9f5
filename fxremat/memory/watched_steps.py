"""The first steps, measured: what nobody compiled, and no plan has seen, may break a promise.

Eager parts between compiled ones, a loss outside, hooks that keep tensors: they take memory that is
in no graph. A step begins with a forward where none waits, and ends with the backward after which
none waits. What it took at most is compared with the budget. On CUDA the allocator knows that. On
the CPU the C library knows what is allocated now, so a thread asks it again and again; steps in
which something was compiled, or torch's profiler ran, say nothing there, for these allocate too.
Once some steps have been looked at, nothing is measured any more.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from fxremat.compat.measuring import profiler_runs
from fxremat.core.constants import CORE_TURN_S, MEASURABLE
from fxremat.errors import BudgetExceeded
from fxremat.sizes import MIB

LOOK_EVERY_S = CORE_TURN_S / 10
"""Between two looks at what the C library has allocated, each of which takes some microseconds."""
WATCHED_STEPS = 2
"""Steps that are measured. Optimizers of torch make their states in the first step, so the second
is like all that follow."""
MOST_STEPS = 4 * WATCHED_STEPS
"""Steps until it is given up: something is compiled, or the profiler runs, in each of them."""


@dataclass
class StepWatch:
    """Compares the first steps of all graphs that share a budget with that budget.

    ``compiled`` counts what is compiled. What was compiled before a step began may go on to be
    compiled in it, as its backward. So many bytes were ``promised`` of the last step.
    """

    device: torch.device
    budget_bytes: int
    reserved: bool
    compiled: Callable[[], int]
    steps: int = 0
    looked_at: int = 0
    promised: int = 0
    _meter: _OnCuda | _OnHost | None = None
    _resident: int = 0
    _compiled: int = -1
    """When the last step began."""

    @property
    def is_over(self) -> bool:
        """Whether no further step is looked at."""
        return self.looked_at >= WATCHED_STEPS or self.steps >= MOST_STEPS

    def begin(self, resident_bytes: int) -> None:
        """A step begins; ``resident_bytes`` are those of the model and of what it is given."""
        self.abandon()
        self.promised = 0
        before, self._compiled = self._compiled, self.compiled()
        on_cuda = self.device.type == "cuda"
        if before != self._compiled and not on_cuda:
            self.steps += 1
            return
        self._meter = _meter(self.device, self.reserved)
        self._resident = torch.cuda.memory_allocated(self.device) if on_cuda else resident_bytes

    def end(self, graph: str, saved_bytes: int, counted_bytes: int) -> BudgetExceeded | None:
        """The step ends; the warning to give.

        Its graphs have saved ``saved_bytes`` at most, and ``counted_bytes`` had been set aside for
        what they do not see.
        """
        meter, self._meter = self._meter, None
        if meter is None:
            return None
        taken, allowed = meter.end(self._resident), self.budget_bytes
        self.steps += 1
        if self.device.type != "cuda":
            if taken is None or self._compiled != self.compiled():
                return None
            allowed += max(MIB, int(MEASURABLE * allowed))
        self.looked_at += 1
        if taken is None or taken <= allowed:
            return None
        self.looked_at = WATCHED_STEPS  # once is enough
        outside = counted_bytes + max(0, taken - self._resident - saved_bytes)
        return BudgetExceeded(graph, taken, self.budget_bytes, outside, counted_bytes)

    def look_again(self) -> None:
        """Look at as many steps once more: their graphs are planned anew."""
        self.steps = self.looked_at = 0

    def abandon(self) -> None:
        """The step that began never ends, as where a forward is not followed by a backward."""
        meter, self._meter = self._meter, None
        if meter is not None:
            self.steps += 1
            meter.end(0)


@dataclass
class _OnCuda:
    """The most that the allocator had, if this step had more than all before."""

    device: torch.device
    reserved: bool
    before: int = 0

    def __post_init__(self) -> None:
        self.before = self._most()

    def _most(self) -> int:
        most = torch.cuda.max_memory_reserved if self.reserved else torch.cuda.max_memory_allocated
        return int(most(self.device))

    def end(self, resident_bytes: int) -> int | None:
        most = self._most()
        return most if most > self.before else None


@dataclass
class _OnHost:
    """What the C library has allocated, asked for by a thread while the step runs.

    Nothing is said of a step in which torch's profiler was seen to run.
    """

    in_use: Callable[[], int]
    before: int = 0
    most: int = 0
    profiled: bool = False
    _done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._note()
        self.before = self.most
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._done.wait(LOOK_EVERY_S):
            self._note()

    def _note(self) -> None:
        self.most = max(self.most, self.in_use())
        self.profiled = self.profiled or profiler_runs()

    def end(self, resident_bytes: int) -> int | None:
        self._done.set()
        self._thread.join()
        self._note()
        return None if self.profiled else resident_bytes + self.most - self.before


def _meter(device: torch.device, reserved: bool) -> _OnCuda | _OnHost | None:
    if device.type == "cuda":
        return _OnCuda(device, reserved)
    in_use = allocated_on_host() if device.type == "cpu" else None
    return None if in_use is None else _OnHost(in_use)


class _MallInfo(ctypes.Structure):
    """What glibc says of its memory: see mallinfo2(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


@cache
def allocated_on_host() -> Callable[[], int] | None:
    """Tells the bytes that the C library has allocated now; None where it does not say."""
    try:
        ask: Any = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    ask.restype = _MallInfo

    def in_use() -> int:
        found = ask()
        return int(found.uordblks) + int(found.hblkhd)

    return in_use

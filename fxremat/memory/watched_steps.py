"""The first steps, measured: what nobody compiled, and no plan has seen, may break a promise.

Eager parts between compiled ones, a loss outside, hooks that keep tensors: they take memory that is
in no graph. A step begins with a forward where none waits, and ends when the backward returns after
which none waits. What it took at most is compared with the budget. On CUDA the allocator knows
that. On the CPU every block is recorded that torch allocates. A block of before, freed in the step,
is not known there unless a step before was recorded, so the first that is says nothing. Neither do
steps in which something was compiled, or torch's profiler ran. Once some steps have been looked at,
nothing is measured any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fxremat.compat.measuring import HostRecording
from fxremat.errors import BudgetExceeded

WATCHED_STEPS = 2
"""Steps that are measured. Optimizers of torch make their states in the first step, so the second
is like all that follow."""
MOST_STEPS = 4 * WATCHED_STEPS
"""Steps until it is given up: something is compiled, or the profiler runs, in each of them."""

MOST_AGAIN, MORE_EACH_TIME = 4, 4
"""Times that steps are planned again for what was measured, and how many times as much is held each
time. Two losses of one run, by `retain_graph`, keep a budget after three."""

BARELY = 0.005
"""A part of the budget. Who exceeds it by no more than that, as by a batch of words that lives on,
is warned, and not ended. Loops on a GPU are predicted as well as that (`benchmarks.loops`)."""


def barely(exceeded: BudgetExceeded) -> bool:
    """Whether a budget was exceeded by hardly anything."""
    return exceeded.taken_bytes <= (1 + BARELY) * exceeded.budget_bytes


def to_hold(exceeded: BudgetExceeded, again: int) -> int:
    """Bytes to set aside at all times in a plan that is made ``again`` for what was measured."""
    more: int = MORE_EACH_TIME ** (again - 1)
    return (exceeded.taken_bytes - exceeded.budget_bytes) * more


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
    _begun: HostRecording | int | None = None
    """What records a step; on CUDA the most that the allocator had before."""
    _resident: int = 0
    _unplanned: int = 0
    _compiled: int = -1
    """When the last step began."""

    @property
    def is_over(self) -> bool:
        """Whether no further step is looked at."""
        return self.looked_at >= WATCHED_STEPS or self.steps >= MOST_STEPS

    def begin(self, resident_bytes: int, unplanned_bytes: int = 0) -> None:
        """A step begins; ``resident_bytes`` are those of the model and of what it is given.

        Besides, ``unplanned_bytes`` are there of which no plan knows; on CUDA the allocator does.
        """
        self.abandon()
        self.promised = 0
        before, self._compiled = self._compiled, self.compiled()
        on_cuda = self.device.type == "cuda"
        self._unplanned = 0 if on_cuda else unplanned_bytes
        self._resident = torch.cuda.memory_allocated(self.device) if on_cuda else resident_bytes
        if on_cuda:
            self._begun = self._most()
        elif before == self._compiled and HostRecording.is_possible():
            self._begun = HostRecording()
        else:
            self.steps += 1

    def end(self, graph: str, saved_bytes: int, counted_bytes: int) -> BudgetExceeded | None:
        """The step ends; the warning to give.

        Its graphs have saved ``saved_bytes`` at most, and ``counted_bytes`` had been set aside for
        what they do not see.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        self.steps += 1
        if isinstance(begun, HostRecording):
            above = begun.stop()
            if above is None or self._compiled != self.compiled():
                return None
            self.looked_at += 1
            if self.looked_at < WATCHED_STEPS:
                return None
            taken = self._resident + self._unplanned + above
        else:
            self.looked_at += 1
            taken = self._most()
            if taken <= begun:  # an earlier step had as many
                return None
        if taken <= self.budget_bytes:
            return None
        self.looked_at = WATCHED_STEPS  # once is enough
        outside = counted_bytes + max(0, taken - self._resident - saved_bytes)
        return BudgetExceeded(graph, taken, self.budget_bytes, outside, counted_bytes)

    def look_again(self) -> None:
        """Look at as many steps once more: their graphs are planned anew."""
        self.steps = self.looked_at = 0

    def abandon(self) -> None:
        """The step that began never ends, as where a forward is not followed by a backward."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self.steps += 1
        if isinstance(begun, HostRecording):
            begun.stop()

    def _most(self) -> int:
        """The most that CUDA's allocator has had."""
        most = torch.cuda.max_memory_reserved if self.reserved else torch.cuda.max_memory_allocated
        return int(most(self.device))

"""One training step of `benchmarks.offload measure`: compiled one way, its bytes and its copies."""

from __future__ import annotations

import copy
import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol
from unittest import mock

import torch

from fxremat.core.schedule import Kind
from fxremat.core.timeline import replay
from fxremat.memory.measured_peak import held_bytes, measure_peak
from fxremat.report.report import Report

from . import copying
from .copying import CopyRecord, copy_trace
from .offload_picture import Span, Streams
from .training import Training

WARM_STEPS = 2


@dataclass
class Contestant:
    """One variant, compiled."""

    variant: str
    training: Training
    report: Report | None

    def peak_bytes(self) -> int:
        """What it holds before a step, and at most above that in one."""
        training = self.training
        training.model.zero_grad(set_to_none=True)
        its = (training.model, training.arguments)
        held = held_bytes(*its, device=training.device)
        found = measure_peak(training.run, held=its, device=training.device)
        return held + found.above_start_bytes

    def host_peak_bytes(self) -> int:
        """The most bytes of host memory in a step."""
        copying.reset_host_peak()
        self.training.step()
        self.training.synchronize()
        return copying.host_bytes().peak_bytes

    def time_steps(self, count: int) -> tuple[float, float]:
        """Median seconds of some steps, and of the processor in the thread that computes."""
        self.training.step()
        times = [self._time_step() for _ in range(count)]
        self.training.model.zero_grad(set_to_none=True)
        return median(wall for wall, _ in times), median(busy for _, busy in times)

    def _time_step(self) -> tuple[float, float]:
        self.training.model.zero_grad(set_to_none=True)
        self.training.synchronize()
        busy, wall = time.thread_time(), time.perf_counter()
        self.training.run()
        self.training.synchronize()
        return time.perf_counter() - wall, time.thread_time() - busy

    def traced_step(self) -> Traced:
        """Run a step and note its copies."""
        training = self.training
        training.model.zero_grad(set_to_none=True)
        training.synchronize()
        with copy_trace() as records:
            start = time.perf_counter()
            training.run()
            training.synchronize()
            end = time.perf_counter()
        return Traced(start, end, records)


def compiled(
    variant: str, model: torch.nn.Module, arguments: Any, executor: str,
    options: dict[str, Any] | None,
) -> Contestant:  # fmt: skip
    """Compile a copy of the model, with fxremat where there are options for it, and warm up."""
    from fxremat import reports
    from fxremat.backend import fxremat  # itself, not its name: works without installation

    model = copy.deepcopy(model)
    if options is None:
        function = torch.compile(model, backend=executor)
    else:
        function = torch.compile(model, backend=fxremat, options={"executor": executor, **options})
    training = Training(model, arguments, function)
    for _ in range(WARM_STEPS):
        training.step()
    return Contestant(variant, training, None if options is None else reports()[-1])


@contextmanager
def targets_not_filled() -> Iterator[None]:
    """Inside, starting a copy of the CPU is no work for the thread that computes.

    So that a missing wait is seen, the engine fills what a copy will write first. A link does not
    do that, and it takes as long as some ops do.
    """
    with mock.patch.object(ctypes, "memset"):
        yield


class Timed(Protocol):
    """A row of seconds: of steps, and of the processor; ratios are to the first row's."""

    step_seconds: list[float]
    cpu_seconds: list[float]
    ratios: list[float]
    cpu_ratios: list[float]


def time_rounds(pairs: Sequence[tuple[Contestant, Timed]], rounds: int, steps: int) -> None:
    """Rounds of steps, forwards and backwards in alternation."""
    _, first = pairs[0]
    for turn in range(rounds):
        for one, row in pairs if turn % 2 == 0 else reversed(pairs):
            wall, busy = one.time_steps(steps)
            row.step_seconds.append(wall)
            row.cpu_seconds.append(busy)
        for _, row in pairs:
            row.ratios.append(row.step_seconds[-1] / first.step_seconds[-1])
            row.cpu_ratios.append(row.cpu_seconds[-1] / first.cpu_seconds[-1])


# -- what copies do --------------------------------------------------------------------------


@dataclass(frozen=True)
class Traced:
    """One step, and its copies."""

    start_s: float
    end_s: float
    records: list[CopyRecord]

    @property
    def length_s(self) -> float:
        """Of the step."""
        return self.end_s - self.start_s

    @property
    def moved_bytes(self) -> int:
        """Of the copies, both ways."""
        return sum(its.nbytes for its in self._of("to_host", "to_device"))

    @property
    def transfer_s(self) -> float:
        """Of all copies together."""
        return sum(its.end_s - its.start_s for its in self._of("to_host", "to_device"))

    @property
    def wait_s(self) -> float:
        """Of all waits together."""
        return sum(its.end_s - its.start_s for its in self._of("wait_host", "wait_device"))

    @property
    def hidden(self) -> float:
        """The part of the copies' time for which the step did not wait."""
        return 1 - self.wait_s / self.transfer_s if self.transfer_s else 1.0

    def _of(self, *kinds: str) -> list[CopyRecord]:
        return [record for record in self.records if record.what in kinds]

    def streams(self) -> Streams:
        """In milliseconds from the start of the step."""

        def spans(*kinds: str) -> tuple[Span, ...]:
            ends = ((its.start_s, its.end_s) for its in self._of(*kinds))
            return tuple(
                Span(1e3 * (start - self.start_s), 1e3 * (end - self.start_s))
                for start, end in ends
            )

        waits = spans("wait_host", "wait_device")
        return Streams(1e3 * self.length_s, waits, spans("to_host"), spans("to_device"))


def middle(steps: Sequence[Traced]) -> Traced:
    """The step of median length."""
    return sorted(steps, key=lambda step: step.length_s)[len(steps) // 2]


def planned_streams(report: Report) -> Streams | None:
    """The streams of the plan; None where a cache answered instead of the planner."""
    if report.problem is None:
        return None
    timing = replay(report.problem, report.plan.steps).timing
    before, waits = 0.0, []
    for step, end in zip(report.plan.steps, timing.step_end_us, strict=True):
        if not isinstance(step, str) and end > before:
            waits.append(Span(before / 1e3, end / 1e3))
        before = end

    def spans(kind: Kind) -> tuple[Span, ...]:
        transfers = (its for its in timing.transfers if its.kind == kind)
        return tuple(Span(its.start_us / 1e3, its.end_us / 1e3) for its in transfers)

    return Streams(timing.time_us / 1e3, tuple(waits), spans("to host"), spans("to device"))

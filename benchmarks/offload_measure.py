"""Training steps under one budget, for real: keep everything, recompute, move as well.

The variants train copies of one model in this process, and rounds of their steps are interleaved:
what disturbs the machine disturbs all alike, so step times are compared within a round only. For
each, the bytes measured on the device and in host memory are put beside the budget and what the
report said, the loss and the gradients beside torch.compile's, and the step time beside the
plan's. What the copies did comes from the records of the runtime: the part of their time for which
the step did not wait, and a picture of the three streams beside the planned ones.

On the CPU the copies are slowed down to a link that this machine does not have, and by default one
thread computes, so that copies have a core left. "cpu" is then the processor time of that thread,
waits not included: it tells work from what a busy machine adds. Plans count on op times and copy
speeds that are measured anew in each run. On CUDA the link is the real one; the code is the same,
and nobody has run it there.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fxremat.core.constants import CALL_US

from . import copying, offload_picture
from .models import build
from .offload_picture import Streams
from .offload_steps import (
    Contestant,
    compiled,
    middle,
    planned_streams,
    targets_not_filled,
    time_rounds,
)
from .rows import MIB, format_table, mib, number
from .training import gradient_error, report_fields

TRACED_STEPS = 5
KEEP, RECOMPUTE, BOTH = "keep", "recompute", "both"
"""torch.compile, fxremat, and fxremat with moves."""
MOST_ERROR = {"float32": 1e-4, "bfloat16": 5e-2}
"""Of a gradient, in parts of its largest entry."""
HEAD = ["variant", "peak MiB", "predicted", "budget", "host MiB", "predicted", "step ms",
        "time", "cpu", "predicted", "error", "loss", "gradients"]  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What is trained, and how it is measured. ``budget`` is in percent, copies in bytes/s."""

    model: str
    size: str
    device: str
    dtype: str
    executor: str
    budget: int
    bandwidth: int | None
    solver: str
    rounds: int
    steps: int
    threads: int
    seed: int


def settings_of(options: argparse.Namespace) -> Settings:
    """From the command line; a GPU has a link of its own."""
    given = {name: getattr(options, name) for name in Settings.__dataclass_fields__}
    given["bandwidth"] = None if options.device == "cuda" else options.bandwidth * 10**6
    return Settings(**given)


@dataclass
class Row:
    """The figures of one variant; ratios are to torch.compile, round by round."""

    variant: str
    budget_bytes: int | None
    peak_bytes: int
    predicted_peak_bytes: int | None
    host_peak_bytes: int
    predicted_host_bytes: int | None
    predicted_ratio: float | None
    loss: float
    gradient_error: float
    report: dict[str, Any] | None = None
    """fxremat's facts: variants taken, dry runs, seconds of each stage and more."""
    step_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    cpu_ratios: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Of step times: the median over the rounds."""
        return median(self.ratios)

    @property
    def prediction_error(self) -> float | None:
        """How much more the plan says than was measured, in parts of what was measured."""
        return None if self.predicted_ratio is None else self.predicted_ratio / self.ratio - 1

    def to_json(self) -> dict[str, Any]:
        """Fields and derived figures."""
        return {**asdict(self), "ratio": self.ratio, "prediction_error": self.prediction_error}

    def cells(self) -> list[str]:
        """A line of the table."""
        return [
            self.variant,
            mib(self.peak_bytes, 2),
            mib(self.predicted_peak_bytes, 2),
            mib(self.budget_bytes, 2),
            mib(self.host_peak_bytes, 2),
            mib(self.predicted_host_bytes, 2),
            f"{1e3 * median(self.step_seconds):.1f}",
            f"{self.ratio:.3f}",
            f"{median(self.cpu_ratios):.3f}",
            number(self.predicted_ratio, ".3f"),
            number(self.prediction_error, "+.1%"),
            f"{self.loss:.5f}",
            f"{self.gradient_error:.1e}",
        ]


def failures_of(row: Row, dtype: str) -> Iterator[str]:
    """The promises that a variant breaks."""
    if row.budget_bytes is not None and row.peak_bytes > row.budget_bytes:
        yield f"{row.variant}: {row.peak_bytes:,} bytes, budget {row.budget_bytes:,}"
    if row.predicted_host_bytes is not None and row.host_peak_bytes > row.predicted_host_bytes:
        promised = f"promised {row.predicted_host_bytes:,}"
        yield f"{row.variant}: {row.host_peak_bytes:,} bytes of host memory, {promised}"
    if row.gradient_error > MOST_ERROR.get(dtype, 1e-2):
        yield f"{row.variant}: gradients differ by {row.gradient_error:.1e}"


@dataclass(frozen=True)
class Copying:
    """Medians over traced steps: what copies took, and for how much of it the step waited."""

    step_seconds: float
    transfer_seconds: float
    wait_seconds: float
    hidden: float
    planned_hidden: float | None
    moved_bytes: int
    planned_bytes_per_s: tuple[float, float] | None


@dataclass(frozen=True)
class Found:
    """All that was measured."""

    settings: Settings
    rows: list[Row]
    copying: Copying
    measured: Streams
    planned: Streams | None
    summary: str

    @property
    def failures(self) -> list[str]:
        """The promises that are broken."""
        return [text for row in self.rows for text in failures_of(row, self.settings.dtype)]


# -- all of it -------------------------------------------------------------------------------


@contextmanager
def measured_anew() -> Iterator[None]:
    """Inductor's cache, and with it plans and op times, in a folder of its own."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    prefix = "fxremat-benchmark-"
    # Inductor's workers may still write into it
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before


def run(settings: Settings) -> Found:
    """Compile, measure, compare, and time."""
    torch.set_num_threads(settings.threads)
    torch.compiler.reset()
    rate = settings.bandwidth
    slow = copying.set_copy_speed(rate, rate, CALL_US / 1e6) if rate else nullcontext()
    with measured_anew(), slow:
        with targets_not_filled():
            everyone = list(_compiled(settings))
        rows = _rows(everyone, settings.seed)
        with targets_not_filled():
            time_rounds([*zip(everyone, rows, strict=True)], settings.rounds, settings.steps)
            return _found(settings, rows, everyone[-1])


def _compiled(settings: Settings) -> Iterator[Contestant]:
    """The variants; the budget is a part of torch.compile's measured peak."""
    dtype = getattr(torch, settings.dtype)
    model, arguments = build(settings.model, settings.size, settings.device, dtype, settings.seed)
    plain = compiled(KEEP, model, arguments, settings.executor, None)
    yield plain
    options = {
        "memory_budget": plain.peak_bytes() * settings.budget // 100,
        "reserve": 0,
        "solver": settings.solver,
        "op_times": "measured",  # and the speed of copies
    }
    for name in (RECOMPUTE, BOTH):
        print(f"{settings.model}/{settings.size}: {name} ...", flush=True)
        given = {**options, "offload": name == BOTH}
        yield compiled(name, model, arguments, settings.executor, given)


def _rows(everyone: Sequence[Contestant], seed: int) -> list[Row]:
    """Everything but the times; all against the first, which is torch.compile."""
    _, expected = everyone[0].training.gradients(seed)
    return [_row(one, seed, expected) for one in everyone]


def _row(one: Contestant, seed: int, expected: dict[str, torch.Tensor]) -> Row:
    loss, gradients = one.training.gradients(seed)
    report = one.report
    return Row(
        variant=one.variant,
        budget_bytes=None if report is None else report.budget_bytes,
        peak_bytes=one.peak_bytes(),
        predicted_peak_bytes=None if report is None else report.predicted_peak_bytes,
        host_peak_bytes=one.host_peak_bytes(),
        predicted_host_bytes=None if report is None else report.memory.host_peak_bytes,
        predicted_ratio=None if report is None else 1 + report.time_overhead,
        loss=loss,
        gradient_error=gradient_error(gradients, expected),
        report=None if report is None else report_fields(report),
    )


def _found(settings: Settings, rows: list[Row], both: Contestant) -> Found:
    """The rows, and what the copies of some more steps do."""
    steps = [both.traced_step() for _ in range(TRACED_STEPS)]
    assert both.report is not None
    planned, problem = planned_streams(both.report), both.report.problem
    speed = None if problem is None else problem.copies
    copying = Copying(
        step_seconds=median(step.length_s for step in steps),
        transfer_seconds=median(step.transfer_s for step in steps),
        wait_seconds=median(step.wait_s for step in steps),
        hidden=median(step.hidden for step in steps),
        planned_hidden=None if planned is None else planned.hidden,
        moved_bytes=steps[0].moved_bytes,
        planned_bytes_per_s=None if speed is None else (1e6 * speed.to_host, 1e6 * speed.to_device),
    )
    return Found(settings, rows, copying, middle(steps).streams(), planned, both.report.summary())


# -- how it is shown -------------------------------------------------------------------------


def text(found: Found) -> str:
    """The table, the copies, and what went wrong."""
    its, copies = found.settings, found.copying
    link = f"copies at {its.bandwidth / 1e6:g} MB/s" if its.bandwidth else "the machine's own link"
    planned = "" if copies.planned_hidden is None else f", planned {copies.planned_hidden:.1%}"
    lines = [
        f"\n{its.model} ({its.size}, {its.device}, {its.dtype}), {its.executor}, {its.threads} "
        f"threads, budget {its.budget} % of torch.compile's peak, {link}",
        format_table([HEAD, *(row.cells() for row in found.rows)]),
        found.summary,
        _counted_on(found),
        f"copies of a step: {copies.moved_bytes / MIB:.2f} MiB in "
        f"{1e3 * copies.transfer_seconds:.1f} ms, waited for {1e3 * copies.wait_seconds:.1f} ms of "
        f"{1e3 * copies.step_seconds:.1f} ms; hidden {copies.hidden:.1%}{planned}",
    ]
    return "\n".join([*lines, *(f"FAILED: {failure}" for failure in found.failures)])


def _counted_on(found: Found) -> str:
    """What the plan counts on, beside what there is."""
    speeds, planned = found.copying.planned_bytes_per_s, found.planned
    if speeds is None or planned is None:
        return "the plan came from a cache"
    out, back = (speed / 1e6 for speed in speeds)
    return (
        f"the plan counts on a step of {planned.length:.1f} ms, of which {planned.waited:.1f} ms "
        f"waiting, and copies at {out:.0f} and {back:.0f} MB/s"
    )


def to_json(found: Found) -> dict[str, Any]:
    """Settings, rows and copies."""
    return {
        "settings": asdict(found.settings),
        "rows": [row.to_json() for row in found.rows],
        "copies": asdict(found.copying),
        "measured_streams_ms": asdict(found.measured),
        "planned_streams_ms": None if found.planned is None else asdict(found.planned),
        "plan": found.summary,
        "failures": found.failures,
    }


def draw(found: Found, path: Path) -> None:
    """The streams of one measured step, and those of its plan."""
    its = found.settings
    name = f"{its.model}, {its.size}, {its.dtype} on {its.device}"
    panels = {f"{name}: one measured step": found.measured}
    if found.planned is not None:
        panels[f"{name}: as planned"] = found.planned
    offload_picture.draw(panels, path)

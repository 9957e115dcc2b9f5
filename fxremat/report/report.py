"""The report of one compiled graph: plain data, JSON in and out, one line and many lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxremat.core.events import RunEvents, run_events_from_json, run_events_to_json
from fxremat.core.plan import Plan, plan_to_json, steps_from_json
from fxremat.core.problem import Problem, problem_from_json, problem_to_json
from fxremat.core.step import Version
from fxremat.core.timeline import Lifetime
from fxremat.report.chrome_trace import write_chrome_trace
from fxremat.report.source_location import Place
from fxremat.sizes import format_bytes


@dataclass(frozen=True)
class Row:
    """Something worth naming: what and where, its bytes, how often and how long it runs again."""

    what: str
    bytes: int
    times: int = 0
    time_us: float = 0.0


@dataclass(frozen=True)
class Report:
    """What was decided for one graph. Peaks are bytes in all, resident ones included.

    ``predicted_peak_bytes`` is the peak of Inductor's own kernels where they were rehearsed, else
    that of the planned graph; it is in allocated bytes. ``predicted_reserved_bytes`` is what a
    model of torch's allocator reserves for two steps on CUDA; None elsewhere. ``segment_bytes`` of
    it are one segment, taken before the first step. ``count`` says which of the two the budget
    counts. Peaks are those of every step but the first, to which
    ``tuning_bytes`` of the budget are left: kernels are tuned in it.
    ``minimum_peak_bytes`` is the least budget that can be met, as the error names it; None where it
    was not looked for (`Explanation.minimum_peak_bytes` looks).
    ``order`` says who orders what runs: Inductor, the plan, or torch's own partition.
    ``time_overhead`` is the added time over the keep-all schedule's, as a fraction. ``timeline`` is
    bytes live per step. ``moved`` are the values that go to host memory, and how often each comes
    back. ``variants`` are the variants taken, with the bytes of what they stand in for; overhead
    and keep-all peak are those of the graph without them. ``problem`` is what was planned: the
    graph with those variants in place. ``as_unit`` is what the graph takes beside what others hold,
    where several of its runs wait at once, and ``events`` what it asks of CUDA's allocator then.
    ``lifetimes`` say when each storage is there, in steps of ``timeline``; ``making`` is the node
    that each of these steps computes, "" where none is known, and the first ``forward_steps`` of
    them are the forward's. ``places`` are the nodes' modules and source lines.
    ``step_peak_bytes`` is the predicted peak of a whole step, as far as it is known when the graph
    is compiled: with all runs of it that wait at once, and all that is held beside them. So that of
    the newest report knows most. What threads of gloo hold for a moment is planned for, and no part
    of it. None without a budget.
    ``keep_all_timeline`` is bytes live per step of the keep-all schedule, of which the first
    ``keep_all_forward_steps`` are the forward's.
    """

    graph: int
    nodes: int
    budget_bytes: int | None
    resident_bytes: int
    keep_all_peak_bytes: int
    planned_peak_bytes: int
    predicted_peak_bytes: int
    minimum_peak_bytes: int | None
    held_bytes: int
    time_overhead: float
    saved: tuple[Row, ...]
    recomputed: tuple[Row, ...]
    at_peak: tuple[Row, ...]
    timeline: tuple[int, ...]
    problem: Problem = field(repr=False)
    plan: Plan
    rehearsals: int
    predicted_reserved_bytes: int | None = None
    segment_bytes: int = 0
    tuning_bytes: int = 0
    count: str = "allocated"
    order: str = "inductor"
    moved: tuple[Row, ...] = ()
    variants: tuple[Row, ...] = ()
    host_peak_bytes: int = 0
    as_unit: Version | None = None
    events: RunEvents | None = field(default=None, repr=False)
    seconds: dict[str, float] = field(default_factory=dict)
    from_cache: bool = False
    lifetimes: tuple[Lifetime, ...] = field(default=(), repr=False)
    making: tuple[str, ...] = field(default=(), repr=False)
    forward_steps: int = 0
    places: dict[str, Place] = field(default_factory=dict, repr=False)
    keep_all_timeline: tuple[int, ...] = field(default=(), repr=False)
    keep_all_forward_steps: int = 0
    step_peak_bytes: int | None = None

    @property
    def counted_peak_bytes(self) -> int:
        """The peak that is compared with the budget."""
        if self.count == "reserved" and self.predicted_reserved_bytes is not None:
            return self.predicted_reserved_bytes
        return self.predicted_peak_bytes

    @property
    def fragmentation_bytes(self) -> int:
        """What the allocator reserves beyond the peak of what is allocated."""
        reserved = self.predicted_reserved_bytes
        return 0 if reserved is None else reserved - self.predicted_peak_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes kept from the forward for the backward, inputs of the graph not among them."""
        return sum(row.bytes for row in self.saved)

    @property
    def recomputed_bytes(self) -> int:
        """Bytes that are written again in the backward."""
        return sum(row.bytes * row.times for row in self.recomputed)

    @property
    def moved_bytes(self) -> int:
        """Bytes that come back from host memory."""
        return sum(row.bytes * row.times for row in self.moved)

    @property
    def own_seconds(self) -> float:
        """What we added to compilation: all stages but the tracing of the joint graph."""
        return sum(spent for stage, spent in self.seconds.items() if stage != "trace")

    def save_trace(self, path: str | Path) -> None:
        """Write the planned step as a Chrome trace, for ui.perfetto.dev and others."""
        write_chrome_trace(path, [self])

    def save_snapshot(self, path: str | Path) -> None:
        """Write the planned step as a snapshot of the allocator, for pytorch.org/memory_viz."""
        from fxremat.report.snapshot import write_snapshot  # needs a planner, and few ask for it

        write_snapshot(path, [self])

    def summary(self) -> str:
        """One line for the log."""
        budget = "no budget" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        runs = sum(row.times for row in self.recomputed)
        peak = format_bytes(self.predicted_peak_bytes)
        if self.counted_peak_bytes != self.predicted_peak_bytes:
            peak += f" ({format_bytes(self.counted_peak_bytes)} reserved)"
        moved = f"{len(self.moved)} moved ({format_bytes(self.moved_bytes)}) | "
        moved = moved if self.moved else ""
        taken = f"{len(self.variants)} variants | " if self.variants else ""
        return (
            f"fxremat: graph {self.graph}: {self.nodes} nodes, keep-all peak "
            f"{format_bytes(self.keep_all_peak_bytes)} -> {peak} of {budget} | "
            f"{self.time_overhead:+.1%} time | {runs} recomputed "
            f"({format_bytes(self.recomputed_bytes)}) | {moved}{taken}{self.plan.solver} | "
            f"{self.own_seconds:.1f} s{' (cached)' if self.from_cache else ''}"
        )

    def __str__(self) -> str:
        resident, saved = format_bytes(self.resident_bytes), format_bytes(self.saved_bytes)
        lines = [self.summary(), f"  resident {resident}, saved {saved}"]
        if self.minimum_peak_bytes is not None:
            lines[-1] += f", least peak {format_bytes(self.minimum_peak_bytes)}"
        lines += self._of_the_allocator()
        lines += _table("largest at the peak", self.at_peak)
        lines += _table("saved for the backward", self.saved)
        lines += _table("recomputed in the backward", self.recomputed)
        lines += _table("moved to host memory and back", self.moved)
        lines += _table("operator variants taken", self.variants)
        stages = ", ".join(f"{name} {value:.2f}" for name, value in self.seconds.items())
        return "\n".join([*lines, f"  seconds: {stages}"])

    def _of_the_allocator(self) -> list[str]:
        """What it reserves, and what the budget counts; nothing where that is the same."""
        if self.predicted_reserved_bytes is None:
            return []
        allocated, reserved, unused = map(
            format_bytes,
            (self.predicted_peak_bytes, self.predicted_reserved_bytes, self.fragmentation_bytes),
        )
        tuning = format_bytes(self.tuning_bytes)
        more = f", {tuning} left for tuning in the first step" if self.tuning_bytes else ""
        if self.segment_bytes:
            more = f", of which {format_bytes(self.segment_bytes)} are one segment{more}"
        return [
            f"  peak: {allocated} allocated + {unused} fragmentation = {reserved} reserved{more}; "
            f"the budget counts what is {self.count}"
        ]


def added_time(reports: Sequence[Report]) -> float:
    """Added time over the keep-all schedule's, as a fraction of the time of all graphs."""
    time = sum(each.plan.time_us for each in reports)
    base = sum(each.plan.time_us / (1 + each.time_overhead) for each in reports)
    return time / base - 1 if base else 0.0


def _table(title: str, rows: tuple[Row, ...], limit: int = 10) -> list[str]:
    if not rows:
        return []
    total = sum(row.bytes * max(row.times, 1) for row in rows)
    lines = [f"  {title} ({len(rows)}, {format_bytes(total)}):"]
    for row in sorted(rows, key=lambda r: -r.bytes * max(r.times, 1))[:limit]:
        again = f"  x{row.times}" if row.times else ""
        lines.append(f"    {format_bytes(row.bytes):>11}  {row.what}{again}")
    return lines + ([f"    ... and {len(rows) - limit} more"] if len(rows) > limit else [])


def report_to_json(report: Report) -> dict[str, Any]:
    """The report as JSON data."""
    data = dataclasses.asdict(dataclasses.replace(report, events=None))
    data["problem"] = problem_to_json(report.problem)
    data["plan"] = plan_to_json(report.plan)
    data["events"] = None if report.events is None else run_events_to_json(report.events)
    return data


def report_from_json(data: dict[str, Any]) -> Report:
    """A report read back; raises `KeyError` or `TypeError` where it is not one."""
    tables = ("saved", "recomputed", "moved", "variants", "at_peak")
    rows = {key: tuple(Row(**row) for row in data[key]) for key in tables}
    plan = Plan(**{**data["plan"], "steps": steps_from_json(data["plan"])})
    problem, timeline = problem_from_json(data["problem"]), tuple(data["timeline"])
    unit = None if data["as_unit"] is None else Version(**data["as_unit"])
    events = None if data["events"] is None else run_events_from_json(data["events"])
    made = {
        "plan": plan, "problem": problem, "timeline": timeline, "as_unit": unit, "events": events,
        "lifetimes": tuple(Lifetime(**one) for one in data["lifetimes"]),
        "making": tuple(data["making"]),
        "places": {name: Place(**place) for name, place in data["places"].items()},
        "keep_all_timeline": tuple(data["keep_all_timeline"]),
    }  # fmt: skip
    return Report(**{**data, **rows, **made})

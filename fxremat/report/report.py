"""The report of one compiled graph: what was decided, as plain data, as one line and as a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from fxremat.core.events import RunEvents
from fxremat.core.layout import OwnPools
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.step import Version
from fxremat.core.timeline import Lifetime
from fxremat.sizes import format_bytes

if TYPE_CHECKING:
    from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass(frozen=True)
class SourceLocation:
    """The innermost module and the line that a node comes from; "" and 0 where they are not known.

    ``value`` is the value of the problem that the node holds. ``copy`` says why it is another copy
    of that value: "again" where it is recomputed, "moved" where it comes back from the host.
    """

    module: str = ""
    file: str = ""
    line: int = 0
    value: str = ""
    copy: str = ""

    @property
    def source(self) -> str:
        """``model.py:12``."""
        return f"{self.file}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.module, self.source)))


def module_of(node: fx.Node) -> str:
    """The innermost module that the node was traced in, as the user would write it."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    names = [entry[0] for entry in stack.values() if isinstance(entry, tuple) and entry[0]]
    text = str(names[-1]) if names else ""
    text = re.sub(r"L\['self'\]\.?", "", text)
    text = re.sub(r"_modules\['([^']+)'\]", r"\1", text)
    return text.replace("__", ".") if text.startswith("L__self__") else text


def location_of(node: fx.Node) -> SourceLocation:
    """The module, and the innermost line of a file that is not torch's own."""
    trace = node.meta.get("stack_trace") or ""
    frames = list(_FRAME.finditer(trace))
    own = [f for f in frames if "/torch/" not in f["file"]] or frames
    module = module_of(node)
    if not own:
        return SourceLocation(module)
    return SourceLocation(module, own[-1]["file"].rsplit("/", 1)[-1], int(own[-1]["line"]))


def describe(node: fx.Node) -> str:
    """A node with its module and source line: ``addmm_3 [layers.1.mlp, model.py:88]``."""
    if node.op == "placeholder":
        return f"{node.name} [graph input]"
    location = str(location_of(node))
    return f"{node.name} [{location}]" if location else node.name


T = TypeVar("T")

MOST_ROWS = 20
"""Lines of the table of what is largest at the peak."""
MUCH = 1 / 4
"""The part of the bytes live at the peak from which on an output and its gradient are mentioned."""


EXPORTERS: dict[str, Callable[[str | Path, Sequence[Report]], None]] = {}
"""What writes reports into a file, by the kind of file. `fxremat.report` fills it: exporters import
the report, and the report does not import them."""


@dataclass(frozen=True)
class Row:
    """Something worth naming: what and where, its bytes, how often and how long it runs again."""

    what: str
    bytes: int
    times: int = 0
    time_us: float = 0.0


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes on the device, and what the budget counts of them. Peaks include resident bytes.

    ``held_bytes`` are held outside of the graph, and part of every peak.
    ``predicted_peak_bytes`` is the peak of Inductor's own kernels where a dry run counted them,
    else that of the planned graph; it is in allocated bytes. ``predicted_reserved_bytes`` is what a
    model of torch's allocator reserves in a loop on CUDA, None elsewhere; of it are the graph's
    ``own`` one block in which buffers have planned addresses, the arena, and a pool for the rest.
    ``count`` says which of the two the budget counts. Peaks are those of every step but the first:
    in that one ``tuning_bytes`` of the budget are left to the tuning of kernels.
    ``minimum_peak_bytes`` is the least budget that can be met, as the error names it; None where it
    was not looked for (`Explanation.minimum_peak_bytes` looks). ``store_all_peak_bytes`` is the
    peak of running every op once, in the graph without operator variants.
    """

    budget_bytes: int | None
    resident_bytes: int
    held_bytes: int
    store_all_peak_bytes: int
    planned_peak_bytes: int
    predicted_peak_bytes: int
    minimum_peak_bytes: int | None = None
    predicted_reserved_bytes: int | None = None
    own: OwnPools = field(default_factory=OwnPools)
    tuning_bytes: int = 0
    host_peak_bytes: int = 0
    count: str = "allocated"

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

    def beside(self, held_bytes: int) -> MemoryFigures:
        """The same graph where so many bytes are held beside it."""
        more, reserved = held_bytes - self.held_bytes, self.predicted_reserved_bytes
        return replace(
            self,
            held_bytes=held_bytes,
            store_all_peak_bytes=self.store_all_peak_bytes + more,
            planned_peak_bytes=self.planned_peak_bytes + more,
            predicted_peak_bytes=self.predicted_peak_bytes + more,
            predicted_reserved_bytes=None if reserved is None else reserved + more,
        )


@dataclass(frozen=True)
class ValueTables:
    """What happens to which values, a row each.

    ``moved`` go to host memory, and come back so many times. ``variants`` are the operator variants
    taken, with the bytes of what they stand in for.
    """

    saved: tuple[Row, ...] = ()
    recomputed: tuple[Row, ...] = ()
    moved: tuple[Row, ...] = ()
    variants: tuple[Row, ...] = ()
    at_peak: tuple[Row, ...] = ()


@dataclass(frozen=True)
class StepMemory:
    """The memory of the step as it will run: by Inductor's kernels where a dry run counted them.

    ``live_bytes`` are live at each step. ``lifetimes`` say when each storage is there. ``computed``
    is the node that each step computes, "" where none is known; the first ``forward_steps`` of them
    are the forward's. ``locations`` are modules and source lines by node. ``store_all_live_bytes``
    are those of running every op once, the first ``store_all_forward_steps`` in the forward.
    """

    live_bytes: tuple[int, ...]
    lifetimes: tuple[Lifetime, ...] = ()
    computed: tuple[str, ...] = ()
    forward_steps: int = 0
    locations: dict[str, SourceLocation] = field(default_factory=dict)
    store_all_live_bytes: tuple[int, ...] = ()
    store_all_forward_steps: int = 0


@dataclass(frozen=True)
class Provenance:
    """Where the plan comes from.

    ``nodes`` are in the joint graph, ``order`` says who orders what runs: Inductor, the plan, or
    torch's own partition. ``dry_runs`` counted the bytes of candidates, ``seconds`` were spent by
    stage.
    """

    nodes: int
    dry_runs: int = 0
    order: str = "inductor"
    seconds: dict[str, float] = field(default_factory=dict)


class _Shortcut(Generic[T]):
    """An attribute of a report that one of its records has."""

    def __init__(self, read: Callable[[Report], T]) -> None:
        self.read = read

    def __get__(self, report: Report, owner: type[Report]) -> T:
        return self.read(report)


@dataclass(frozen=True)
class Report:
    """What was decided for one graph: its records, and shortcuts to what they hold.

    ``problem`` is what was planned: the graph with the operator variants in place.
    ``time_overhead`` is the added time over running every op of the graph without them once, as a
    fraction. ``as_part`` is what the graph takes beside what others hold, where several of its
    forwards are in flight, and ``events`` what it asks of CUDA's allocator then.
    ``step_peak_bytes`` is the predicted peak of a whole step, as far as it is known when the graph
    is compiled: with all its forwards in flight, and all that is held outside of them. So that of
    the newest report knows most. It leaves out what threads of gloo hold for a short time, which is
    planned for. It is None without a budget.
    """

    graph: int
    time_overhead: float
    memory: MemoryFigures
    values: ValueTables
    provenance: Provenance
    plan: Plan
    problem: Problem = field(repr=False)
    step: StepMemory = field(repr=False)
    as_part: Version | None = None
    events: RunEvents | None = field(default=None, repr=False)
    step_peak_bytes: int | None = None
    from_cache: bool = False

    budget_bytes = _Shortcut(lambda report: report.memory.budget_bytes)
    resident_bytes = _Shortcut(lambda report: report.memory.resident_bytes)
    held_bytes = _Shortcut(lambda report: report.memory.held_bytes)
    store_all_peak_bytes = _Shortcut(lambda report: report.memory.store_all_peak_bytes)
    planned_peak_bytes = _Shortcut(lambda report: report.memory.planned_peak_bytes)
    predicted_peak_bytes = _Shortcut(lambda report: report.memory.predicted_peak_bytes)
    predicted_reserved_bytes = _Shortcut(lambda report: report.memory.predicted_reserved_bytes)
    counted_peak_bytes = _Shortcut(lambda report: report.memory.counted_peak_bytes)
    fragmentation_bytes = _Shortcut(lambda report: report.memory.fragmentation_bytes)
    minimum_peak_bytes = _Shortcut(lambda report: report.memory.minimum_peak_bytes)
    arena_bytes = _Shortcut(lambda report: report.memory.own.arena_bytes)
    pool_bytes = _Shortcut(lambda report: report.memory.own.pool_bytes)
    tuning_bytes = _Shortcut(lambda report: report.memory.tuning_bytes)
    host_peak_bytes = _Shortcut(lambda report: report.memory.host_peak_bytes)
    count = _Shortcut(lambda report: report.memory.count)
    saved = _Shortcut(lambda report: report.values.saved)
    recomputed = _Shortcut(lambda report: report.values.recomputed)
    moved = _Shortcut(lambda report: report.values.moved)
    variants = _Shortcut(lambda report: report.values.variants)
    at_peak = _Shortcut(lambda report: report.values.at_peak)
    timeline = _Shortcut(lambda report: report.step.live_bytes)
    lifetimes = _Shortcut(lambda report: report.step.lifetimes)
    nodes = _Shortcut(lambda report: report.provenance.nodes)
    order = _Shortcut(lambda report: report.provenance.order)
    dry_runs = _Shortcut(lambda report: report.provenance.dry_runs)
    seconds = _Shortcut(lambda report: report.provenance.seconds)

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
        """What fxremat added to compilation: all stages but the tracing of the joint graph."""
        return sum(spent for stage, spent in self.seconds.items() if stage != "trace")

    def save_trace(self, path: str | Path) -> None:
        """Write the planned step as a Chrome trace, for ui.perfetto.dev and others."""
        EXPORTERS["trace"](path, [self])

    def save_snapshot(self, path: str | Path) -> None:
        """Write the planned step as a snapshot of the allocator, for pytorch.org/memory_viz."""
        EXPORTERS["snapshot"](path, [self])

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
            f"fxremat: graph {self.graph}: {self.nodes} nodes, store-all peak "
            f"{format_bytes(self.store_all_peak_bytes)} -> {peak} of {budget} | "
            f"{self.time_overhead:+.1%} time | {runs} recomputed "
            f"({format_bytes(self.recomputed_bytes)}) | {moved}{taken}{self.plan.solver} | "
            f"{self.own_seconds:.1f} s{' (cached)' if self.from_cache else ''}"
        )

    def __str__(self) -> str:
        resident, saved = format_bytes(self.resident_bytes), format_bytes(self.saved_bytes)
        lines = [self.summary(), f"  resident {resident}, saved {saved}"]
        if self.minimum_peak_bytes is not None:
            lines[-1] += f", least peak {format_bytes(self.minimum_peak_bytes)}"
        lines += _allocator_line(self.memory)
        lines += _table("largest at the peak", self.at_peak)
        lines += _table("saved for the backward", self.saved)
        lines += _table("recomputed in the backward", self.recomputed)
        lines += _table("moved to host memory and back", self.moved)
        lines += _table("operator variants taken", self.variants)
        stages = ", ".join(f"{name} {value:.2f}" for name, value in self.seconds.items())
        return "\n".join([*lines, f"  seconds: {stages}"])


def peak_table(report: Report) -> str:
    """What is planned to be live at the peak of a graph."""
    peak = f"graph {report.graph}: {format_bytes(report.counted_peak_bytes)} at the peak"
    return "\n".join([peak, *_table("largest at the peak", report.at_peak)])


def added_time(reports: Sequence[Report]) -> float:
    """The time that plans add to running every op once, as a fraction, for all graphs together."""
    time = sum(each.plan.time_us for each in reports)
    base = sum(each.plan.time_us / (1 + each.time_overhead) for each in reports)
    return time / base - 1 if base else 0.0


def _allocator_line(memory: MemoryFigures) -> list[str]:
    """What torch's allocator reserves, and what the budget counts; nothing on the CPU."""
    if memory.predicted_reserved_bytes is None:
        return []
    allocated, reserved = memory.predicted_peak_bytes, memory.predicted_reserved_bytes
    parts = (allocated, memory.fragmentation_bytes, reserved)
    peak = "{} allocated + {} unused = {} reserved".format(*map(format_bytes, parts))
    more = ""
    if memory.own.arena_bytes:
        more += f", of which {format_bytes(memory.own.arena_bytes)} are planned addresses"
    if memory.tuning_bytes:
        more += f", {format_bytes(memory.tuning_bytes)} left for tuning kernels in the first step"
    return [f"  peak: {peak}{more}; the budget counts {memory.count} bytes"]


def _table(title: str, rows: tuple[Row, ...], limit: int = 10) -> list[str]:
    if not rows:
        return []
    total = sum(row.bytes * max(row.times, 1) for row in rows)
    lines = [f"  {title} ({len(rows)}, {format_bytes(total)}):"]
    for row in sorted(rows, key=lambda r: -r.bytes * max(r.times, 1))[:limit]:
        again = f"  x{row.times}" if row.times else ""
        lines.append(f"    {format_bytes(row.bytes):>11}  {row.what}{again}")
    return lines + ([f"    ... and {len(rows) - limit} more"] if len(rows) > limit else [])

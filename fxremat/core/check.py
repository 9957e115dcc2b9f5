"""The verifier of schedules: is this one possible, and what does it need?

Written from the definitions, the obvious way, for plans of any origin. Shares no code with
`fxremat.core.timeline` or a solver, so that it does not share their mistakes.

What is there is a set of values. At the start it holds the inputs and the resident values. A step
puts in what its op writes. Then everything goes that will not be read before it is written again;
resident values and outputs never go. The bytes of a step are those of the set while the op runs,
plus its workspace, less what the op writes in place.

A move to the host reads the value until its transfer has been waited for; a move to the device
puts the value in when it is started, but no op may read it before the wait. Transfers of one
direction run one at a time, beside the ops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fxremat.core.problem import Op, Problem
from fxremat.core.schedule import Step

FailureKind = Literal[
    "unknown op",
    "op never runs",
    "op runs twice",
    "out of order",
    "read is not there",
    "output is not there",
    "over budget",
    "may not move",
    "nothing on the host",
    "still moving",
    "nothing to wait for",
    "never waited for",
    "over host memory",
    "not on the host at the end",
]


@dataclass(frozen=True)
class Failure:
    """One rule that a schedule breaks, and where: the op, the value, the step."""

    kind: FailureKind
    op: str | None = None
    value: str | None = None
    step: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        where = (("step", self.step), ("op", self.op), ("value", self.value))
        parts = [f"{word} {name}" for word, name in where if name is not None]
        return ": ".join(filter(None, [self.kind, ", ".join(parts), self.detail]))


@dataclass(frozen=True)
class Verdict:
    """What the verifier found. Peaks and time count the steps whose op is known."""

    failures: tuple[Failure, ...]
    peak_bytes: int
    time_us: float
    host_peak_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether no rule is broken."""
        return not self.failures

    def __str__(self) -> str:
        head = f"peak {self.peak_bytes:,} bytes, time {self.time_us:.1f} us"
        return "\n".join([f"{'ok' if self.ok else 'failed'}: {head}", *map(str, self.failures)])


def check(problem: Problem, steps: Sequence[Step], budget_bytes: int | None = None) -> Verdict:
    """Check ``steps`` against the rules of ``problem`` and, where given, a budget."""
    events = [
        _event(problem, index, step)
        for index, step in enumerate(steps)
        if not isinstance(step, str) or step in problem.op_of
    ]
    live = _bytes_of_steps(problem, events)
    host = _host_bytes_of_steps(problem, events)
    cap = None if problem.copies is None else problem.copies.host_bytes
    failures = [
        *_unknown_ops(problem, steps),
        *_wrong_counts(problem, events),
        *_wrong_order(problem, events),
        *_absent_reads(problem, events),
        *_absent_outputs(problem, events),
        *_wrong_moves(problem, events),
        *_too_many_bytes("over budget", "budget", events, live, budget_bytes),
        *_too_many_bytes("over host memory", "host memory", events, host, cap),
    ]
    peak_bytes = max(live, default=_size_of(problem, set(problem.resident)))
    time_us = _time_us(problem, events)
    return Verdict(tuple(failures), peak_bytes, time_us, max(host, default=0))


@dataclass(frozen=True)
class _Event:
    """A step: its op, or the value that moves; what it reads, and puts on the device."""

    step: int
    kind: Literal["op", "to host", "to device", "wait"]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    op: Op | None = None
    value: str = ""

    @property
    def op_name(self) -> str | None:
        return None if self.op is None else self.op.name


def _event(problem: Problem, index: int, step: Step) -> _Event:
    if isinstance(step, str):
        op = problem.op_of[step]
        return _Event(index, "op", op.reads, op.writes, op)
    its = (step.value,)
    reads, writes = ((), its) if step.kind == "to device" else (its, ())
    return _Event(index, step.kind, reads, writes, value=step.value)


def _unknown_ops(problem: Problem, steps: Sequence[Step]) -> Iterator[Failure]:
    for index, step in enumerate(steps):
        if isinstance(step, str) and step not in problem.op_of:
            yield Failure("unknown op", op=step, step=index)
        if not isinstance(step, str) and step.value not in problem.bytes_of:
            yield Failure("may not move", value=step.value, step=index, detail="no such value")


def _wrong_counts(problem: Problem, events: Sequence[_Event]) -> Iterator[Failure]:
    """Every op runs at least once; an op that is not repeatable runs only once."""
    where: dict[str, list[int]] = {op.name: [] for op in problem.ops}
    for event in events:
        if event.op is not None:
            where[event.op.name].append(event.step)
    for op in problem.ops:
        runs = where[op.name]
        if not runs:
            yield Failure("op never runs", op=op.name)
        if len(runs) > 1 and not op.repeatable:
            detail = f"is not repeatable, but runs at steps {', '.join(map(str, runs))}"
            yield Failure("op runs twice", op=op.name, step=runs[1], detail=detail)


def _wrong_order(problem: Problem, events: Sequence[_Event]) -> Iterator[Failure]:
    """The first runs of the ops are in base order."""
    place = {op.name: index for index, op in enumerate(problem.ops)}
    first_run = {event.op.name: event for event in reversed(events) if event.op is not None}
    latest: str | None = None
    for name, event in sorted(first_run.items(), key=lambda item: item[1].step):
        if latest is not None and place[name] < place[latest]:
            detail = f"first runs after {latest}, which follows it in base order"
            yield Failure("out of order", op=name, step=event.step, detail=detail)
        else:
            latest = name


def _absent_reads(problem: Problem, events: Sequence[_Event]) -> Iterator[Failure]:
    """What a step reads is an input, resident, or was put there by an earlier step."""
    there = {*problem.inputs, *problem.resident}
    for event in events:
        for name in event.reads:
            if name not in there:
                yield Failure("read is not there", event.op_name, name, event.step)
        there.update(event.writes)


def _absent_outputs(problem: Problem, events: Sequence[_Event]) -> Iterator[Failure]:
    there = {*problem.inputs, *problem.resident}
    there.update(*(event.writes for event in events if event.op is not None))
    for name in problem.outputs:
        if name not in there:
            yield Failure("output is not there", value=name)


def _wrong_moves(problem: Problem, events: Sequence[_Event]) -> Iterator[Failure]:
    """A value moves only where it is, one move at a time, and is left alone on its way."""
    moving: dict[str, _Event] = {}
    on_host = set(problem.from_host)
    for event in events:
        name, step = event.value, event.step
        if event.kind == "op":
            # Reading what is on its way to the host does no harm.
            waiting = {v for v, started in moving.items() if started.kind == "to device"}
            for touched in [*(waiting & {*event.reads}), *(moving.keys() & {*event.writes})]:
                yield Failure("still moving", event.op_name, touched, step)
        elif event.kind == "wait":
            if moving.pop(name, None) is None:
                yield Failure("nothing to wait for", value=name, step=step)
        else:
            why = _why_not(problem, name)
            if why is not None:
                yield Failure("may not move", value=name, step=step, detail=why)
            if name in moving:
                yield Failure("still moving", value=name, step=step)
            if event.kind == "to host":
                on_host.add(name)
            elif name not in on_host:
                yield Failure("nothing on the host", value=name, step=step)
            moving[name] = event
    for name, event in moving.items():
        yield Failure("never waited for", value=name, step=event.step)
    for name in problem.host:
        if name not in on_host:
            yield Failure("not on the host at the end", value=name)


def _why_not(problem: Problem, name: str) -> str | None:
    if problem.copies is None:
        return "the problem has no copies"
    if problem.copies.only_host and name not in problem.host:
        return "it does not live in host memory, as what moves here has to"
    if name in problem.resident or name in problem.outputs:
        return "an output or resident"
    return None


def _too_many_bytes(
    kind: FailureKind, limit: str, events: Sequence[_Event], sizes: Sequence[int], most: int | None
) -> Iterator[Failure]:
    """The bytes of every step are within the limit; names the worst step."""
    if most is not None and sizes and max(sizes) > most:
        event = events[sizes.index(max(sizes))]
        detail = f"{max(sizes):,} bytes, {limit} {most:,}"
        yield Failure(kind, op=event.op_name, step=event.step, detail=detail)


def _time_us(problem: Problem, events: Sequence[_Event]) -> float:
    """When everything has ended: ops in a row, and beside them transfers, each way in a row."""
    now = 0.0
    engine = {"to host": 0.0, "to device": 0.0}
    arrives: dict[str, float] = {}
    for event in events:
        if event.op is not None:
            now += event.op.time_us
        elif event.kind == "wait":
            now = max(now, arrives.get(event.value, now))
        elif problem.copies is not None:
            speed = problem.copies.to_host if event.kind == "to host" else problem.copies.to_device
            nbytes = problem.bytes_of.get(event.value, 0)
            takes = problem.copies.latency_us + (nbytes / speed if speed else math.inf)
            begins = max(now, engine[event.kind], arrives.get(event.value, 0.0))
            arrives[event.value] = engine[event.kind] = begins + takes
    return max(now, *engine.values())


def _size_of(problem: Problem, names: set[str]) -> int:
    sizes = problem.bytes_of
    return sum(sizes[name] for name in names)


class _Future:
    """What happens to each value, by step."""

    def __init__(self) -> None:
        self.events: dict[str, list[tuple[int, str]]] = {}

    def add(self, name: str, step: int, what: str) -> None:
        """Something happens to the value in a step; steps come in order."""
        self.events.setdefault(name, []).append((step, what))

    def next(self, name: str, step: int) -> str | None:
        """The next thing that happens to the value after ``step``."""
        return next((what for when, what in self.events.get(name, ()) if when > step), None)


def _host_bytes_of_steps(problem: Problem, events: Sequence[_Event]) -> list[int]:
    """Bytes of moved values in host memory at each step.

    A value comes there when a move to the host starts, and goes after the last wait that follows
    before it is moved there again. Values that live there are not counted.
    """
    future = _Future()
    for step, event in enumerate(events):
        if event.op is None:
            future.add(event.value, step, event.kind)
    out = []
    there: set[str] = set()
    for step, event in enumerate(events):
        if event.kind == "to host" and event.value in problem.bytes_of.keys() - {*problem.host}:
            there.add(event.value)
        out.append(_size_of(problem, there))
        if event.op is None and future.next(event.value, step) in (None, "to host"):
            there.discard(event.value)
    return out


def _bytes_of_steps(problem: Problem, events: Sequence[_Event]) -> list[int]:
    """Bytes on the device while each step runs."""
    future = _Future()
    for step, event in enumerate(events):
        for name in event.reads:
            future.add(name, step, "read")
        for name in event.writes:
            future.add(name, step, "write")
    stays = {*problem.resident, *problem.outputs}
    there = {*problem.inputs, *problem.resident}
    live = []
    for step, event in enumerate(events):
        new = {name for name in event.writes if name in problem.bytes_of} - there
        there |= new
        # Only what the step touches can change its mind about staying; at first, everything.
        touched = set(there) if step == 0 else {*event.reads, *event.writes} & there
        gone = {name for name in touched - stays if future.next(name, step) != "read"}
        own = 0
        if event.op is not None:
            own = event.op.workspace_bytes - _size_in_place(problem, event.op, new, gone)
        live.append(_size_of(problem, there) + own)
        there -= gone
    return live


def _size_in_place(problem: Problem, op: Op, new: set[str], gone: set[str]) -> int:
    """Bytes that are not needed twice, because the op writes over a value that goes.

    A pair counts if its write is new in this step, its read goes after it, and no earlier pair
    of the op has used either.
    """
    used: set[str] = set()
    shared = 0
    for read, write in op.inplace:
        if write in new and read in gone and not used & {read, write}:
            used |= {read, write}
            shared += min(problem.bytes_of[read], problem.bytes_of[write])
    return shared

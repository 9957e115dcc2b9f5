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
from fxremat.core.schedule import Move, Step

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
    ops = [event for event in events if event.op is not None]
    failures = [
        *_unknown_ops(problem, steps),
        *_wrong_counts(problem, events),
        *_wrong_order(problem, ops),
        *_absent_reads(problem, events),
        *_absent_outputs(problem, ops),
        *_wrong_moves(problem, events),
        *_over_budget(events, live, math.inf if budget_bytes is None else budget_bytes),
        *_over_host_memory(problem, events, host),
    ]
    peak_bytes = max(live, default=_size_of(problem, set(problem.resident)))
    time_us = _time_us(problem, events)
    return Verdict(tuple(failures), peak_bytes, time_us, max(host, default=0))


@dataclass(frozen=True)
class _Event:
    """A step: what it reads, which values it puts on the device, and its op or move."""

    step: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    op: Op | None
    move: Move | None


def _event(problem: Problem, index: int, step: Step) -> _Event:
    if isinstance(step, str):
        op = problem.op_of[step]
        return _Event(index, op.reads, op.writes, op, None)
    if step.kind == "to device":
        return _Event(index, (), (step.value,), None, step)
    return _Event(index, (step.value,), (), None, step)


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


def _wrong_order(problem: Problem, ops: Sequence[_Event]) -> Iterator[Failure]:
    """The first runs of the ops are in base order."""
    place = {op.name: index for index, op in enumerate(problem.ops)}
    seen: set[str] = set()
    latest: Op | None = None
    for event in ops:
        op = event.op
        if op is None or op.name in seen:
            continue
        seen.add(op.name)
        if latest is not None and place[op.name] < place[latest.name]:
            detail = f"first runs after {latest.name}, which follows it in base order"
            yield Failure("out of order", op=op.name, step=event.step, detail=detail)
        else:
            latest = op


def _absent_reads(problem: Problem, events: Sequence[_Event]) -> Iterator[Failure]:
    """What a step reads is an input, resident, or was put there by an earlier step."""
    there = {*problem.inputs, *problem.resident}
    for event in events:
        for name in event.reads:
            if name not in there:
                op = event.op.name if event.op is not None else None
                yield Failure("read is not there", op=op, value=name, step=event.step)
        there.update(event.writes)


def _absent_outputs(problem: Problem, ops: Sequence[_Event]) -> Iterator[Failure]:
    there = {*problem.inputs, *problem.resident}.union(*(event.writes for event in ops))
    for name in problem.outputs:
        if name not in there:
            yield Failure("output is not there", value=name)


def _wrong_moves(problem: Problem, events: Sequence[_Event]) -> Iterator[Failure]:
    """A value moves only where it is, one move at a time, and is left alone on its way."""
    moving: dict[str, _Event] = {}
    on_host = set(problem.from_host)
    for event in events:
        move = event.move
        if move is None:
            # Reading what is on its way to the host does no harm.
            waiting = {v for v, started in moving.items() if _kind(started) == "to device"}
            for name in [*(waiting & {*event.reads}), *(moving.keys() & {*event.writes})]:
                op = event.op.name if event.op is not None else None
                yield Failure("still moving", op=op, value=name, step=event.step)
        elif move.kind == "wait":
            if moving.pop(move.value, None) is None:
                yield Failure("nothing to wait for", value=move.value, step=event.step)
        else:
            why = _why_not(problem, move.value)
            if why is not None:
                yield Failure("may not move", value=move.value, step=event.step, detail=why)
            if move.value in moving:
                yield Failure("still moving", value=move.value, step=event.step)
            if move.kind == "to device" and move.value not in on_host:
                yield Failure("nothing on the host", value=move.value, step=event.step)
            if move.kind == "to host":
                on_host.add(move.value)
            moving[move.value] = event
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


def _kind(event: _Event) -> str:
    return event.move.kind if event.move is not None else ""


def _over_budget(
    events: Sequence[_Event], live: Sequence[int], budget_bytes: float
) -> Iterator[Failure]:
    """The bytes of every step are within the budget; names the worst step."""
    if live and max(live) > budget_bytes:
        worst = live.index(max(live))
        event = events[worst]
        detail = f"{live[worst]:,} bytes, budget {budget_bytes:,}"
        op = event.op.name if event.op is not None else None
        yield Failure("over budget", op=op, step=event.step, detail=detail)


def _over_host_memory(
    problem: Problem, events: Sequence[_Event], host: Sequence[int]
) -> Iterator[Failure]:
    cap = problem.copies.host_bytes if problem.copies is not None else None
    if cap is not None and host and max(host) > cap:
        worst = host.index(max(host))
        detail = f"{host[worst]:,} bytes, host memory {cap:,}"
        yield Failure("over host memory", step=events[worst].step, detail=detail)


def _time_us(problem: Problem, events: Sequence[_Event]) -> float:
    """When everything has ended: ops in a row, and beside them transfers, each way in a row."""
    now = 0.0
    engine = {"to host": 0.0, "to device": 0.0}
    arrives: dict[str, float] = {}
    for event in events:
        move = event.move
        if event.op is not None:
            now += event.op.time_us
        elif move is not None and move.kind == "wait":
            now = max(now, arrives.get(move.value, now))
        elif move is not None and problem.copies is not None:
            speed = problem.copies.to_host if move.kind == "to host" else problem.copies.to_device
            nbytes = problem.bytes_of.get(move.value, 0)
            takes = problem.copies.latency_us + (nbytes / speed if speed else math.inf)
            begins = max(now, engine[move.kind], arrives.get(move.value, 0.0))
            arrives[move.value] = engine[move.kind] = begins + takes
    return max(now, *engine.values())


def _host_bytes_of_steps(problem: Problem, events: Sequence[_Event]) -> list[int]:
    """Bytes of moved values in host memory at each step.

    A value comes there when a move to the host starts, and goes after the last wait that follows
    before it is moved there again. Values that live there are not counted.
    """
    out = []
    there: set[str] = set()
    for index, event in enumerate(events):
        move = event.move
        counted = move is not None and move.value in problem.bytes_of.keys() - {*problem.host}
        if counted and move is not None and move.kind == "to host":
            there.add(move.value)
        out.append(_size_of(problem, there))
        if move is not None and move.value in there and not _moves_on(events, index, move.value):
            there.remove(move.value)
    return out


def _moves_on(events: Sequence[_Event], index: int, name: str) -> bool:
    """Whether the host's copy of the value is moved or waited for after this event."""
    later = (
        e.move.kind for e in events[index + 1 :] if e.move is not None and e.move.value == name
    )
    return next(later, "to host") != "to host"


def _size_of(problem: Problem, names: set[str]) -> int:
    sizes = problem.bytes_of
    return sum(sizes[name] for name in names)


class _Future:
    """What will happen to each value: its reads and writes, by step."""

    def __init__(self, steps: Sequence[_Event]) -> None:
        self.events: dict[str, list[tuple[int, str]]] = {}
        for step, what in enumerate(steps):
            for name in what.reads:
                self.events.setdefault(name, []).append((step, "read"))
            for name in what.writes:
                self.events.setdefault(name, []).append((step, "write"))

    def is_read_after(self, name: str, step: int) -> bool:
        """Whether the next thing that happens to the value after ``step`` is a read."""
        later = (event for when, event in self.events.get(name, ()) if when > step)
        return next(later, None) == "read"


def _bytes_of_steps(problem: Problem, events: Sequence[_Event]) -> list[int]:
    """Bytes on the device while each step runs."""
    future = _Future(events)
    stays = {*problem.resident, *problem.outputs}
    there = {*problem.inputs, *problem.resident}
    live = []
    for step, event in enumerate(events):
        new = {name for name in event.writes if name in problem.bytes_of} - there
        there |= new
        # Only what the step touches can change its mind about staying; at first, everything.
        touched = set(there) if step == 0 else {*event.reads, *event.writes} & there
        gone = {name for name in touched - stays if not future.is_read_after(name, step)}
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

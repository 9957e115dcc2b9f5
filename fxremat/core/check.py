"""The judge of schedules: is this one possible, and what does it need?

Written from the definitions, the obvious way, for plans of any origin. Shares no code with
`fxremat.core.timeline` or a solver, so that it does not share their mistakes.

What is there is a set of values. At the start it holds the inputs and the resident values. A step
puts in what its op writes. Then everything goes that will not be read before it is written again;
resident values and outputs never go. The bytes of a step are those of the set while the op runs,
plus its workspace, less what the op writes in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fxremat.core.problem import Op, Problem

FailureKind = Literal[
    "unknown op",
    "op never runs",
    "op runs twice",
    "out of order",
    "read is not there",
    "output is not there",
    "over budget",
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
    """What the judge found. Peak and time count the steps whose op is known."""

    failures: tuple[Failure, ...]
    peak_bytes: int
    time_us: float

    @property
    def ok(self) -> bool:
        """Whether no rule is broken."""
        return not self.failures

    def __str__(self) -> str:
        head = f"peak {self.peak_bytes:,} bytes, time {self.time_us:.1f} us"
        return "\n".join([f"{'ok' if self.ok else 'failed'}: {head}", *map(str, self.failures)])


def check(problem: Problem, steps: Sequence[str], budget_bytes: int | None = None) -> Verdict:
    """Judge ``steps`` against the rules of ``problem`` and, where given, a budget."""
    found = ((step, problem.op_of.get(name)) for step, name in enumerate(steps))
    known = [(step, op) for step, op in found if op is not None]
    ops = [op for _, op in known]
    live = _bytes_of_steps(problem, ops)
    failures = [
        *_unknown_ops(problem, steps),
        *_wrong_counts(problem, steps),
        *_wrong_order(problem, known),
        *_absent_reads(problem, known),
        *_absent_outputs(problem, ops),
        *_over_budget(known, live, math.inf if budget_bytes is None else budget_bytes),
    ]
    peak_bytes = max(live, default=_sum_bytes(problem, set(problem.resident)))
    return Verdict(tuple(failures), peak_bytes, sum(op.time_us for op in ops))


def _unknown_ops(problem: Problem, steps: Sequence[str]) -> Iterator[Failure]:
    for step, name in enumerate(steps):
        if name not in problem.op_of:
            yield Failure("unknown op", op=name, step=step)


def _wrong_counts(problem: Problem, steps: Sequence[str]) -> Iterator[Failure]:
    """Every op runs at least once; an op that is not repeatable runs only once."""
    where: dict[str, list[int]] = {op.name: [] for op in problem.ops}
    for step, name in enumerate(steps):
        where.get(name, []).append(step)
    for op in problem.ops:
        runs = where[op.name]
        if not runs:
            yield Failure("op never runs", op=op.name)
        if len(runs) > 1 and not op.repeatable:
            detail = f"is not repeatable, but runs at steps {', '.join(map(str, runs))}"
            yield Failure("op runs twice", op=op.name, step=runs[1], detail=detail)


def _wrong_order(problem: Problem, known: Sequence[tuple[int, Op]]) -> Iterator[Failure]:
    """The first runs of the ops are in base order."""
    place = {op.name: index for index, op in enumerate(problem.ops)}
    seen: set[str] = set()
    latest: Op | None = None
    for step, op in known:
        if op.name in seen:
            continue
        seen.add(op.name)
        if latest is not None and place[op.name] < place[latest.name]:
            detail = f"first runs after {latest.name}, which follows it in base order"
            yield Failure("out of order", op=op.name, step=step, detail=detail)
        else:
            latest = op


def _absent_reads(problem: Problem, known: Sequence[tuple[int, Op]]) -> Iterator[Failure]:
    """What an op reads is an input, resident, or was written by an earlier step."""
    there = {*problem.inputs, *problem.resident}
    for step, op in known:
        for name in op.reads:
            if name not in there:
                yield Failure("read is not there", op=op.name, value=name, step=step)
        there.update(op.writes)


def _absent_outputs(problem: Problem, ops: Sequence[Op]) -> Iterator[Failure]:
    there = {*problem.inputs, *problem.resident}.union(*(op.writes for op in ops))
    for name in problem.outputs:
        if name not in there:
            yield Failure("output is not there", value=name)


def _over_budget(
    known: Sequence[tuple[int, Op]], live: Sequence[int], budget_bytes: float
) -> Iterator[Failure]:
    """The bytes of every step are within the budget; names the worst step."""
    if live and max(live) > budget_bytes:
        worst = live.index(max(live))
        step, op = known[worst]
        detail = f"{live[worst]:,} bytes, budget {budget_bytes:,}"
        yield Failure("over budget", op=op.name, step=step, detail=detail)


def _sum_bytes(problem: Problem, names: set[str]) -> int:
    sizes = problem.bytes_of
    return sum(sizes[name] for name in names)


class _Future:
    """What will happen to each value: its reads and writes, by step."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.events: dict[str, list[tuple[int, str]]] = {}
        for step, op in enumerate(ops):
            for name in op.reads:
                self.events.setdefault(name, []).append((step, "read"))
            for name in op.writes:
                self.events.setdefault(name, []).append((step, "write"))

    def is_read_after(self, name: str, step: int) -> bool:
        """Whether the next thing that happens to the value after ``step`` is a read."""
        later = (event for when, event in self.events.get(name, ()) if when > step)
        return next(later, None) == "read"


def _bytes_of_steps(problem: Problem, ops: Sequence[Op]) -> list[int]:
    """Bytes on the device while each step runs."""
    future = _Future(ops)
    stays = {*problem.resident, *problem.outputs}
    there = {*problem.inputs, *problem.resident}
    live = []
    for step, op in enumerate(ops):
        new = set(op.writes) - there
        there |= new
        # Only what the step touches can change its mind about staying; at first, everything.
        touched = set(there) if step == 0 else {*op.reads, *op.writes} & there
        gone = {name for name in touched - stays if not future.is_read_after(name, step)}
        in_place = _in_place_bytes(problem, op, new, gone)
        live.append(_sum_bytes(problem, there) + op.workspace_bytes - in_place)
        there -= gone
    return live


def _in_place_bytes(problem: Problem, op: Op, new: set[str], gone: set[str]) -> int:
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

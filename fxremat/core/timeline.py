"""Replaying a schedule: which values are live at every step, and how many bytes they are.

A value is live from the step that writes it to the last step that reads that copy, both
included. Writing a value again begins a new copy; later reads are of the new copy. Outputs
are live from their first write to the end, resident values always. In the step where one copy
ends and another begins, the op may write the second over the first (`Op.inplace`): the two then
share their storage in that step.

A value that moves to the host is live until that transfer is waited for; one that moves to the
device begins a new copy when the transfer is started. So bytes follow from the order of the steps
alone, however fast the transfers are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from fxremat.core.problem import Copies, Op, Problem
from fxremat.core.schedule import Kind, Step, ops_of, store_all


@dataclass(frozen=True)
class Transfer:
    """One value on its way, from ``start_us`` to ``end_us``, begun by step ``step``."""

    value: str
    kind: Kind
    step: int
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Timing:
    """Microseconds: when each step ends on the compute stream, the transfers, the whole."""

    step_end_us: tuple[float, ...]
    transfers: tuple[Transfer, ...]
    stall_us: float

    @cached_property
    def time_us(self) -> float:
        """When the last op or transfer ends."""
        last = max((transfer.end_us for transfer in self.transfers), default=0.0)
        return max(last, self.step_end_us[-1] if self.step_end_us else 0.0)


def transfer_us(copies: Copies, kind: Kind, nbytes: int) -> float:
    """How long a value of so many bytes is on its way; infinite without bandwidth."""
    rate = copies.to_host if kind == "to host" else copies.to_device
    return copies.latency_us + (nbytes / rate if rate else math.inf)


def time_steps(problem: Problem, steps: Sequence[Step]) -> Timing:
    """Run the clock over a schedule: one compute stream, one copy engine for each direction.

    Ops run one after another. A transfer begins when its step is reached and its engine is free,
    and takes the latency and its bytes over the bandwidth; ops run on meanwhile. Waiting for one
    stalls the ops until it has ended. Raises `KeyError` where a wait has nothing to wait for.
    """
    ops, sizes, copies = problem.op_of, problem.bytes_of, problem.copies
    now, stall = 0.0, 0.0
    free: dict[Kind, float] = {"to host": 0.0, "to device": 0.0}
    arrival: dict[str, float] = {}
    ends: list[float] = []
    transfers: list[Transfer] = []
    for index, step in enumerate(steps):
        if isinstance(step, str):
            now += ops[step].time_us
        elif step.kind == "wait":
            if step.value not in arrival:
                raise KeyError(f"step {index} waits for {step.value}, which does not move")
            stall += max(0.0, arrival[step.value] - now)
            now = max(now, arrival[step.value])
        else:
            if copies is None:
                raise KeyError(f"step {index} moves {step.value}, but the problem has no copies")
            start = max(now, free[step.kind], arrival.get(step.value, 0.0))
            end = start + transfer_us(copies, step.kind, sizes[step.value])
            free[step.kind] = arrival[step.value] = end
            transfers.append(Transfer(step.value, step.kind, index, start, end))
        ends.append(now)
    return Timing(tuple(ends), tuple(transfers), stall)


@dataclass(frozen=True)
class Lifetime:
    """Bytes of one storage, live during steps ``start <= step < stop``, and what it holds first.

    ``workspace`` is the scratch memory of the call that computes ``value``.
    """

    value: str
    nbytes: int
    start: int
    stop: int
    workspace: bool = False

    def with_step_before(self, step: int) -> Lifetime:
        """The same, where one more step comes before ``step``."""
        later = self.start >= step, self.stop > step
        return replace(self, start=self.start + later[0], stop=self.stop + later[1])


@dataclass(frozen=True)
class Timeline:
    """Bytes live at every step of a schedule, and each copy of a value that is not resident."""

    problem: Problem
    steps: tuple[Step, ...]
    copies: tuple[Lifetime, ...]
    live_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]

    @cached_property
    def peak_bytes(self) -> int:
        """The largest number of bytes live at a step; the resident bytes if there is no step."""
        return max(self.live_bytes, default=self.problem.resident_bytes)

    @cached_property
    def host_peak_bytes(self) -> int:
        """The most bytes of moved values in host memory."""
        return max(self.host_bytes, default=0)

    @cached_property
    def timing(self) -> Timing:
        """When each step runs, and each transfer."""
        return time_steps(self.problem, self.steps)

    @cached_property
    def time_us(self) -> float:
        """Time of all steps together, transfers that nothing hides included."""
        ops = self.problem.op_of
        if all(isinstance(step, str) for step in self.steps):
            return sum(ops[step].time_us for step in ops_of(self.steps))
        return self.timing.time_us

    def live_at_peak(self) -> tuple[str, ...]:
        """Values live at the first step of the peak, largest first; resident values included."""
        step = self.live_bytes.index(self.peak_bytes) if self.live_bytes else 0
        live = {one.value for one in self.copies if one.start <= step < one.stop}
        live |= set(self.problem.resident)
        sizes = self.problem.bytes_of
        return tuple(sorted(live, key=lambda name: (-sizes[name], name)))


def _touched(problem: Problem, step: Step) -> tuple[Iterable[str], Iterable[str]]:
    """What a step reads, and the values of which it begins a new copy on the device."""
    if isinstance(step, str):
        op = problem.op_of[step]
        return op.reads, op.writes
    return ((), (step.value,)) if step.kind == "to device" else ((step.value,), ())


def _copies(problem: Problem, steps: Sequence[Step]) -> list[Lifetime]:
    """The lifetime of every copy of every value that is not resident."""
    resident, kept, sizes = set(problem.resident), set(problem.outputs), problem.bytes_of
    end = len(steps)
    start: dict[str, int] = {}
    last: dict[str, int] = {}
    done: list[Lifetime] = []
    for name in problem.inputs:
        if name not in resident:
            start[name] = last[name] = 0
    for index, step in enumerate(steps):
        reads, writes = _touched(problem, step)
        for name in reads:
            if name in start:
                last[name] = index
            elif name not in resident:
                raise KeyError(f"step {index} ({step}) reads {name}, which was never written")
        for name in writes:
            if name in start:
                if name in kept:
                    continue
                done.append(Lifetime(name, sizes[name], start[name], last[name] + 1))
            start[name] = last[name] = index
    for name, first in start.items():
        stop = end if name in kept else last[name] + 1
        done.append(Lifetime(name, sizes[name], first, stop))
    return done


def _on_host(problem: Problem, steps: Sequence[Step]) -> tuple[int, ...]:
    """Bytes in host memory at every step: from a move there to the last wait for a move back.

    Values that live there are not counted.
    """
    until: dict[str, int] = {}
    delta = [0] * (len(steps) + 1)
    for index in reversed(range(len(steps))):
        step = steps[index]
        if isinstance(step, str) or step.value in problem.host:
            continue
        stop = until.setdefault(step.value, index) + 1
        if step.kind == "to host":
            delta[index] += problem.bytes_of[step.value]
            delta[stop] -= problem.bytes_of[step.value]
            del until[step.value]
    return tuple(accumulate(delta[:-1]))


def _overtaken(op: Op, ending: set[str], starting: set[str], sizes: Mapping[str, int]) -> int:
    """Bytes of storage that values beginning in this step take over from values ending in it.

    Pairs are taken in the order in which the op lists them; a value is part of one at most.
    """
    saved = 0
    for read, write in op.inplace:
        if read in ending and write in starting:
            ending.remove(read)
            starting.remove(write)
            saved += min(sizes[read], sizes[write])
    return saved


def replay(problem: Problem, steps: Sequence[Step]) -> Timeline:
    """The timeline of running ``steps``; raises `KeyError` where a read was never written."""
    ops, sizes = problem.op_of, problem.bytes_of
    copies = _copies(problem, steps)
    kept = set(problem.outputs)
    starting: list[set[str]] = [set() for _ in steps]
    ending: list[set[str]] = [set() for _ in steps]
    delta = [0] * (len(steps) + 1)
    for copy in copies if steps else ():
        delta[copy.start] += copy.nbytes
        delta[copy.stop] -= copy.nbytes
        starting[copy.start].add(copy.value)
        if copy.value not in kept:
            ending[copy.stop - 1].add(copy.value)
    live, total = [], problem.resident_bytes
    for index, step in enumerate(steps):
        total += delta[index]
        own = 0
        if isinstance(step, str):
            op = ops[step]
            own = op.workspace_bytes - _overtaken(op, ending[index], starting[index], sizes)
        live.append(total + own)
    host = _on_host(problem, steps) if problem.copies is not None else (0,) * len(steps)
    return Timeline(problem, tuple(steps), tuple(copies), tuple(live), host)


def store_all_peak(problem: Problem) -> int:
    """The peak of running every op once, in base order."""
    return replay(problem, store_all(problem)).peak_bytes


def lifetimes_of(timeline: Timeline) -> tuple[Lifetime, ...]:
    """When each storage is there: resident values, copies, workspaces.

    They add up to `live_bytes`, but where an op writes over what it reads: both are counted.
    """
    problem, end = timeline.problem, len(timeline.steps)
    sizes, ops = problem.bytes_of, problem.op_of
    workspaces = [
        Lifetime(ops[step].writes[0], ops[step].workspace_bytes, index, index + 1, workspace=True)
        for index, step in enumerate(timeline.steps)
        if isinstance(step, str) and ops[step].workspace_bytes and ops[step].writes
    ]
    return (
        *(Lifetime(name, sizes[name], 0, end) for name in problem.resident),
        *timeline.copies,
        *workspaces,
    )

"""When the steps of a schedule run: one compute stream, and one copy engine for each direction.

Ops run one after another. A transfer begins when its step is reached and its engine is free, and
takes the latency and its bytes over the bandwidth; ops run on meanwhile. Waiting for a transfer
stalls the ops until it has ended. The schedule takes as long as its last op or transfer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fxremat.core.problem import Copies, Problem
from fxremat.core.schedule import Kind, Step


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
    """Run the clock over a schedule; raises `KeyError` where a wait has nothing to wait for."""
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

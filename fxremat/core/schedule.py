"""The steps of a schedule: an op runs, or a value moves between the device and the host.

A move is started by one step and waited for by another; in between, ops run. Each direction is a
copy engine of its own that makes one transfer at a time, in the order in which they were started.

    conv1  to host: a  conv2  conv3  wait: a  ...  to device: a  conv3_grad  wait: a  conv2_grad
           |--- the device's copy of a is held ---|             |--- a is there, not yet readable

In JSON an op is its name, a move an object of one field: ``{"to host": "a"}``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fxremat.core.json_data import InvalidData
from fxremat.core.problem import Problem

Kind = Literal["to host", "to device", "wait"]


@dataclass(frozen=True)
class Move:
    """Start moving a value, or wait until its transfer has ended."""

    kind: Kind
    value: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.value}"

    def to_data(self) -> dict[str, str]:
        """The move as JSON data."""
        return {self.kind: self.value}

    @classmethod
    def from_data(cls, data: Any) -> Move:
        """Read a move; raises `InvalidData`."""
        if isinstance(data, dict) and len(data) == 1:
            ((kind, value),) = data.items()
            if kind in get_args(Kind) and isinstance(value, str):
                return cls(kind, value)
        kinds = " or ".join(repr(kind) for kind in get_args(Kind))
        raise InvalidData(f"{data!r} is not an op's name, nor {kinds} with a value's name")


Step = str | Move
"""The name of an op, or a move."""


def ops_of(steps: Iterable[Step]) -> tuple[str, ...]:
    """The ops that run, without the moves."""
    return tuple(step for step in steps if isinstance(step, str))


def store_all(problem: Problem) -> tuple[Step, ...]:
    """Every op once, in base order; values from the host come once, with the ops waiting."""
    last = {name: op.name for op in problem.ops for name in (*op.writes, *op.reads)}
    coming = set(problem.from_host)
    steps: list[Step] = []
    for op in problem.ops:
        for name in op.reads:
            if name in coming:
                coming.remove(name)
                steps += [Move("to device", name), Move("wait", name)]
        steps.append(op.name)
        for name in (*op.writes, *op.reads):
            if name in problem.host and name in problem.writer_of and last[name] == op.name:
                steps += [Move("to host", name), Move("wait", name)]
    return tuple(steps)

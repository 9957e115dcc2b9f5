"""The problem a solver is given: values, ops in a base order, what is there and what must remain.

Plain data. A *value* is one storage; an *op* is the smallest thing that may run again.
Sizes are bytes, times are microseconds. The JSON form is ``fxremat-problem/1``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from fxremat.core.json_data import InvalidData, from_data, to_data

FORMAT = "fxremat-problem/1"
Phase = Literal["forward", "backward", "any"]


class InvalidProblem(InvalidData):
    """A problem or plan file is malformed; the message names the field."""


@dataclass(frozen=True)
class Value:
    """One storage on the device."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Op:
    """One unit of work: reads values, writes values, takes time and scratch memory.

    ``inplace`` holds (read, write) pairs: where the read value dies in this very step, the
    written value takes over its storage, so that the two are not counted side by side. In one
    step a value is part of one such pair at most; earlier pairs come first.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    time_us: float
    workspace_bytes: int = 0
    phase: Phase = "any"
    repeatable: bool = True
    inplace: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Copies:
    """What moving values between the device and host memory takes.

    Bytes per microsecond in each direction, microseconds before each transfer, and the most bytes
    of host memory that moved values may take at a time (None: any number). With ``only_host``
    nothing moves but the values that live in host memory.
    """

    to_host: float
    to_device: float
    latency_us: float = 0.0
    host_bytes: int | None = None
    only_host: bool = False


@dataclass(frozen=True)
class Change:
    """What a variant changes of an op: values it reads no more, values it reads instead.

    Time and workspace are what the op takes more, or less, than before. ``inplace`` are pairs of
    what it reads instead and what it writes, as an op has them.
    """

    op: str
    drops: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    time_us: float = 0.0
    workspace_bytes: int = 0
    inplace: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Variant:
    """Another way to compute some ops: new ops, changes to those that are there, and other outputs.

    ``outputs`` holds (old, new) pairs. The new ops write values that no other op writes. An op
    whose results nobody needs once the variant is taken is not run.
    """

    name: str
    ops: tuple[Op, ...] = ()
    changes: tuple[Change, ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Problem:
    """Ops in a base order that is valid, and the values they read and write.

    * every value is written by exactly one op, or is an input or resident;
    * ``inputs`` are there at the start and are freed after their last read;
    * ``resident`` values (parameters, buffers, the caller's batch) are there at all times;
    * ``outputs`` stay from the step that first writes them (inputs: from the start) to the end;
    * ``copies`` says how values may move to host memory and back (None: they may not);
    * ``host`` values live in host memory: those that no op writes are there from the start, and
      those that an op writes have to be there at the end. The device has them between moves only;
    * ``variants`` are other ways to compute some ops, of which a plan takes any that do not exclude
      each other (`fxremat.core.variants`). Solvers see the problem that is left then.
    """

    name: str
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[str, ...] = ()
    resident: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    copies: Copies | None = None
    host: tuple[str, ...] = ()
    variants: tuple[Variant, ...] = ()

    @cached_property
    def bytes_of(self) -> dict[str, int]:
        """Bytes of each value, by name."""
        return {value.name: value.bytes for value in self.values}

    @cached_property
    def op_of(self) -> dict[str, Op]:
        """Each op, by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def writer_of(self) -> dict[str, str]:
        """Name of the op that writes each value; inputs and resident values have none."""
        return {value: op.name for op in self.ops for value in op.writes}

    @cached_property
    def from_host(self) -> tuple[str, ...]:
        """The host values that are there from the start."""
        return tuple(name for name in self.host if name not in self.writer_of)

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes of the resident values together."""
        return sum(self.bytes_of[name] for name in set(self.resident))

    @cached_property
    def base_time_us(self) -> float:
        """Time of running every op once."""
        return sum(op.time_us for op in self.ops)

    def base_steps(self) -> tuple[str, ...]:
        """The store-all schedule: every op once, in base order."""
        return tuple(op.name for op in self.ops)


def _check_values(problem: Problem) -> None:
    sizes = problem.bytes_of
    if len(sizes) != len(problem.values):
        raise InvalidProblem("values: a name is used twice")
    for name, nbytes in sizes.items():
        if nbytes < 0:
            raise InvalidProblem(f"values: {name!r} has a negative number of bytes")
    for key in ("inputs", "resident", "outputs", "host"):
        for name in getattr(problem, key):
            if name not in sizes:
                raise InvalidProblem(f"{key}: unknown value {name!r}")
    for name in {*problem.inputs, *problem.resident, *problem.outputs} & {*problem.host}:
        raise InvalidProblem(f"host: {name!r} is an input, resident or an output, too")
    if problem.host and problem.copies is None:
        raise InvalidProblem("host: there are values in host memory, but 'copies' is missing")


def _check_copies(copies: Copies) -> None:
    for key in ("to_host", "to_device", "latency_us", "host_bytes"):
        figure = getattr(copies, key)
        if figure is not None and not 0 <= figure < math.inf:
            raise InvalidProblem(f"copies: {key!r} is {figure}, not zero or more")


def _check_op(op: Op) -> None:
    if not 0 <= op.time_us < math.inf:
        raise InvalidProblem(f"op {op.name!r}: 'time_us' is {op.time_us}, not zero or more")
    if op.workspace_bytes < 0:
        raise InvalidProblem(f"op {op.name!r}: 'workspace_bytes' is negative")
    for read, write in op.inplace:
        if read not in op.reads or write not in op.writes:
            raise InvalidProblem(f"op {op.name!r}: 'inplace' pair {[read, write]} is not its own")


def _check_flow(problem: Problem) -> None:
    there = {*problem.inputs, *problem.resident, *problem.from_host}
    for op in problem.ops:
        for name in op.reads:
            if name not in there:
                raise InvalidProblem(f"op {op.name!r}: reads {name!r} before it is written")
        for name in op.writes:
            if name not in problem.bytes_of:
                raise InvalidProblem(f"op {op.name!r}: writes unknown value {name!r}")
            if name in there:
                raise InvalidProblem(f"op {op.name!r}: {name!r} is written twice, or an input")
            there.add(name)
    for name in problem.outputs:
        if name not in there:
            raise InvalidProblem(f"outputs: {name!r} is never written")


def _check_variants(problem: Problem) -> None:
    """Names and values; whether one can be taken shows where it is."""
    base, names = problem.op_of, [one.name for one in problem.variants]
    new = [op for one in problem.variants for op in one.ops]
    written = [name for op in (*problem.ops, *new) for name in op.writes]
    if len({*names}) < len(names):
        raise InvalidProblem("variants: a name is used twice")
    if len({*base, *(op.name for op in new)}) < len(base) + len(new):
        raise InvalidProblem("variants: the name of an op is used twice")
    if len({*written}) < len(written):
        raise InvalidProblem("variants: a value is written twice")
    for one in problem.variants:
        where = f"variant {one.name!r}"
        known = [r for op in one.ops for r in (*op.reads, *op.writes)]
        known += [name for change in one.changes for name in change.adds]
        for name in [*known, *(new_name for _, new_name in one.outputs)]:
            if name not in problem.bytes_of:
                raise InvalidProblem(f"{where}: unknown value {name!r}")
        for op in one.ops:
            _check_op(op)
        for change in one.changes:
            if change.op not in base:
                raise InvalidProblem(f"{where}: changes unknown op {change.op!r}")
            if not {*change.drops} <= {*base[change.op].reads}:
                raise InvalidProblem(f"{where}: {change.op!r} does not read all that it drops")
            if not all(r in change.adds and w in base[change.op].writes for r, w in change.inplace):
                raise InvalidProblem(f"{where}: an 'inplace' pair of {change.op!r} is not its own")
        if not {old for old, _ in one.outputs} <= {*problem.outputs}:
            raise InvalidProblem(f"{where}: 'outputs' replaces what is no output")


def validate(problem: Problem) -> Problem:
    """Return ``problem`` if it is well formed, else raise `InvalidProblem`."""
    if len(problem.op_of) != len(problem.ops):
        raise InvalidProblem("ops: a name is used twice")
    _check_values(problem)
    _check_flow(problem)
    for op in problem.ops:
        _check_op(op)
    _check_variants(problem)
    return problem


def problem_from_json(data: Any) -> Problem:
    """Read a problem; raises `InvalidProblem` naming the field that is wrong."""
    if isinstance(data, dict) and data.get("format") != FORMAT:
        raise InvalidProblem(f"field 'format' is {data.get('format')!r}, expected {FORMAT!r}")
    try:
        found = from_data(Problem, {"name": "", **data} if isinstance(data, dict) else data)
    except InvalidData as error:
        raise InvalidProblem(str(error)) from error
    if found.copies is not None:
        _check_copies(found.copies)
    return validate(found)


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """The problem as JSON data in the format ``fxremat-problem/1``."""
    return {"format": FORMAT, **to_data(problem)}

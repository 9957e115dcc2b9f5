"""Programs over rows: what a call of `fxremat_kernels::rows` computes, as data.

A program is text, so that it is a constant of the graph like any number: it survives caches and
copies of the graph. Its instructions are calls of torch's own operators on *values*:

* row inputs, whose first dimension is the rows (the program sees a few of them at a time);
* whole inputs, the same for all rows: weights, vectors, numbers;
* results of instructions. ``kind`` says what they are: "row" (rows in front), "last" (a transposed
  look at rows) or "sum" (added up over all rows).

``row_shape`` is the shape of a result without its rows. Sums are results of a program only: no
instruction reads one. An operator with several results has an instruction for each that is wanted,
named with its position (``aten.convolution_backward.default#1``). No instruction mixes rows, so any
split into chunks computes the same, sums up to rounding.

A program may say which rows are *ignored*: those add nothing to any sum, and what the results hold
there is known without computing it. Whoever writes the program has shown that.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, Literal, TypeVar

import torch
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

T = TypeVar("T")
Kind = Literal["row", "last", "whole", "sum"]
"""What a value is: the result of an instruction, or what is the same for all rows."""


@dataclass(frozen=True)
class Ref:
    """A value, by number: row inputs first, then whole inputs, then instructions."""

    number: int


@dataclass(frozen=True)
class RowCount:
    """It stands in a shape for the number of rows in what is being computed."""


@dataclass(frozen=True)
class Instruction:
    """One call. ``row_shape`` and ``dtype`` describe its result."""

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    kind: Kind
    row_shape: tuple[int, ...]
    dtype: torch.dtype

    def of_type(self, kind: type[T]) -> Iterator[T]:
        """The arguments, and parts of them, that are of this type."""
        leaves = pytree.tree_leaves((self.args, tuple(self.kwargs.values())))
        return (one for one in leaves if isinstance(one, kind))

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(ref.number for ref in self.of_type(Ref))

    @property
    def numel(self) -> int:
        """Elements of the result, for one row."""
        return prod(self.row_shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the result, for one row."""
        return self.numel * self.dtype.itemsize

    def arguments(self, value: Callable[[int], Any], rows: int) -> tuple[Any, dict[str, Any]]:
        """The arguments, by position and by name, with values in place of references."""
        args, named = with_values((self.args, dict(self.kwargs)), value, rows)
        return args, dict(named)

    def run(self, value: Callable[[int], Any], rows: int) -> Any:
        args, named = self.arguments(value, rows)
        return overload(self.op)(*args, **named)

    def renumbered(self, number: Callable[[int], int]) -> Instruction:
        """The same call, with other numbers for the values that it reads."""
        return self.with_other(lambda one: Ref(number(one.number)) if isinstance(one, Ref) else one)

    def with_other(self, change: Callable[[Any], Any]) -> Instruction:
        """The same call, with a change made to each argument and each part of one."""
        args, kwargs = map_aggregate((self.args, dict(self.kwargs)), change)
        return replace(self, args=args, kwargs=dict(kwargs))


Number = bool | int | float


@dataclass(frozen=True)
class Ignored:
    """Which rows are ignored: those where row input ``label``, one number a row, is ``number``.

    ``inputs`` says of each row input what all its elements are in such a row, None where nothing
    is known. ``results`` says the same of each result that has rows; of a sum, 0.
    """

    label: int
    number: Number
    inputs: tuple[Number | None, ...]
    results: tuple[Number, ...]


@dataclass(frozen=True)
class Program:
    """The instructions of a loop; ``results`` are numbers of values.

    ``ignored`` says which rows need not be computed; None where each has to be.
    """

    num_rows: int
    num_whole: int
    loop: tuple[Instruction, ...]
    results: tuple[int, ...]
    ignored: Ignored | None = None

    @property
    def first(self) -> int:
        """The number of the first instruction's value."""
        return self.num_rows + self.num_whole

    def instruction(self, number: int) -> Instruction | None:
        """What computes a value; None for an input."""
        return None if number < self.first else self.loop[number - self.first]

    def __getitem__(self, number: int) -> Instruction:
        """What computes a value that is no input."""
        assert number >= self.first, "an input is not computed"
        return self.loop[number - self.first]

    def renumbered(self, number: Callable[[int], int], num_rows: int, num_whole: int) -> Program:
        """The same program with other numbers for its values, and for so many inputs."""
        loop = tuple(one.renumbered(number) for one in self.loop)
        return Program(num_rows, num_whole, loop, tuple(map(number, self.results)))

    def giving(self, places: Sequence[int]) -> Program:
        """The program of the results at these places alone, for the same inputs."""
        results = [self.results[place] for place in places]
        needed, left = set[int](), list(results)
        while left:
            one = self.instruction(number := left.pop())
            if one is not None and number not in needed:
                needed.add(number)
                left += one.reads
        numbers = [*range(self.first), *sorted(needed)]
        number_of = {old: new for new, old in enumerate(numbers)}.__getitem__
        loop = tuple(self[old].renumbered(number_of) for old in numbers[self.first :])
        ignored = self.ignored
        if ignored is not None:
            ignored = replace(ignored, results=tuple(ignored.results[place] for place in places))
        return replace(self, loop=loop, results=tuple(map(number_of, results)), ignored=ignored)


def with_values(thing: Any, value: Callable[[int], Any], rows: int) -> Any:
    """Arguments with values in place of references."""

    def found(one: Any) -> Any:
        if isinstance(one, Ref):
            return value(one.number)
        return rows if isinstance(one, RowCount) else one

    return map_aggregate(thing, found)


_HELD: dict[str, Any] = {
    f"@{kind.__name__}": kind for kind in (Ref, RowCount, Instruction, Ignored, Program)
}


def _encoded(thing: Any) -> Any:
    """What JSON has no form for: the name of its type, and what it is made of."""
    name = f"@{type(thing).__name__}"
    if name in _HELD:
        return {name: [getattr(thing, each.name) for each in fields(thing)]}
    if name in ("@dtype", "@device"):
        return {name: str(thing).removeprefix("torch.")}
    raise TypeError(f"a program cannot hold a {type(thing).__name__}")


def _decoded(thing: dict[str, Any]) -> Any:
    nothing: tuple[str, Any] = "", None
    name, parts = next(iter(thing.items()), nothing)
    if name in _HELD:
        return _HELD[name](*(tuple(x) if isinstance(x, list) else x for x in parts))
    if name == "@dtype":
        return getattr(torch, parts)
    return torch.device(parts) if name == "@device" else thing


def dump(program: Program) -> str:
    """The program as text; raises TypeError where an argument is none that text can hold."""
    return json.dumps(program, default=_encoded, separators=(",", ":"))


@functools.lru_cache(maxsize=512)
def parse(text: str) -> Program:
    """The program that `dump` wrote."""
    program: Program = json.loads(text, object_hook=_decoded)
    return program


@functools.cache
def operator_of(name: str) -> Any:
    """The operator called ``aten.mm.default`` and the like, whichever of its results is meant."""
    namespace, packet, which = name.partition("#")[0].split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), which)


@functools.cache
def overload(name: str) -> Any:
    """What computes ``aten.mm.default``, or the second result of an operator for ``...#1``."""
    item, found = name.partition("#")[2], operator_of(name)
    return (lambda *args, **kwargs: found(*args, **kwargs)[int(item)]) if item else found

"""Calls on a few rows: what they are made of, and which dimensions of a tensor are its rows.

A tensor *has N rows* if some leading dimensions of it multiply to N. Its ``row_shape`` is the shape
behind these dimensions. On c rows it is [c, *row_shape]. Row numbers are positions in the flattened
leading dimensions, so a reshape that keeps all rows in front keeps every row where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxremat.passes.nodes import Shape, shape_of
from fxremat.runtime.chunks.program import Kind

VIEWS = frozenset(
    {
        "view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "alias", "permute", "t",
        "transpose", "slice", "select", "expand",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Operand:
    """An operand of one kind; ``row_shape`` is that of one row, or the shape of the whole."""

    node: fx.Node
    kind: Kind
    row_shape: Shape


@dataclass(frozen=True)
class Result:
    """The result of an earlier call of the same node."""

    position: int


@dataclass(frozen=True)
class Call:
    """One instruction to be; its arguments hold `As` and `Part`."""

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    kind: Kind
    row_shape: Shape
    dtype: torch.dtype


Calls = tuple[Call, ...]


def operands(calls: Calls) -> Iterator[Operand]:
    for call in calls:
        yield from _found((call.args, tuple(call.kwargs.values())))


def _found(thing: Any) -> Iterator[Operand]:
    if isinstance(thing, Operand):
        yield thing
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            yield from _found(part)


def row_cut(shape: Shape, rows: int) -> int | None:
    """How many leading dimensions are the rows; None if their product is never ``rows``."""
    product = 1
    for position, size in enumerate(shape, 1):
        product *= size
        if product == rows:
            return position
        if product > rows or product == 0:
            return None
    return None


def row_shape_of(node: fx.Node, rows: int) -> Shape | None:
    """The shape behind the rows; None for what does not have so many rows."""
    shape = shape_of(node)
    if shape is None:
        return None
    cut = row_cut(shape, rows)
    return None if cut is None else shape[cut:]

"""What can be known of the values of one row without computing them: a number, or nothing.

A value is *known* if all its elements in the row are one number. Zero times what is not known is
zero, as long as that is finite; in a row of a model that is not broken it is. So of what is not
known, it is remembered whether it is as finite as what it is made of (`FINITE`), or may be infinite
or NaN on its own account (`ANY`), such as an exponential or a quotient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from fxremat import compat
from fxremat.runtime.chunks.buffers import COPIES, MATMULS, VIEWS
from fxremat.runtime.chunks.program import Number, overload


@dataclass(frozen=True)
class Known:
    """All elements of a row are this number."""

    number: Number


class Unknown(Enum):
    """All that is known is where infinities may come from."""

    FINITE = 0
    ANY = 1


FINITE, ANY = Unknown.FINITE, Unknown.ANY
Value = Known | Unknown


def known(number: Number, dtype: torch.dtype) -> Known:
    """The number as an element of this type."""
    if dtype is torch.bool:
        return Known(bool(number))
    return Known(float(number) if dtype.is_floating_point else int(number))


def result_of(op: str, args: tuple[Any, ...], dtype: torch.dtype) -> Value:
    """What is known of a result; ``args`` have a `Value` in place of each tensor."""
    given = _values(args)
    rule = _RULES.get(_name(op))
    if rule is not None:
        found = rule(*args)
        if found is not None:
            return known(found.number, dtype) if isinstance(found, Known) else found
    if given and all(isinstance(one, Known) for one in given) and _is_of_elements(op):
        return _computed(op, args, dtype)
    if op in MATMULS or _name(op) in _FINITE:
        return max((v for v in given if isinstance(v, Unknown)), default=FINITE, key=_rank)
    return ANY


def _rank(value: Unknown) -> int:
    return value.value


def _name(op: str) -> str:
    return op.split(".")[1]


def _values(thing: Any) -> list[Value]:
    if isinstance(thing, (Known, Unknown)):
        return [thing]
    return [v for part in thing for v in _values(part)] if isinstance(thing, (list, tuple)) else []


def _is_of_elements(op: str) -> bool:
    return torch.Tag.pointwise in overload(op).tags or op in COPIES


def _computed(op: str, args: tuple[Any, ...], dtype: torch.dtype) -> Value:
    """What torch makes of numbers."""

    def tensor(one: Any) -> Any:
        if not isinstance(one, Known):
            return one
        is_float = isinstance(one.number, float) and dtype.is_floating_point
        return torch.tensor(one.number, dtype=dtype if is_float else None)

    with compat.apart():
        return known(overload(op)(*map(tensor, args)).to(dtype).item(), dtype)


# --- operators -----------------------------------------------------------------------------------


def is_zero(value: Any) -> bool:
    """Whether a value is known to be zero."""
    return isinstance(value, Known) and value.number == 0


def _same(given: Value, *_: Any) -> Value:
    return given


def _full(_: Any, number: Any) -> Value:
    return Known(number)


def _product(left: Any, right: Any, *_: Any) -> Value | None:
    for one, other in ((left, right), (right, left)):
        if is_zero(one) and other is not ANY and not _is_infinite(other):
            return Known(0)
    return None


def _is_infinite(other: Any) -> bool:
    number = other.number if isinstance(other, Known) else other
    return isinstance(number, float) and not abs(number) < float("inf")


def _choice(condition: Value, true: Value, false: Value) -> Value | None:
    if isinstance(condition, Known):
        return true if condition.number else false
    return true if true == false and isinstance(true, Known) else None


def _scattered(into: Value, _: int, __: Value, source: Any) -> Value | None:
    """With what is written equal to what is there."""
    number = source.number if isinstance(source, Known) else source
    same = isinstance(into, Known) and not isinstance(number, Unknown) and into.number == number
    return into if same else None


def _added_at(into: Value, _: int, __: Value, source: Value) -> Value | None:
    return into if isinstance(into, Known) and is_zero(source) else None


def _reduced(given: Value, *_: Any) -> Value | None:
    return given if isinstance(given, Known) else None


def _zero_of_first(given: Value, *_: Any) -> Value | None:
    return given if is_zero(given) else None


_RULES: Mapping[str, Callable[..., Value | None]] = {
    **{_name(op): _same for op in VIEWS},
    "clone": _same,
    "full": _full,
    "mul": _product,
    "mm": _product,
    "bmm": _product,
    "where": _choice,
    "scatter": _scattered,
    "scatter_add": _added_at,
    **dict.fromkeys(("amax", "amin", "mean", "gather"), _reduced),
    **dict.fromkeys(("sum", "_softmax_backward_data", "_log_softmax_backward_data"),
                    _zero_of_first),
    **dict.fromkeys(("tanh_backward", "sigmoid_backward", "gelu_backward", "silu_backward",
                     "threshold_backward"), _zero_of_first),
}  # fmt: skip
"""What follows for an operator; where that is None, what follows for any."""
_FINITE = frozenset(
    {
        "add", "sub", "mul", "neg", "abs", "maximum", "minimum", "clamp", "clamp_min", "clamp_max",
        "where", "convert_element_type", "clone", "sum", "amax", "amin", "gather", "scatter",
        "scatter_add", "tanh", "sigmoid", "eq", "ne", "lt", "le", "gt", "ge", "logical_not",
        "logical_and", "logical_or", "bitwise_not", "bitwise_and", "bitwise_or",
        *(_name(op) for op in VIEWS),
    }
)  # fmt: skip
"""Finite numbers in, finite numbers out, but for the largest."""

"""What can be known of the values of one row without computing them: a number, or nothing.

A value is *known* if all its elements in the row are one number. Zero times what is not known is
zero, as long as that is finite: in a row of a model that is not broken it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from fxremat.compat.inductor.kernels import apart
from fxremat.runtime.chunks.buffers import COPIES, VIEWS
from fxremat.runtime.chunks.program import Number, overload


@dataclass(frozen=True)
class Known:
    """All elements of a row are this number."""

    number: Number


Value = Known | None
"""None: nothing is known."""


def known(number: Number, dtype: torch.dtype) -> Known:
    """The number as an element of this type."""
    if dtype is torch.bool:
        return Known(bool(number))
    return Known(float(number) if dtype.is_floating_point else int(number))


def is_zero(value: Any) -> bool:
    """Whether a value is known to be zero."""
    return isinstance(value, Known) and value.number == 0


def result_of(
    op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> Value:
    """What is known of a result; ``args`` have a `Value` in place of each tensor.

    ``op`` is an operator as in programs over rows, ``dtype`` that of its result. What is named may
    change what an operator does, so then nothing is known.
    """
    if kwargs and _name(op) != "full":
        return None
    rule = _RULES.get(_name(op))
    found = None if rule is None else rule(*args)
    if found is not None:
        return known(found.number, dtype)
    return _computed(op, args, dtype) if _is_of_elements(op) else None


def _name(op: str) -> str:
    return op.split(".")[1]


def _is_of_elements(op: str) -> bool:
    return op in COPIES or torch.Tag.pointwise in overload(op).tags


def _computed(op: str, args: tuple[Any, ...], dtype: torch.dtype) -> Value:
    """What torch makes of numbers; nothing where one is not known."""
    if any(one is None for one in args) or not any(isinstance(one, Known) for one in args):
        return None

    def tensor(one: Any) -> Any:
        if not isinstance(one, Known):
            return one
        is_float = isinstance(one.number, float) and dtype.is_floating_point
        return torch.tensor(one.number, dtype=dtype if is_float else None)

    with apart():
        return known(overload(op)(*map(tensor, args)).to(dtype).item(), dtype)


# --- operators -----------------------------------------------------------------------------------


def _same(given: Value, *_: Any) -> Value:
    return given


def _zero(given: Value, *_: Any) -> Value:
    return given if is_zero(given) else None


def _value(given: Value | Number) -> Value:
    """Of a number that stands in an argument, or of a tensor."""
    return Known(given) if isinstance(given, (bool, int, float)) else given


def _product(left: Any, right: Any) -> Value:
    """Zero, if one is zero and nothing says that the other is infinite."""
    for one, other in ((left, _value(right)), (right, _value(left))):
        if is_zero(one) and (other is None or isfinite(other.number)):
            return Known(0)
    return None


def _both(left: Any, right: Any) -> Value:
    return next((one for one in (left, right) if is_zero(one)), None)


def _choice(condition: Value, true: Value | Number, false: Value | Number) -> Value:
    if condition is None:
        return _value(true) if _value(true) == _value(false) else None
    return _value(true if condition.number else false)


def _written(into: Value, _: int, __: Value, source: Any) -> Value:
    """With what is written equal to what is there."""
    value = _value(source)
    return into if into is not None and value is not None and into.number == value.number else None


def _added(into: Value, _: int, __: Value, source: Value) -> Value:
    return into if is_zero(source) else None


_RULES: Mapping[str, Callable[..., Value]] = {
    **dict.fromkeys((*map(_name, VIEWS), "clone", "amax", "amin", "mean", "gather"), _same),
    **dict.fromkeys(("mul", "mm", "bmm"), _product),
    **dict.fromkeys(("logical_and", "bitwise_and"), _both),
    "where": _choice,
    "scatter": _written,
    "scatter_add": _added,
    "full": lambda _, number: Known(number),
    "sum": _zero,
    **dict.fromkeys(
        (
            "_softmax_backward_data", "_log_softmax_backward_data", "tanh_backward",
            "sigmoid_backward", "gelu_backward", "silu_backward", "threshold_backward",
        ),
        _zero,
    ),
}  # fmt: skip
"""What follows by itself; of known numbers, torch says what an operator on elements gives."""

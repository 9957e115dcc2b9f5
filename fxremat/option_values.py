"""Reading the value of an option: from Python, or as text from the environment.

One ``read_`` function per kind of value: it returns the value checked, or raises `InvalidOption`
saying what was expected. `fxremat.options` says which option is read by which.
"""

from __future__ import annotations

import math
import numbers
import os
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fxremat.errors import InvalidOption
from fxremat.sizes import MIB, format_bytes, has_unit, parse_bytes

T = TypeVar("T")
COUNTS = ("reserved", "allocated")


@dataclass(frozen=True)
class Given:
    """A value that was given to an option, and what is needed to check it."""

    option: str
    value: object
    variable: str | None
    device_total_bytes: int | None

    def refuse(self, expected: str, choices: Iterable[str] = ()) -> InvalidOption:
        """The error to raise; ``expected`` completes the sentence "expected ..."."""
        return InvalidOption(self.option, self.value, expected, tuple(choices), self.variable)


def optional(read: Callable[[Given], T]) -> Callable[[Given], T | None]:
    """What reads an option that may be None."""
    return lambda given: None if given.value is None else read(given)


def machine_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_percent(given: Given, text: str) -> int:
    """Bytes of ``"80%"`` of the device; without a device, of this machine's memory."""
    percent = _float_or_nan(text.strip().removesuffix("%"))
    if not 0 < percent <= 100:
        raise given.refuse("a percentage above 0% and up to 100%, such as '80%'")
    total = given.device_total_bytes
    return int((machine_memory_bytes() if total is None else total) * percent / 100)


def _read_size(given: Given) -> int:
    value = given.value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if not isinstance(value, str):
        raise given.refuse("a number of bytes (int) or text such as '8GiB' or '80%'")
    if value.strip().endswith("%"):
        return _read_percent(given, value)
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise given.refuse("a size such as '8GiB', '512MiB', '8GB' or '80%'") from error


def _refuse_tiny(given: Given, nbytes: int) -> None:
    """Refuse ``8`` where ``"8GiB"`` was meant; a size that names its unit is believed."""
    if nbytes >= MIB or (isinstance(given.value, str) and has_unit(given.value)):
        return
    unit = "GiB" if nbytes < 1024 else "MiB"
    raise given.refuse(
        f"a size in bytes, or one with its unit: {nbytes} is less than 1 MiB; "
        f"did you mean '{nbytes}{unit}'?"
    )


@optional
def read_budget(given: Given) -> int:
    nbytes, total = _read_size(given), given.device_total_bytes
    if nbytes <= 0:
        raise given.refuse("more than zero bytes")
    if not (isinstance(given.value, str) and "%" in given.value):
        _refuse_tiny(given, nbytes)
    if total is not None and nbytes > total:
        raise given.refuse(f"at most what the device has, {format_bytes(total)} ({total} bytes)")
    return nbytes


@optional
def read_reserve(given: Given) -> int:
    nbytes = _read_size(given)
    if nbytes < 0:
        raise given.refuse("zero bytes or more")
    return nbytes


def read_optimizer(given: Given) -> Any:
    """A name, a class or another maker, or a weak reference of an optimizer."""
    from torch.optim import Optimizer  # lazily: other options need no torch

    from fxremat.memory.optimizers import OPTIMIZERS

    value = given.value
    if isinstance(value, Optimizer):
        return weakref.ref(value)
    if value is None or callable(value):
        return value
    if not isinstance(value, str) or value.strip().lower() not in OPTIMIZERS:
        names = ", ".join(map(repr, OPTIMIZERS))
        raise given.refuse(f"an optimizer, its class, or one of {names}", OPTIMIZERS)
    return value.strip().lower()


@optional
def read_bandwidth(given: Given) -> int:
    if isinstance(given.value, str) and "%" in given.value:
        raise given.refuse("bytes per second, such as '25GB'")
    text = given.value.removesuffix("/s") if isinstance(given.value, str) else given.value
    rate = _read_size(replace(given, value=text))
    if rate < 0:
        raise given.refuse("zero bytes per second or more")
    return rate


def read_link(given: Given) -> int | None:
    rate = read_bandwidth(given)
    if rate == 0:
        raise given.refuse("more than zero bytes per second")
    return rate


def read_choice(given: Given, choices: tuple[str, ...]) -> str:
    if given.value not in choices:
        raise given.refuse("one of " + ", ".join(map(repr, choices)), choices)
    return str(given.value)


@optional
def read_count(given: Given) -> str:
    count = read_choice(given, COUNTS)
    if count == "reserved" and given.device_total_bytes is None:
        raise given.refuse("'allocated' on the CPU: no allocator there keeps what is freed")
    return count


def read_solver(given: Given) -> str:
    from fxremat.planner import SOLVERS  # lazily: solvers are not needed to read options

    return read_choice(given, tuple(dict.fromkeys(("auto", *SOLVERS))))


def read_seconds(given: Given) -> float:
    value = given.value if given.variable is None else _float_or_nan(str(given.value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise given.refuse("a number of seconds")
    if not 0 < value < math.inf:
        raise given.refuse("a number of seconds above 0")
    return float(value)


@optional
def read_number_of_runs(given: Given) -> int:
    value = _float_or_nan(str(given.value))
    if isinstance(given.value, bool) or not 1 <= value < math.inf or value != int(value):
        raise given.refuse("a whole number of 1 or more")
    return int(value)


def _float_or_nan(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


_BOOL_OF_TEXT = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def read_bool(given: Given) -> bool:
    value = given.value
    if given.variable is not None:
        value = _BOOL_OF_TEXT.get(str(value).strip().lower())
        if value is None:
            raise given.refuse("1 or 0")
    if not isinstance(value, bool):
        raise given.refuse("True or False")
    return value


def read_enforce(given: Given) -> bool:
    asked = read_bool(given)
    if asked and given.device_total_bytes is None:
        raise given.refuse("False on the CPU: no allocator there can be held to a budget")
    return asked


@optional
def read_path(given: Given) -> str:
    if not isinstance(given.value, (str, os.PathLike)) or not os.fspath(given.value):
        raise given.refuse("a path")
    return str(os.fspath(given.value))


def read_inductor(given: Given) -> tuple[tuple[str, Any], ...]:
    value = given.value
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise given.refuse("a mapping of Inductor option names to values")
    return tuple(sorted(value.items(), key=lambda item: item[0]))


@optional
def read_variants(given: Given) -> tuple[str, ...]:
    """Names of variants, as a list or as text with commas; None is those tried by default."""
    from fxremat.passes.variants.table import ALL, RULES  # lazily: few options need rules

    names = _names_in(given)
    if names in ([ALL], (ALL,)):
        return (ALL,)
    known = tuple(rule.name for rule in RULES)
    return _known(given, names, known, "'all', 'none' or a list of names")


def _names_in(given: Given) -> Any:
    """Text with commas as a list, nothing as an empty one; anything else as it is."""
    text = () if given.value is None else given.value
    return [part.strip() for part in text.split(",")] if isinstance(text, str) else text


def _known(given: Given, names: Any, known: tuple[str, ...], expected: str) -> tuple[str, ...]:
    """The names without repetitions, none for "none"; refused unless all are known."""
    if names == ["none"]:
        return ()
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise given.refuse(expected)
    if not {*names} <= {*known}:
        raise given.refuse(expected, known)
    return tuple(dict.fromkeys(names))


PASSES = ("recompute", "sums", "inplace")
"""The passes that ``disable_passes`` may name; offloading and variants have own options."""


def read_passes(given: Given) -> tuple[str, ...]:
    """Names of passes, as a list or as text with commas."""
    return _known(given, _names_in(given), PASSES, "names of passes")


def read_ops(given: Given) -> tuple[str, ...]:
    """Names of ops, whose library may be loaded later: "library::op"."""
    names = _names_in(given)
    if not isinstance(names, (list, tuple)) or not all(
        isinstance(name, str) and _NAME_OF_OP.fullmatch(name) for name in names
    ):
        raise given.refuse("names of ops, as 'library::op'")
    return tuple(dict.fromkeys(names))


_NAME_OF_OP = re.compile(r"[^\W\d]\w*::[^\W\d]\w*")


def lossy_among(names: Iterable[str]) -> tuple[str, ...]:
    """The named variants that store values inexactly."""
    from fxremat.passes.variants.table import RULES

    return tuple(rule.name for rule in RULES if rule.lossy and rule.name in set(names))

"""Dataclasses as JSON data, and back, by the types of their fields.

    data = to_data(plan)              # dicts, lists, strings, numbers, booleans, None
    plan = from_data(Plan, data)      # raises InvalidData, which names the field that is wrong

Fields may be strings, numbers, booleans, literals, None, other dataclasses, tuples, lists,
mappings with string keys, and unions of these; a field typed `Any` or `object` is taken as it is.
Fields that the class does not know are ignored, and those with a default may be missing. The types
are looked up when the program runs, so they must not be imported under ``TYPE_CHECKING`` only.

A class with a form of its own has a method ``to_data()`` and a class method ``from_data(data)``
that raises `InvalidData`.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


class InvalidData(ValueError):
    """JSON data do not have the form of a dataclass; the message names the field."""


def to_data(value: Any) -> Any:
    """The value as JSON data."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if hasattr(value, "to_data"):
        return value.to_data()
    if is_dataclass(value):
        return {field.name: to_data(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_data(entry) for key, entry in value.items()}
    if isinstance(value, Sequence):
        return [to_data(entry) for entry in value]
    raise TypeError(f"{type(value).__name__} has no form as JSON data")


def from_data(kind: type[T], data: Any) -> T:
    """The value of a type that the data stand for; raises `InvalidData`."""
    return cast(T, _read(kind, data, ""))


_EXPECTED = {str: "a string", int: "a whole number", float: "a number", bool: "true or false",
             type(None): "null"}  # fmt: skip


@cache
def _shape(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its arguments, and these; of a union None comes first."""
    return get_origin(kind) or kind, tuple(
        sorted(get_args(kind), key=lambda argument: argument is not type(None))
        if get_origin(kind) in (Union, types.UnionType)
        else get_args(kind)
    )


def _read(kind: Any, data: Any, path: str) -> Any:
    """How data become a value of a type, which may be a generic one or a union."""
    if type(data) is kind or kind is Any or kind is object:
        return data
    origin, arguments = _shape(kind)
    if origin in (Union, types.UnionType):
        return _read_union(arguments, data, path)
    if origin in (tuple, list, Sequence):
        return _read_list(origin, arguments, data, path)
    if origin in (dict, Mapping):
        entries = _of_kind(Mapping, data, path, "an object").items()
        return {key: _read(arguments[1], entry, f"{path}[{key!r}]") for key, entry in entries}
    if origin is Literal:
        if data not in arguments:
            raise _wrong(data, path, " or ".join(map(repr, arguments)))
        return data
    if hasattr(kind, "from_data"):
        try:
            return kind.from_data(data)
        except InvalidData as error:
            raise InvalidData(f"field {path!r}: {error}" if path else str(error)) from error
    if is_dataclass(kind):
        return _read_fields(kind, data, path)
    if kind not in _EXPECTED:
        raise TypeError(f"{kind} cannot be read from JSON data")
    if kind is float and type(data) is int:
        return float(data)
    raise _wrong(data, path, _EXPECTED[kind])


def _read_union(kinds: tuple[Any, ...], data: Any, path: str) -> Any:
    """The first type that takes the data; where none does, the error of the last."""
    if type(data) in kinds:
        return data
    for kind in kinds[:-1]:
        with suppress(InvalidData):
            return _read(kind, data, path)
    return _read(kinds[-1], data, path)


def _read_list(origin: Any, kinds: tuple[Any, ...], data: Any, path: str) -> Any:
    entries, made = _of_kind((list, tuple), data, path, "a list"), list if origin is list else tuple
    if origin is not tuple or kinds[-1] is Ellipsis:
        if {*map(type, entries)} <= {kinds[0]}:
            return made(entries)
        kinds = (kinds[0],) * len(entries)
    if len(entries) != len(kinds):
        raise _wrong(data, path, f"a list of {len(kinds)}")
    pairs = enumerate(zip(kinds, entries, strict=True))
    return made([_read(kind, entry, f"{path}[{index}]") for index, (kind, entry) in pairs])


@cache
def _fields_of(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The type of each field of a dataclass, and whether data have to have it."""
    types_of = get_type_hints(kind)
    return {
        one.name: (types_of[one.name], one.default is one.default_factory is MISSING)
        for one in fields(kind)
        if one.init
    }


def _read_fields(kind: Any, data: Any, path: str) -> Any:
    found, entries = {}, _of_kind(Mapping, data, path, "an object")
    for name, (its, needed) in _fields_of(kind).items():
        inside = f"{path}.{name}" if path else name
        if name in entries:
            found[name] = _read(its, entries[name], inside)
        elif needed:
            raise InvalidData(f"field {inside!r} is missing")
    return kind(**found)


def _of_kind(kind: Any, data: Any, path: str, expected: str) -> Any:
    if not isinstance(data, kind):
        raise _wrong(data, path, expected)
    return data


def _wrong(data: Any, path: str, expected: str) -> InvalidData:
    text = repr(data)
    text = text if len(text) <= 60 else f"{text[:60]} ..."
    return InvalidData(f"field {path!r} is {text}, expected {expected}" if path
                       else f"expected {expected}, not {text}")  # fmt: skip

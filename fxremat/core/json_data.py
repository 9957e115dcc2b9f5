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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
Reader = Callable[[Any, str], Any]
"""Makes a value of JSON data; the path of the data is for the error that it raises."""


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


def from_data(kind: type[T], data: Any, path: str = "") -> T:
    """The value of a type that the data stand for; raises `InvalidData`."""
    read: Reader = _reader(cast(Any, kind))
    return cast(T, read(data, path))


@cache
def _reader(kind: Any) -> Reader:
    """How data become a value of a type, which may be a generic one or a union."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any or kind is object:
        return lambda data, path: data
    if origin is Literal:
        return _literal(arguments)
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _fixed_tuple(arguments)
    if origin in (tuple, list, Sequence):
        return _sequence(arguments[0], list if origin is list else tuple)
    if origin in (dict, Mapping):
        return _mapping(arguments[1])
    if hasattr(kind, "from_data"):
        return _own_form(kind)
    if is_dataclass(kind):
        return _dataclass(cast(type, kind))
    return _scalar(kind)


_EXPECTED = {str: "a string", int: "a whole number", float: "a number", bool: "true or false",
             type(None): "null"}  # fmt: skip


def _scalar(kind: type) -> Reader:
    if kind not in _EXPECTED:
        raise TypeError(f"{kind} cannot be read from JSON data")

    def read(data: Any, path: str) -> Any:
        if type(data) is kind:
            return data
        if kind is float and type(data) is int:
            return float(data)
        raise _wrong(data, path, _EXPECTED[kind])

    return read


def _literal(choices: tuple[Any, ...]) -> Reader:
    def read(data: Any, path: str) -> Any:
        if data not in choices:
            raise _wrong(data, path, " or ".join(map(repr, choices)))
        return data

    return read


def _union(kinds: tuple[Any, ...]) -> Reader:
    """The first type that takes the data; where none does, the error of the last."""
    readers = [_reader(kind) for kind in sorted(kinds, key=lambda kind: kind is not type(None))]

    def read(data: Any, path: str) -> Any:
        for reader in readers[:-1]:
            try:
                return reader(data, path)
            except InvalidData:
                continue
        return readers[-1](data, path)

    return read


def _sequence(kind: Any, made: Callable[[list[Any]], Any]) -> Reader:
    reader = _reader(kind)

    def read(data: Any, path: str) -> Any:
        entries = _list(data, path)
        return made([reader(entry, f"{path}[{index}]") for index, entry in enumerate(entries)])

    return read


def _fixed_tuple(kinds: tuple[Any, ...]) -> Reader:
    readers = [_reader(kind) for kind in kinds]

    def read(data: Any, path: str) -> Any:
        entries = _list(data, path)
        if len(entries) != len(readers):
            raise _wrong(data, path, f"a list of {len(readers)}")
        pairs = enumerate(zip(readers, entries, strict=True))
        return tuple(reader(entry, f"{path}[{index}]") for index, (reader, entry) in pairs)

    return read


def _mapping(kind: Any) -> Reader:
    reader = _reader(kind)

    def read(data: Any, path: str) -> Any:
        entries = _object(data, path).items()
        return {key: reader(entry, f"{path}[{key!r}]") for key, entry in entries}

    return read


def _own_form(kind: Any) -> Reader:
    def read(data: Any, path: str) -> Any:
        try:
            return kind.from_data(data)
        except InvalidData as error:
            raise InvalidData(f"field {path!r}: {error}" if path else str(error)) from error

    return read


def _dataclass(kind: type) -> Reader:
    types_of = get_type_hints(kind)
    readers = {field.name: _reader(types_of[field.name]) for field in fields(kind) if field.init}
    needed = {
        field.name
        for field in fields(kind)
        if field.default is MISSING and field.default_factory is MISSING
    }

    def read(data: Any, path: str) -> Any:
        found, entries = {}, _object(data, path)
        for name, reader in readers.items():
            inside = f"{path}.{name}" if path else name
            if name in entries:
                found[name] = reader(entries[name], inside)
            elif name in needed:
                raise InvalidData(f"field {inside!r} is missing")
        return kind(**found)

    return read


def _list(data: Any, path: str) -> Sequence[Any]:
    if not isinstance(data, (list, tuple)):
        raise _wrong(data, path, "a list")
    return data


def _object(data: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise _wrong(data, path, "an object")
    return data


def _wrong(data: Any, path: str, expected: str) -> InvalidData:
    text = repr(data)
    text = text if len(text) <= 60 else f"{text[:60]} ..."
    return InvalidData(f"field {path!r} is {text}, expected {expected}" if path
                       else f"expected {expected}, not {text}")  # fmt: skip

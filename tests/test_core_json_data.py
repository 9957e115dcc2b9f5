"""Dataclasses as JSON data: there and back, and what is said of data that are wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from fxremat.core.json_data import InvalidData, from_data, to_data
from fxremat.core.schedule import Move


@dataclass(frozen=True)
class Inner:
    name: str
    pair: tuple[int, float] = (1, 2.0)


@dataclass(frozen=True)
class Outer:
    inner: tuple[Inner, ...]
    steps: tuple[str | Move, ...] = ()
    by_name: dict[str, Inner] = field(default_factory=dict)
    kind: Literal["one", "other"] = "one"
    limit: int | None = None
    anything: Any = None


OUTER = Outer(
    (Inner("a"), Inner("b", (3, 4.5))),
    ("op", Move("wait", "a")),
    {"c": Inner("d")},
    "other",
    7,
    [{"free": True}],
)


def test_there_and_back() -> None:
    assert from_data(Outer, json.loads(json.dumps(to_data(OUTER)))) == OUTER
    assert to_data(Move("to host", "a")) == {"to host": "a"}


def test_defaults_may_be_missing_and_unknown_fields_are_ignored() -> None:
    assert from_data(Outer, {"inner": [], "colour": "red"}) == Outer(())


def test_a_whole_number_is_a_number() -> None:
    assert from_data(Inner, {"name": "a", "pair": [1, 2]}) == Inner("a", (1, 2.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": 3}, "field 'inner' is 3, expected a list"),
        ({"inner": [{}]}, r"field 'inner\[0\].name' is missing"),
        ({"inner": [{"name": True}]}, r"field 'inner\[0\].name' is True, expected a string"),
        ({"inner": [{"name": "a", "pair": [1]}]}, r"'inner\[0\].pair' .*expected a list of 2"),
        ({"inner": [{"name": "a", "pair": [True, 1]}]}, r"pair\[0\]' is True, expected a whole"),
        ({"by_name": {"x": []}}, r"field \"by_name\['x'\]\" is \[\], expected an object"),
        ({"kind": "third"}, "field 'kind' is 'third', expected 'one' or 'other'"),
        ({"limit": 1.5}, "field 'limit' is 1.5, expected a whole number"),
        ({"steps": ["a", 1]}, r"field 'steps\[1\]': 1 is not an op's name"),
    ],
)
def test_wrong_data(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidData, match=message):
        from_data(Outer, {**to_data(OUTER), **change})


def test_what_is_no_object() -> None:
    with pytest.raises(InvalidData, match="expected an object, not 5"):
        from_data(Outer, 5)

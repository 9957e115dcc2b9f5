"""Sizes as text, exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.sizes import format_bytes, has_unit, parse_bytes, round_up_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 * 2**30),
        ("512MiB", 512 * 2**20),
        ("8GB", 8 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        (" 2 kib ", 2048),
        ("3kB", 3000),
        ("1TiB", 2**40),
        ("0.1 TB", 10**11),
        ("1048576", 2**20),
        ("7 B", 7),
        ("0.0001KiB", 0),
    ],
)
def test_parse(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


REFUSED = ["", "GiB", "8G", "8 Gib its", "-1GiB", "1e9", "nan", "inf", "1,5GiB", "1..5GB", "\u0663"]


@pytest.mark.parametrize("text", REFUSED)
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="GiB"):
        parse_bytes(text)


def test_has_unit() -> None:
    assert has_unit("8 B")
    assert not has_unit("8")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (7_849_123_000, "7.31 GiB"),
        (2**40, "1.00 TiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_format(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(0, 2**50))
def test_rounded_up_is_enough_and_little_more(nbytes: int) -> None:
    again = parse_bytes(round_up_bytes(nbytes))
    assert nbytes <= again <= nbytes * 1.01 + 1


def test_round_up_is_short_where_it_can_be() -> None:
    assert round_up_bytes(2**30) == "1GiB"
    assert round_up_bytes(2**30 + 1) == "1.01GiB"

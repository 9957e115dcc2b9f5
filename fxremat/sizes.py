"""Sizes as text: "8GiB" to bytes and back.

``KiB MiB GiB TiB`` are powers of 1024, ``kB MB GB TB`` powers of 1000. Exact: no float is used.
"""

from __future__ import annotations

import re
from fractions import Fraction

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

UNITS = {
    "B": 1,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": TIB,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_BYTES_OF_UNIT = {unit.lower(): nbytes for unit, nbytes in UNITS.items()}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(text: str) -> int:
    """Bytes of ``"8GiB"``, ``"1.5 GiB"``, ``"512MB"`` or ``"1048576"``, rounded down."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it as '8GiB', '512MiB' or '1.5 GB'")
    number, unit = match.groups()
    nbytes = _BYTES_OF_UNIT.get(unit.lower() or "b")
    if nbytes is None:
        raise ValueError(f"{text!r} has no unit that is known; use one of {', '.join(UNITS)}")
    return int(Fraction(number) * nbytes)


def has_unit(text: str) -> bool:
    """Whether a size that `parse_bytes` can read names its unit."""
    match = _SIZE.fullmatch(text)
    return match is not None and match.group(2) != ""


def _unit_for(nbytes: int) -> tuple[str, int]:
    """The largest binary unit of which there is at least one."""
    units = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
    return next((row for row in units if nbytes >= row[1]), ("B", 1))


def format_bytes(nbytes: int) -> str:
    """``7.31 GiB``, ``12.00 KiB``, ``12 B``: two decimals, to the nearest."""
    unit, size = _unit_for(abs(nbytes))
    return f"{nbytes} B" if size == 1 else f"{nbytes / size:.2f} {unit}"


def exact_bytes(nbytes: int) -> str:
    """``1,536 bytes (1.50 KiB)``."""
    return f"{nbytes:,} bytes ({format_bytes(nbytes)})"


def round_up_bytes(nbytes: int) -> str:
    """The shortest text with two decimals that `parse_bytes` reads as at least ``nbytes``."""
    unit, size = _unit_for(nbytes)
    if size == 1:
        return f"{nbytes}B"
    whole, cents = divmod(-(-nbytes * 100 // size), 100)
    return f"{whole}.{cents:02d}{unit}" if cents else f"{whole}{unit}"

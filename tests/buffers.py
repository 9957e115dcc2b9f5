"""Buffers to place: a small case, and a strategy."""

from __future__ import annotations

from hypothesis import strategies as st

from fxremat.core.layout import Buffer

LONG, EARLY, LATE = Buffer("long", 0, 4, 8, 8), Buffer("early", 0, 2, 4), Buffer("late", 2, 4, 5)
THREE = (LONG, EARLY, LATE)
FINE = {"long": 8, "early": 0, "late": 1}


@st.composite
def buffers(
    draw: st.DrawFn, most: int = 8, alignments: tuple[int, ...] = (1, 4, 8)
) -> list[Buffer]:
    """Up to ``most`` buffers over few steps; some have no bytes."""
    out = []
    for index in range(draw(st.integers(0, most))):
        begin = draw(st.integers(0, 9))
        end = draw(st.integers(begin + 1, 10))
        size, alignment = draw(st.integers(0, 20)), draw(st.sampled_from(alignments))
        out.append(Buffer(f"b{index}", begin, end, size, alignment))
    return out

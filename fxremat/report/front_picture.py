"""The picture of a front: added time over bytes, a plan a dot, what has to be known marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fxremat.report.drawing import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    draw_captions,
    draw_grid,
    draw_polyline,
    draw_text,
    make_axis,
    svg,
)
from fxremat.sizes import UNITS, format_bytes

PLANS, MARKS = "#0072b2", "#d55e00"
ROOM = 150


@dataclass(frozen=True)
class Mark:
    """A number of bytes with a name, written at the top of the picture or down at the axis."""

    name: str
    bytes: int
    down: bool = False


def draw_front(title: str, points: Sequence[tuple[int, float]], marks: Sequence[Mark] = ()) -> str:
    """SVG text; ``points`` are (bytes, added time as a fraction), by falling bytes."""
    unit = _unit(max((nbytes for nbytes, _ in points), default=1))
    size = UNITS[unit]
    widths = [nbytes / size for nbytes, _ in points] + [mark.bytes / size for mark in marks]
    across = make_axis(widths or [1.0], LEFT, WIDTH - RIGHT, zero=True)
    up = make_axis([100 * added for _, added in points] or [0.0], HEIGHT - BOTTOM, TOP)
    places = [(across(nbytes / size), up(100 * added)) for nbytes, added in points]
    parts = draw_captions(title, f"peak, {unit}", "added time, %")
    parts += draw_grid(across, up)
    parts.append(draw_polyline(_stairs(places), PLANS))
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{PLANS}"/>' for x, y in places]
    for mark in marks:
        parts += _draw_mark(mark, across(mark.bytes / size))
    return svg(["\n".join(part for part in parts if part)])


def _unit(nbytes: int) -> str:
    """The binary unit in which ``nbytes`` is written."""
    return format_bytes(nbytes).split()[-1]


def _stairs(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Between two plans, the slower one is what fits."""
    corners = list(places[:1])
    for (x, _), (next_x, next_y) in pairwise(places):
        corners += [(x, next_y), (next_x, next_y)]
    return corners


def _draw_mark(mark: Mark, x: float) -> list[str]:
    """A dashed line at ``x``, named on its right unless the picture ends there."""
    left = x > WIDTH - RIGHT - ROOM
    y = HEIGHT - BOTTOM - 8 if mark.down else TOP + 14
    where = 'class="label" text-anchor="end"' if left else 'class="label"'
    text = f"{mark.name}: {format_bytes(mark.bytes)}"
    return [
        f'<line class="mark" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" '
        f'stroke="{MARKS}" stroke-dasharray="5 4"/>',
        draw_text(x - 5 if left else x + 5, y, text, where),
    ]

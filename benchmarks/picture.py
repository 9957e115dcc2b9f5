"""The front of peak against time as an SVG: one panel per model, every variant marked."""

from dataclasses import dataclass
from itertools import pairwise
from math import hypot
from pathlib import Path

from fxremat.report.front import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    draw_captions,
    draw_grid,
    draw_line,
    draw_polyline,
    draw_text,
    make_axis,
    svg,
)

from .rows import MIB, Row

COLUMNS = 2
CHARACTER, LINE = 6.8, 13.0
COLOURS = {
    "compile": "#000000",
    "blocks": "#000000",
    "eager": "#888888",
    "knob": "#d55e00",
    "checkpoint": "#009e73",
    "fxremat": "#0072b2",
}


@dataclass(frozen=True)
class Point:
    """A variant in the plane of peak and time."""

    name: str
    kind: str
    peak: float
    time: float


Box = tuple[float, float, float, float]


def _overlap(one: Box, other: Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)


def place_label(x: float, y: float, text: str, taken: list[Box]) -> Box:
    """The box near (x, y) that covers least of what is there; nearer is better."""
    width = CHARACTER * len(text)
    candidates = []
    for distance in (8, 20, 34, 50, 70):
        for dx, dy in ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (1, 1), (-1, -1), (-1, 1)):
            left = x + dx * distance - (width if dx < 0 else width / 2 if dx == 0 else 0)
            middle = y + dy * distance
            box = (left, middle - LINE / 2, left + width, middle + LINE / 2)
            covered = sum(_overlap(box, other) for other in taken)
            outside = box[0] < LEFT or box[2] > WIDTH or box[1] < TOP - 10
            below = box[3] > HEIGHT - BOTTOM
            candidates.append((covered + 1e4 * (outside or below) + distance, box))
    return min(candidates)[1]


def _marker(x: float, y: float, point: Point) -> str:
    colour = COLOURS[point.kind]
    if point.kind == "fxremat":
        return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{colour}"/>'
    if point.kind == "knob":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
    corners = f"{x:.1f},{y - 5.5:.1f} {x + 5.5:.1f},{y:.1f} {x:.1f},{y + 5.5:.1f}"
    return f'<polygon points="{corners} {x - 5.5:.1f},{y:.1f}" fill="{colour}"/>'


Place = tuple[float, float]


def _front(places: dict[Point, Place], kind: str) -> list[Place]:
    """The variants of one kind, from the smallest peak to the largest."""
    return sorted(place for point, place in places.items() if point.kind == kind)


def _boxes_along(front: list[Place]) -> list[Box]:
    """Small boxes that cover the line through the points of a front."""
    boxes = []
    for (x1, y1), (x2, y2) in pairwise(front):
        count = int(hypot(x2 - x1, y2 - y1) / 6) + 1
        for part in range(count):
            x, y = x1 + (x2 - x1) * part / count, y1 + (y2 - y1) * part / count
            boxes.append((x - 3, y - 3, x + 3, y + 3))
    return boxes


def _labels(places: dict[Point, Place], fronts: list[list[Place]]) -> list[str]:
    taken: list[Box] = [(x - 7, y - 7, x + 7, y + 7) for x, y in places.values()]
    taken += [box for front in fronts for box in _boxes_along(front)]
    parts = []
    for point, (x, y) in places.items():
        box = place_label(x, y, point.name, taken)
        taken.append(box)
        near = (min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3]))
        parts.append(draw_line("leader", x, y, *near))
        parts.append(draw_text(box[0], box[3] - 3, point.name, 'class="label"'))
    return parts


AXES = ("measured peak, MiB", "step time relative to torch.compile")


def panel(title: str, points: list[Point], axes: tuple[str, str] = AXES) -> str:
    """One model: axes, fronts, markers and labels."""
    across = make_axis([p.peak for p in points], LEFT, WIDTH - RIGHT, zero=True)
    up = make_axis([p.time for p in points], HEIGHT - BOTTOM, TOP)
    places = {point: (across(point.peak), up(point.time)) for point in points}
    fronts = {kind: _front(places, kind) for kind in ("knob", "fxremat")}
    lines = [draw_polyline(front, COLOURS[kind]) for kind, front in fronts.items()]
    captions = draw_captions(title, *axes)
    labels = _labels(places, list(fronts.values()))
    markers = [_marker(x, y, point) for point, (x, y) in places.items()]
    return "\n".join([*captions, *draw_grid(across, up), *lines, *labels, *markers])


def points_of(rows: list[Row]) -> list[Point]:
    """The rows that have both a peak and a time."""
    return [
        Point(row.variant, row.kind, row.peak_bytes / MIB, row.time_ratio)
        for row in rows
        if row.peak_bytes is not None and row.time_ratio is not None
    ]


def draw(panels: dict[str, list[Point]], path: Path) -> None:
    """Write all panels, two to a row."""
    path.write_text(svg([panel(title, points) for title, points in panels.items()], COLUMNS))

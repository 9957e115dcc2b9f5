"""The front of peak against time as an SVG: one panel per model, every variant marked."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import hypot
from pathlib import Path
from xml.sax.saxutils import escape

from .rows import MIB, Row

WIDTH, HEIGHT = 640, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 40, 52
COLUMNS = 2
CHARACTER, LINE = 6.8, 13.0
STYLE = """
text { font: 11px sans-serif; fill: #222 }
.label { paint-order: stroke; stroke: white; stroke-width: 3px }
.title { font-size: 15px; font-weight: bold }
.grid { stroke: #e4e4e4 } .leader { stroke: #aaa; stroke-width: 0.7 } .axis { stroke: #555 }
.front { fill: none; stroke-width: 1.6; opacity: 0.75 }
"""
COLOURS = {
    "compile": "#000000",
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


@dataclass(frozen=True)
class Axis:
    """A linear map from values to pixels, with its ticks."""

    low: float
    high: float
    start: float
    end: float
    step: float

    def __call__(self, value: float) -> float:
        part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values within the range."""
        first = -(-self.low // self.step)
        count = int((self.high - first * self.step) / self.step + 1e-9) + 1
        return [(first + index) * self.step for index in range(count)]


def make_axis(values: Sequence[float], start: float, end: float, zero: bool = False) -> Axis:
    """An axis with some room around the values."""
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    low, high = (0.0 if zero else low - room), high + room
    steps = (m * 10.0**e for e in range(-4, 9) for m in (1, 2, 5))
    step = next(step for step in steps if (high - low) / step <= 7)
    return Axis(low, high, start, end, step)


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


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'


def _grid(across: Axis, up: Axis) -> list[str]:
    parts = []
    for tick in across.ticks():
        x = across(tick)
        parts.append(_line("grid", x, TOP, x, HEIGHT - BOTTOM))
        parts.append(_text(x, HEIGHT - BOTTOM + 16, f"{tick:g}", 'text-anchor="middle"'))
    for tick in up.ticks():
        y = up(tick)
        parts.append(_line("grid", LEFT, y, WIDTH - RIGHT, y))
        parts.append(_text(LEFT - 8, y + 4, f"{tick:g}", 'text-anchor="end"'))
    parts.append(_line("axis", LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM))
    parts.append(_line("axis", LEFT, TOP, LEFT, HEIGHT - BOTTOM))
    return parts


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _captions(title: str) -> list[str]:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'text-anchor="middle" transform="rotate(-90 16 {middle:.1f})"'
    return [
        _text(LEFT, 22, title, 'class="title"'),
        _text((LEFT + WIDTH) / 2, HEIGHT - 12, "measured peak, MiB", 'text-anchor="middle"'),
        _text(16, middle, "step time relative to torch.compile", turned),
    ]


Place = tuple[float, float]


def _front(places: dict[Point, Place], kind: str) -> list[Place]:
    """The variants of one kind, from the smallest peak to the largest."""
    return sorted(place for point, place in places.items() if point.kind == kind)


def _polyline(front: list[Place], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in front)
    return f'<polyline class="front" points="{path}" stroke="{colour}"/>'


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
        parts.append(_line("leader", x, y, *near))
        parts.append(_text(box[0], box[3] - 3, point.name, 'class="label"'))
    return parts


def panel(title: str, points: list[Point]) -> str:
    """One model: axes, fronts, markers and labels."""
    across = make_axis([p.peak for p in points], LEFT, WIDTH - RIGHT, zero=True)
    up = make_axis([p.time for p in points], HEIGHT - BOTTOM, TOP)
    places = {point: (across(point.peak), up(point.time)) for point in points}
    fronts = {kind: _front(places, kind) for kind in ("knob", "fxremat")}
    lines = [_polyline(front, COLOURS[kind]) for kind, front in fronts.items()]
    labels = _labels(places, list(fronts.values()))
    markers = [_marker(x, y, point) for point, (x, y) in places.items()]
    return "\n".join([*_captions(title), *_grid(across, up), *lines, *labels, *markers])


def points_of(rows: list[Row]) -> list[Point]:
    """The rows that have both a peak and a time."""
    return [
        Point(row.variant, row.kind, row.peak_bytes / MIB, row.time_ratio)
        for row in rows
        if row.peak_bytes is not None and row.time_ratio is not None
    ]


def draw(panels: dict[str, list[Point]], path: Path) -> None:
    """Write all panels, two to a row."""
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    size = f'width="{columns * WIDTH}" height="{lines * HEIGHT}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{STYLE}</style>"]
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for index, (title, points) in enumerate(panels.items()):
        row, column = divmod(index, columns)
        place = f"translate({column * WIDTH} {row * HEIGHT})"
        parts.append(f'<g transform="{place}">\n{panel(title, points)}\n</g>')
    path.write_text("\n".join([*parts, "</svg>\n"]))

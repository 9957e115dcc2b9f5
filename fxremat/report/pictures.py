"""Pictures in SVG: the front of peak against time, and what fits on a card at each size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

from fxremat.sizes import GIB, UNITS, format_bytes

WIDTH, HEIGHT = 640, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 40, 52
STYLE = """
text { font: 11px sans-serif; fill: #222 }
.label { paint-order: stroke; stroke: white; stroke-width: 3px }
.title { font-size: 15px; font-weight: bold }
.grid { stroke: #e4e4e4 } .leader { stroke: #aaa; stroke-width: 0.7 } .axis { stroke: #555 }
.front { fill: none; stroke-width: 1.6; opacity: 0.75 }
"""


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


def draw_text(x: float, y: float, text: str, more: str = "") -> str:
    """A text at a point; ``more`` are attributes, such as its anchor."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'


def draw_line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """A straight line of a class of the style sheet."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def draw_polyline(points: Iterable[tuple[float, float]], colour: str) -> str:
    """A line through these points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="front" points="{path}" stroke="{colour}"/>'


def draw_grid(across: Axis, up: Axis) -> list[str]:
    """Both axes, with a line and a number at each tick."""
    parts = []
    for tick in across.ticks():
        x = across(tick)
        parts.append(draw_line("grid", x, TOP, x, HEIGHT - BOTTOM))
        parts.append(draw_text(x, HEIGHT - BOTTOM + 16, f"{tick:g}", 'text-anchor="middle"'))
    for tick in up.ticks():
        y = up(tick)
        parts.append(draw_line("grid", LEFT, y, WIDTH - RIGHT, y))
        parts.append(draw_text(LEFT - 8, y + 4, f"{tick:g}", 'text-anchor="end"'))
    parts.append(draw_line("axis", LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM))
    parts.append(draw_line("axis", LEFT, TOP, LEFT, HEIGHT - BOTTOM))
    return parts


def draw_captions(title: str, across: str, up: str) -> list[str]:
    """What the panel shows, and what its axes mean."""
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'text-anchor="middle" transform="rotate(-90 16 {middle:.1f})"'
    return [
        draw_text(LEFT, 22, title, 'class="title"'),
        draw_text((LEFT + WIDTH) / 2, HEIGHT - 12, across, 'text-anchor="middle"'),
        draw_text(16, middle, up, turned),
    ]


def svg(panels: Sequence[str], columns: int = 1) -> str:
    columns = max(1, min(columns, len(panels)))
    rows = -(-len(panels) // columns)
    size = f'width="{columns * WIDTH}" height="{rows * HEIGHT}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{STYLE}</style>"]
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        parts.append(f'<g transform="translate({column * WIDTH} {row * HEIGHT})">\n{panel}\n</g>')
    return "\n".join([*parts, "</svg>\n"])


COLOURS = ("#0072b2", "#009e73", "#d55e00")
MARK_COLOUR = "#d55e00"
ROOM_FOR_LABEL = 150


@dataclass(frozen=True)
class Mark:
    """A number of bytes with a name, written at the top of the picture or down at the axis."""

    name: str
    bytes: int
    down: bool = False


@dataclass(frozen=True)
class Dot:
    """A step of one size."""

    size: int
    peak_bytes: int
    per_second: float


def draw_front(title: str, points: Sequence[tuple[int, float]], marks: Sequence[Mark] = ()) -> str:
    """Added time over bytes as SVG text, a dot for each plan.

    ``points`` are pairs of bytes and added time as a fraction, by falling bytes.
    """
    unit = format_bytes(max((nbytes for nbytes, _ in points), default=1)).split()[-1]
    size = UNITS[unit]
    widths = [nbytes / size for nbytes, _ in points] + [mark.bytes / size for mark in marks]
    across = make_axis(widths or [1.0], LEFT, WIDTH - RIGHT, zero=True)
    up = make_axis([100 * added for _, added in points] or [0.0], HEIGHT - BOTTOM, TOP)
    places = [(across(nbytes / size), up(100 * added)) for nbytes, added in points]
    parts = [*draw_captions(title, f"peak, {unit}", "added time, %"), *draw_grid(across, up)]
    parts.append(draw_polyline(_stairs(places), COLOURS[0]))
    parts += _dots(places, COLOURS[0])
    for mark in marks:
        parts += _draw_mark(mark, across(mark.bytes / size))
    return svg(["\n".join(part for part in parts if part)])


def _stairs(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of a line that falls in steps: between two plans, the slower one fits."""
    corners = list(places[:1])
    for (x, _), (next_x, next_y) in pairwise(places):
        corners += [(x, next_y), (next_x, next_y)]
    return corners


def _dots(places: Sequence[tuple[float, float]], colour: str, name: str = "") -> Iterator[str]:
    """A dot at each place; its name shows where the pointer rests."""
    for x, y in places:
        circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"'
        yield f"{circle}><title>{name}</title></circle>" if name else f"{circle}/>"


def _draw_mark(mark: Mark, x: float) -> list[str]:
    """A dashed line at ``x``, named on its right unless the picture ends there."""
    left = x > WIDTH - RIGHT - ROOM_FOR_LABEL
    y = HEIGHT - BOTTOM - 8 if mark.down else TOP + 14
    where = 'class="label" text-anchor="end"' if left else 'class="label"'
    text = f"{mark.name}: {format_bytes(mark.bytes)}"
    return [
        f'<line class="mark" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" '
        f'stroke="{MARK_COLOUR}" stroke-dasharray="5 4"/>',
        draw_text(x - 5 if left else x + 5, y, text, where),
    ]


def draw_fit(
    title: str, found: Mapping[str, Mapping[str, Sequence[Dot]]], budget_bytes: int
) -> str:
    """Peak and throughput over each size that varies as SVG text, a line for each way to train.

    ``found`` are the steps by what varies and by the way to train, by rising size.
    """
    panels: list[str] = []
    for what, ways in found.items():
        budget = budget_bytes / GIB
        panels += [
            _panel(f"{title}: {what}", what, "peak, GiB", ways, lambda d: d.peak_bytes / GIB,
                   budget),
            _panel("throughput, planned", what, f"{what} a second", ways, lambda d: d.per_second),
        ]  # fmt: skip
    return svg(panels, columns=2)


def _panel(
    title: str,
    across_name: str,
    up_name: str,
    ways: Mapping[str, Sequence[Dot]],
    height: Callable[[Dot], float],
    limit: float | None = None,
) -> str:
    dots = [dot for each in ways.values() for dot in each]
    heights = [height(dot) for dot in dots] + ([] if limit is None else [limit])
    across = make_axis([dot.size for dot in dots] or [1.0], LEFT, WIDTH - RIGHT, zero=True)
    up = make_axis(heights or [1.0], HEIGHT - BOTTOM, TOP, zero=True)
    parts = [*draw_captions(title, across_name, up_name), *draw_grid(across, up)]
    if limit is not None:
        parts += _draw_limit(limit, up)
    for (way, each), colour in zip(ways.items(), COLOURS, strict=False):
        places = [(across(dot.size), up(height(dot))) for dot in each]
        parts += [draw_polyline(places, colour), *_dots(places, colour, way)]
    parts += _names(ways)
    return "\n".join(part for part in parts if part)


def _draw_limit(limit: float, up: Axis) -> list[str]:
    y = up(limit)
    text = f"budget: {format_bytes(int(limit * GIB))}"
    return [draw_line("leader", LEFT, y, WIDTH - RIGHT, y), draw_text(LEFT + 4, y - 4, text)]


def _names(ways: Mapping[str, Sequence[Dot]]) -> Iterator[str]:
    """The names of the lines in their colours, down on the right, where rising lines leave room."""
    for place, (way, colour) in enumerate(zip(ways, COLOURS, strict=False)):
        y = HEIGHT - BOTTOM - 12 - 16 * (len(ways) - 1 - place)
        yield draw_text(
            WIDTH - RIGHT - 6, y, way, f'class="label" text-anchor="end" fill="{colour}"'
        )
        yield f'<circle cx="{WIDTH - RIGHT - 136}" cy="{y - 4}" r="4" fill="{colour}"/>'

"""Drawing in SVG: axes with round ticks, lines and texts, on panels of a fixed size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

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
    """All panels in one picture, row by row."""
    columns = max(1, min(columns, len(panels)))
    rows = -(-len(panels) // columns)
    size = f'width="{columns * WIDTH}" height="{rows * HEIGHT}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{STYLE}</style>"]
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        parts.append(f'<g transform="translate({column * WIDTH} {row * HEIGHT})">\n{panel}\n</g>')
    return "\n".join([*parts, "</svg>\n"])

"""The Pareto front of peak against time, as a table, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any
from xml.sax.saxutils import escape

from fxremat.core.json_data import from_data
from fxremat.core.plan import Plan
from fxremat.core.problem import Problem
from fxremat.core.timeline import store_all_peak
from fxremat.planner.plans import not_beaten
from fxremat.sizes import GIB, UNITS, exact_bytes, format_bytes

WIDTH, HEIGHT = 640, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 40, 52
STYLE = """
text { font: 11px sans-serif; fill: #222 }
.label { paint-order: stroke; stroke: white; stroke-width: 3px }
.title { font-size: 15px; font-weight: bold }
.grid { stroke: #e4e4e4 } .leader { stroke: #aaa; stroke-width: 0.7 } .axis { stroke: #555 }
.front { fill: none; stroke-width: 1.6; opacity: 0.75 }
.mark { stroke: #d55e00; stroke-dasharray: 5 4 }
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
ROOM_FOR_LABEL = 150


@dataclass(frozen=True)
class Dot:
    """A step of one size."""

    size: int
    peak_bytes: int
    per_second: float


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


def _draw_mark(text: str, x: float, y: float) -> list[str]:
    """A dashed line at ``x``, with a text at ``y`` on its right unless the picture ends there."""
    left = x > WIDTH - RIGHT - ROOM_FOR_LABEL
    where = 'class="label" text-anchor="end"' if left else 'class="label"'
    return [
        draw_line("mark", x, TOP, x, HEIGHT - BOTTOM),
        draw_text(x - 5 if left else x + 5, y, text, where),
    ]


def draw_fit(
    title: str, found: Mapping[str, Mapping[str, Sequence[Dot]]], budget_bytes: int
) -> str:
    """Peak and throughput over each size that varies as SVG text, a line for each way to train.

    ``found`` are the steps by what varies and by the way to train, by rising size.
    """
    panels, budget = list[str](), budget_bytes / GIB
    for what, ways in found.items():
        caption, rate = f"{title}: {what}", f"{what} a second"
        panels += [
            _panel(caption, what, "peak, GiB", ways, lambda dot: dot.peak_bytes / GIB, budget),
            _panel("throughput, planned", what, rate, ways, lambda dot: dot.per_second),
        ]
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
        y, text = up(limit), f"budget: {format_bytes(int(limit * GIB))}"
        parts.append(draw_line("leader", LEFT, y, WIDTH - RIGHT, y))
        parts.append(draw_text(LEFT + 4, y - 4, text))
    for (way, each), colour in zip(ways.items(), COLOURS, strict=False):
        places = [(across(dot.size), up(height(dot))) for dot in each]
        parts += [draw_polyline(places, colour), *_dots(places, colour, way)]
    parts += _names(ways)
    return "\n".join(parts)


def _names(ways: Mapping[str, Sequence[Dot]]) -> Iterator[str]:
    """The names of the lines in their colours, down on the right, where rising lines leave room."""
    for place, (way, colour) in enumerate(zip(ways, COLOURS, strict=False)):
        y = HEIGHT - BOTTOM - 12 - 16 * (len(ways) - 1 - place)
        yield draw_text(
            WIDTH - RIGHT - 6, y, way, f'class="label" text-anchor="end" fill="{colour}"'
        )
        yield f'<circle cx="{WIDTH - RIGHT - 136}" cy="{y - 4}" r="4" fill="{colour}"/>'


FORMAT = "fxremat-front/1"


@dataclass(frozen=True)
class Point:
    """One plan: its peak, its time, and the time it adds as a fraction of running all ops once."""

    peak_bytes: int
    time_us: float
    added: float


@dataclass(frozen=True)
class Front:
    """Points from the fastest plan to that of the least peak: peak falls, time rises.

    Peaks are those of the planned graph. ``peak_bound_bytes`` is proven: no plan takes less.
    """

    name: str
    points: tuple[Point, ...]
    base_time_us: float
    store_all_peak_bytes: int
    budget_bytes: int | None = None
    peak_bound_bytes: int | None = None

    def within(self, budget_bytes: int) -> Point | None:
        """The fastest point within a budget; None where nothing fits."""
        return next((p for p in self.points if p.peak_bytes <= budget_bytes), None)

    def of_store_all(self, nbytes: int) -> float:
        """Bytes as a fraction of the store-all peak."""
        return nbytes / self.store_all_peak_bytes if self.store_all_peak_bytes else 0.0

    def to_json(self) -> dict[str, Any]:
        """The front as JSON data; ``added`` and ``of_store_all`` are fractions."""
        points = [
            {**asdict(point), "of_store_all": self.of_store_all(point.peak_bytes)}
            for point in self.points
        ]
        return {"format": FORMAT, **asdict(self), "points": points}

    def picture(self) -> str:
        """The front as SVG text: added time over bytes, budget and proven bound marked."""
        marks = [
            (f"{name}: {format_bytes(nbytes)}", nbytes, y)
            for name, nbytes, y in (
                ("budget", self.budget_bytes, TOP + 14),
                ("proven least", self.peak_bound_bytes, HEIGHT - BOTTOM - 8),
            )
            if nbytes is not None
        ]
        peaks, added = [p.peak_bytes for p in self.points], [p.added for p in self.points]
        unit = format_bytes(max(peaks, default=1)).split()[-1]
        size = UNITS[unit]
        widths = [nbytes / size for nbytes in (*peaks, *(nbytes for _, nbytes, _ in marks))]
        across = make_axis(widths or [1.0], LEFT, WIDTH - RIGHT, zero=True)
        up = make_axis([100 * part for part in added] or [0.0], HEIGHT - BOTTOM, TOP)
        places = [(across(x / size), up(100 * y)) for x, y in zip(peaks, added, strict=True)]
        parts = draw_captions(self.name, f"peak, {unit}", "added time, %") + draw_grid(across, up)
        parts += [draw_polyline(_stairs(places), COLOURS[0]), *_dots(places, COLOURS[0])]
        for text, nbytes, y in marks:
            parts += _draw_mark(text, across(nbytes / size), y)
        return svg(["\n".join(parts)])

    def __str__(self) -> str:
        full = format_bytes(self.store_all_peak_bytes)
        count = f"{len(self.points)} plan{'' if len(self.points) == 1 else 's'}"
        lines = [f"{self.name or 'front'}: {count}, store-all peak {full}"]
        lines.append(f"  {'peak bytes':>20}  {'':>11}  {'of store-all':>12}  {'added time':>10}")
        chosen = None if self.budget_bytes is None else self.within(self.budget_bytes)
        lines += [self._row(point, point is chosen) for point in self.points]
        if self.budget_bytes is not None and chosen is None:
            lines.append(f"nothing fits the budget, {exact_bytes(self.budget_bytes)}")
        if self.peak_bound_bytes is not None:
            lines.append(f"proven: no plan takes less than {exact_bytes(self.peak_bound_bytes)}")
        return "\n".join(lines)

    def _row(self, point: Point, chosen: bool) -> str:
        note = ""
        if chosen and self.budget_bytes is not None:
            note = f"  <- fastest of these within {format_bytes(self.budget_bytes)}"
        return (
            f"  {point.peak_bytes:>20,}  {format_bytes(point.peak_bytes):>11}  "
            f"{self.of_store_all(point.peak_bytes):>12.1%}  {point.added:>+10.2%}{note}"
        )


def front_from_json(data: dict[str, Any]) -> Front:
    """A front read back; raises `KeyError`, `TypeError` or `ValueError` where it is not one."""
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']!r}, where {FORMAT!r} is read")
    return from_data(Front, data)


def _point(peak_bytes: int, time_us: float, base_time_us: float) -> Point:
    return Point(peak_bytes, time_us, time_us / base_time_us - 1 if base_time_us else 0.0)


def undominated(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that no other one beats, fastest first."""
    return tuple(points[k] for k in not_beaten([(p.time_us, p.peak_bytes) for p in points]))


def front_of(
    problem: Problem,
    plans: Sequence[Plan],
    *,
    budget_bytes: int | None = None,
    held_bytes: int = 0,
) -> Front:
    """The front of these plans of a problem; ``held_bytes`` are held outside of the graph."""
    base = problem.base_time_us
    points = [_point(plan.peak_bytes + held_bytes, plan.time_us, base) for plan in plans]
    bounds = [plan.peak_bound_bytes for plan in plans]
    proven = [bound + held_bytes for bound in bounds if bound is not None]
    full = store_all_peak(problem) + held_bytes
    least = max(proven, default=None)
    return Front(problem.name, undominated(points), base, full, budget_bytes, least)


def together(fronts: Sequence[Front]) -> Front:
    """One front for graphs that run one after the other.

    At each peak every graph takes its fastest plan; where one has none, the front ends.
    """
    base = sum(front.base_time_us for front in fronts)
    points = []
    for peak in sorted({p.peak_bytes for front in fronts for p in front.points}, reverse=True):
        chosen = [point for front in fronts if (point := front.within(peak)) is not None]
        if len(chosen) < len(fronts):
            break
        time = sum(point.time_us for point in chosen)
        highest = max(point.peak_bytes for point in chosen)
        points.append(_point(highest, time, base))
    budgets = [front.budget_bytes for front in fronts if front.budget_bytes is not None]
    bounds = [front.peak_bound_bytes for front in fronts if front.peak_bound_bytes is not None]
    return Front(
        ", ".join(front.name for front in fronts),
        undominated(points),
        base,
        max((front.store_all_peak_bytes for front in fronts), default=0),
        min(budgets, default=None),
        max(bounds, default=None),
    )

"""The three streams of a step as an SVG: what computes, what goes to the host, what comes back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fxremat.report.front import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    draw_line,
    draw_text,
    make_axis,
    svg,
)

MARGIN = 24
THICK = 44
COLOURS = {"compute": "#0072b2", "wait": "#d55e00", "to host": "#009e73", "to device": "#cc79a7"}


@dataclass(frozen=True)
class Span:
    """Milliseconds, from the start of the step."""

    start: float
    end: float


@dataclass(frozen=True)
class Streams:
    """One step: its length, when it waited for copies, and the copies of each direction."""

    length: float
    waits: tuple[Span, ...]
    to_host: tuple[Span, ...]
    to_device: tuple[Span, ...]

    @property
    def waited(self) -> float:
        """Milliseconds of the step that were spent waiting for copies."""
        return sum(its.end - its.start for its in self.waits)

    @property
    def hidden(self) -> float:
        """The part of the copies' time for which nothing waited."""
        total = sum(its.end - its.start for its in (*self.to_host, *self.to_device))
        return 1 - self.waited / total if total else 1.0


def _boxes(spans: Iterable[Span], across: Axis, top: float, colour: str) -> list[str]:
    """One box for each span, at least a hair wide."""
    return [
        f'<rect x="{across(its.start):.1f}" y="{top:.1f}" height="{THICK}" fill="{colour}" '
        f'width="{max(0.3, across(its.end) - across(its.start)):.2f}" stroke="white" '
        'stroke-width="0.3"/>'
        for its in spans
    ]


def _grid(across: Axis) -> list[str]:
    parts = []
    for tick in across.ticks():
        x = across(tick)
        parts.append(draw_line("grid", x, TOP, x, HEIGHT - BOTTOM))
        parts.append(draw_text(x, HEIGHT - BOTTOM + 16, f"{tick:g}", 'text-anchor="middle"'))
    parts.append(draw_line("axis", LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM))
    return parts


def panel(title: str, streams: Streams) -> str:
    """One step: a lane for each stream."""
    across = make_axis([0.0, streams.length], LEFT, WIDTH - RIGHT, zero=True)
    lanes: dict[str, tuple[Span, ...]] = {
        "compute": (Span(0.0, streams.length),),
        "to host": streams.to_host,
        "to device": streams.to_device,
    }
    room = (HEIGHT - BOTTOM - TOP) / len(lanes)
    parts = [draw_text(LEFT, MARGIN, title, 'class="title"'), *_grid(across)]
    for index, (name, spans) in enumerate(lanes.items()):
        top = TOP + index * room + (room - THICK) / 2
        parts.append(draw_text(LEFT, top - 6, _caption(name, streams), 'class="label"'))
        parts += _boxes(spans, across, top, COLOURS[name])
        if name == "compute":
            parts += _boxes(streams.waits, across, top, COLOURS["wait"])
    middle = (LEFT + WIDTH) / 2
    parts.append(draw_text(middle, HEIGHT - 12, "milliseconds", 'text-anchor="middle"'))
    return "\n".join(parts)


def _caption(name: str, streams: Streams) -> str:
    if name == "compute":
        return f"compute; in orange, waiting for copies (copies hidden: {streams.hidden:.0%})"
    return f"copies {name}"


def draw(panels: Mapping[str, Streams], path: Path) -> None:
    """Write all panels, one below the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg([panel(title, streams) for title, streams in panels.items()]))

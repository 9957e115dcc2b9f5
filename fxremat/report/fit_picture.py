"""The picture of what fits: the peak and the sizes a second over each size, a line for each way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fxremat.report.drawing import (
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
from fxremat.sizes import GIB, format_bytes

COLOURS = ("#0072b2", "#009e73", "#d55e00")


@dataclass(frozen=True)
class Dot:
    """A step of one size."""

    size: int
    peak_bytes: int
    per_second: float


def draw_fit(
    title: str, found: Mapping[str, Mapping[str, Sequence[Dot]]], budget_bytes: int
) -> str:
    """SVG text; ``found`` are the steps by what varies and by the way to train, by rising size."""
    panels: list[str] = []
    for what, ways in found.items():
        panels.append(
            _panel(f"{title}: {what}", what, "peak, GiB", ways, _gibibytes, budget_bytes / GIB)
        )
        panels.append(_panel("throughput, planned", what, f"{what} a second", ways, _rate))
    return svg(panels, columns=2)


def _gibibytes(dot: Dot) -> float:
    return dot.peak_bytes / GIB


def _rate(dot: Dot) -> float:
    return dot.per_second


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
        y = up(limit)
        parts.append(draw_line("leader", LEFT, y, WIDTH - RIGHT, y))
        parts.append(draw_text(LEFT + 4, y - 4, f"budget: {format_bytes(int(limit * GIB))}"))
    for (way, each), colour in zip(ways.items(), COLOURS, strict=False):
        parts += _line(way, [(across(d.size), up(height(d))) for d in each], colour)
    parts += _names(ways)
    return "\n".join(part for part in parts if part)


def _line(way: str, places: Sequence[tuple[float, float]], colour: str) -> Iterator[str]:
    """A line with its dots; each tells its way where the pointer rests."""
    yield draw_polyline(places, colour)
    for x, y in places:
        circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}">'
        yield f"{circle}<title>{way}</title></circle>"


def _names(ways: Mapping[str, Sequence[Dot]]) -> Iterator[str]:
    """Which colour is whose, down on the right, where lines that rise leave room."""
    for place, (way, colour) in enumerate(zip(ways, COLOURS, strict=False)):
        y = HEIGHT - BOTTOM - 12 - 16 * (len(ways) - 1 - place)
        yield draw_text(
            WIDTH - RIGHT - 6, y, way, f'class="label" text-anchor="end" fill="{colour}"'
        )
        yield f'<circle cx="{WIDTH - RIGHT - 136}" cy="{y - 4}" r="4" fill="{colour}"/>'

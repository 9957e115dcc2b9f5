"""Curves of losses as an SVG: one panel per model, one line per variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from fxremat.report.front import (
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

COLOURS = ("#000000", "#888888", "#d55e00", "#0072b2", "#cc79a7", "#009e73", "#e69f00", "#56b4e9",
           "#7b3294", "#1b7837", "#a6611a", "#e7298a", "#66a61e", "#2166ac", "#b2182b")  # fmt: skip
SMOOTH = 10
LEGEND = 170
"""Pixels of the width, at the right."""


def smoothed(losses: Sequence[float], width: int = SMOOTH) -> list[float]:
    """Means of the last few losses, which are noisy from batch to batch."""
    return [fmean(losses[max(0, i + 1 - width) : i + 1]) for i in range(len(losses))]


def panel(title: str, lines: Mapping[str, Sequence[float]]) -> str:
    """One model: axes, a line for each variant, and which is which."""
    known = {name: smoothed(losses) for name, losses in lines.items()}
    right = WIDTH - RIGHT - LEGEND
    across = make_axis([0.0, float(max(map(len, known.values())))], LEFT, right, zero=True)
    most = max(losses[0] for losses in known.values())  # what diverges may leave the panel
    up = make_axis([0.0, most], HEIGHT - BOTTOM, TOP, zero=True)
    parts = [*draw_captions(title, "step", f"loss, mean of {SMOOTH}"), *draw_grid(across, up)]
    for index, (name, losses) in enumerate(known.items()):
        colour = COLOURS[index % len(COLOURS)]
        inside = [(across(i), up(min(y, 1.05 * most))) for i, y in enumerate(losses) if y == y]
        parts.append(draw_polyline(inside, colour))
        parts += _key(name, colour, TOP + 10 + 18 * index)
    return "\n".join(parts)


def _key(name: str, colour: str, y: float) -> list[str]:
    """A line of the legend, over whatever the grid has there."""
    x = WIDTH - RIGHT - LEGEND + 10
    return [
        draw_polyline([(x, y), (x + 18, y)], colour),
        draw_text(x + 24, y + 4, name, 'class="label"'),
    ]


def draw(panels: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Write all panels, one below the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg([panel(title, lines) for title, lines in panels.items()]))

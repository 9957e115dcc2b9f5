"""Tokens a second over reserved memory on one GPU: ways to save memory side by side, as an SVG.

    python -m benchmarks.tokens_picture benchmarks/results/tokens_h200.json benchmarks/results/tokens_h200.svg

The JSON has a head (GPU, versions, date, how it was measured), and for each model the tokens of a
step and a row for each run. Points of fxremat that reserved more than their budget are left out.
"""  # noqa: E501

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxremat.report.front import svg

from .commands import parser_for
from .picture import Point, panel

MIB_IN_GIB = 1024
KINDS = {"plain": "compile", "ckpt": "checkpoint", "sac": "checkpoint", "knob": "knob"}
LABELS = {
    "plain": "torch.compile",
    "ckpt": "checkpoint each block",
    "sac": "checkpoint, matmuls saved",
    "knob": "activation_memory_budget ",
}
AXES = ("reserved at most, GiB", "tokens a second, thousands")


def is_within(row: Mapping[str, Any]) -> bool:
    """Whether the run kept its budget, if it had one."""
    return row["budget_mib"] is None or row["reserved_mib"] <= row["budget_mib"]


def point(row: Mapping[str, Any], tokens: int) -> Point:
    """A run: the most that it reserved, and what its fastest step makes of a second.

    The fastest, because other programs used the machine while some of the steps were timed.
    """
    way, _, value = row["way"].partition(":")
    if way in KINDS:
        name, kind = LABELS[way] + value, KINDS[way]
    else:
        name, kind = f"fxremat within {row['budget_mib'] / MIB_IN_GIB:.1f} GiB", "fxremat"
    return Point(name, kind, row["reserved_mib"] / MIB_IN_GIB, tokens / min(row["ms"]))


def points_of(model: Mapping[str, Any]) -> list[Point]:
    """All runs of a model that kept their budget."""
    return [point(row, model["tokens"]) for row in model["rows"] if is_within(row)]


def draw(found: Mapping[str, Any]) -> str:
    """A panel for each model, with GPU, versions and date in the title."""
    head = found["head"]
    origin = f"{head['gpu'].removeprefix('NVIDIA ')}, torch {head['torch']}, {head['date']}"
    panels = [
        panel(f"{model['name']} ({origin})", points_of(model), AXES) for model in found["models"]
    ]
    return svg(panels, columns=2)


def main() -> None:
    """Draw a JSON file."""
    parser = parser_for("benchmarks.tokens_picture", __doc__)
    parser.add_argument("figures", type=Path, help="JSON, as benchmarks/results/tokens_h200.json")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    options = parser.parse_args()
    options.picture.write_text(draw(json.loads(options.figures.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()

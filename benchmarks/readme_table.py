"""The table of small steps, made from what ``python -m benchmarks --out`` has written.

python -m benchmarks.readme_table results.json                    prints it
python -m benchmarks.readme_table results.json --into docs/benchmarks.md

The second puts it there, between the marks.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .commands import parser_for
from .rows import MIB
from .ways import REFERENCE

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
COMMAND = (
    "python -m benchmarks --models gpt,llama,resnet,unet "
    "--variants compile,fxremat80%,fxremat50%,fxremat33%"
)
NOT_TAKEN = f"No figures are here yet. `{COMMAND} --out FILE` takes them.\n"
NAMES = {"gpt": "GPT", "llama": "Llama", "resnet": "ResNet", "unet": "U-Net", "vit": "ViT"}
LEGEND = (
    "Budgets are parts of `torch.compile`'s peak. Each cell is the measured peak in MiB / the "
    "planned time of a step / its measured time. The planned time is relative to running every op "
    "once, and the measured one to `torch.compile`."
)


def cell(row: Mapping[str, Any] | None) -> str:
    """Peak, planned time and measured time of one variant on one model."""
    if row is None:
        return "not run"
    if row["minimum_bytes"] is not None:
        return f"refused, least {row['minimum_bytes'] / MIB:.1f}"
    if row["peak_bytes"] is None:
        return "failed"
    peak = f"{row['peak_bytes'] / MIB:.1f}"
    if row["peak_bytes"] > (row["budget_bytes"] or row["peak_bytes"]):
        peak = f"**{peak}, over**"
    planned = [f"{1 + row['report']['time_overhead']:.2f}"] if row["report"] else []
    measured = [f"{row['time_ratio']:.2f}"] if row["report"] and row["time_ratio"] else []
    return " / ".join([peak, *planned, *measured])


def command(results: Mapping[str, Any]) -> str:
    """What took the figures; `compile` runs in any case."""
    variants = dict.fromkeys(row["variant"] for one in results["results"] for row in one["rows"])
    models = ",".join(each["model"] for each in results["results"])
    return f"python -m benchmarks --models {models} --variants {','.join(variants)}"


def origin(results: Mapping[str, Any], source: str) -> str:
    """Where and when the figures were taken."""
    machine = results["machine"]
    commit = f" at commit {machine['commit']}" if "commit" in machine else ""
    return (
        f"Taken on {machine['date'][:10]}{commit} with `{command(results)}` ([figures]({source})): "
        f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}, "
        f"fxremat {machine['fxremat']}."
    )


def table(results: Mapping[str, Any], source: str) -> str:
    """Models down, variants across; then what the cells are, and where they come from."""
    by_model = {
        each["model"]: {row["variant"]: row for row in each["rows"]} for each in results["results"]
    }
    kinds = {name: row["kind"] for rows in by_model.values() for name, row in rows.items()}
    shown = [name for name, kind in kinds.items() if kind in ("compile", "fxremat")]
    heads = [
        "`torch.compile`" if name == REFERENCE.name else name.removeprefix("fxremat")
        for name in shown
    ]
    lines = [
        ["", *heads],
        ["---"] * (1 + len(shown)),
        *(
            [NAMES.get(model, model), *(cell(rows.get(name)) for name in shown)]
            for model, rows in by_model.items()
        ),
    ]
    markdown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{markdown}\n\n{LEGEND}\n{origin(results, source)}\n"


def put_into(text: str, figures: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """The text with ``figures`` between its marks. Raises `ValueError` where it has no marks."""
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (begin and end):
        raise ValueError(f"no {marks[0]} ... {marks[1]}")
    return f"{before}{begin}\n{figures}{end}{after}"


def main() -> None:
    """Print the table, or put it into a file."""
    parser = parser_for("benchmarks.readme_table", __doc__)
    parser.add_argument("results", type=Path, help="JSON of python -m benchmarks --out")
    parser.add_argument("--into", type=Path, help="the file whose marks the table goes between")
    options = parser.parse_args()
    figures = table(json.loads(options.results.read_text()), str(options.results))
    if options.into is None:
        print(figures, end="")
    else:
        options.into.write_text(put_into(options.into.read_text(), figures))


if __name__ == "__main__":
    main()

"""The problems that `benchmarks.planner` plans: files of a directory, and models traced anew.

A model is traced as `python -m fxremat trace` does it: on tensors without memory, so that deep
ones take no more than small ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from fxremat.cli.arguments import read_problem
from fxremat.core.problem import Problem

PROJECT = Path(__file__).resolve().parents[1]
DIRECTORY = PROJECT.parent / "shared" / "data" / "problems"
TRACED = ("gpt", "llama", "vit", "resnet", "unet", "encdec", "mixer", "lstm", "dropout")
NONE = "none"

Named = tuple[str, Problem]
"""What the table calls a problem, and the problem."""


def stored_paths(directory: Path) -> list[Path]:
    """The problem files of a directory, by name; where there are none, says so."""
    paths = sorted(directory.glob("*.json"))
    if not paths:
        print(f"no problems in {directory}: skipped", flush=True)
    return paths


def traced_titles(names: Sequence[str], size: str) -> dict[str, str]:
    """Of each model to trace, what the table calls it, and its name."""
    if list(names) == [NONE]:
        return {}
    from .models import MODELS

    unknown = sorted(set(names) - set(MODELS))
    if unknown:
        raise SystemExit(f"unknown models {unknown}; there are {', '.join(MODELS)}, or {NONE}")
    return {name if "exact" in MODELS[name] else f"{name}-{size}": name for name in names}


def collect(
    directory: Path, traced: Sequence[str], size: str, only: Collection[str]
) -> Iterator[Named]:
    """The problems asked for, each made when its turn comes; ``only`` names some of them."""
    stored = {path.stem: path for path in stored_paths(directory)}
    titles = traced_titles(traced, size)
    unknown = sorted(set(only) - {*stored, *titles})
    if unknown:
        raise SystemExit(f"unknown problems {unknown}; there are {', '.join([*stored, *titles])}")
    for name, path in stored.items():
        if not only or name in only:
            yield name, read_problem(str(path))
    for title, name in titles.items():
        if not only or title in only:
            yield title, trace(name, size)


def trace(name: str, size: str) -> Problem:
    """The problem of one training step of a model of `benchmarks.models`."""
    from fxremat.compat.tensors import fake_tensors
    from fxremat.compile.tracing import trace_step

    from .models import build

    with fake_tensors():
        model, inputs = build(name, size)
        return trace_step(name, model, inputs).found.problem

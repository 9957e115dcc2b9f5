"""Settings whose bytes and rates others have published, and what fxremat makes of them.

    python -m benchmarks.published [--settings qwen3-8b-16k] [--card H100] [--out FILE]
    python -m benchmarks.published --device cuda

The first asks, on no GPU, how many tokens of one sequence train in the published bytes, and at what
rate (`fxremat.fit`). With ``--device cuda`` the setting itself is trained on the GPU that is here,
with every block checkpointed, and by fxremat within the published bytes, each in a process of its
own: peaks allocated and reserved, how often the allocator had to give back what it had cached,
tokens a second, and seconds to compile. Models have their published sizes and random weights in
bf16. Where the optimizer is not said, its states are those of the one named here.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

import fxremat
from fxremat.memory.optimizers import held_by
from fxremat.whatif.largest_size import WAYS

from .commands import write_json
from .machine import describe_machine
from .nets.language import Llama
from .rows import format_table
from .training import Infeasible, Peak, prepare
from .ways import VARIANTS

Device = Literal["cpu", "cuda"]
GB = 10**9


@dataclass(frozen=True)
class Figure:
    """What was published of one way to train a setting."""

    way: str
    gigabytes: float
    per_second: float | None = None


@dataclass(frozen=True)
class Setting:
    """A model and its tokens, the optimizer whose states are held, and what was published."""

    source: str
    network: Callable[[int], Llama]
    batch: int
    tokens: int
    optimizer: str
    figures: tuple[Figure, ...]

    def build(self, device: Device) -> tuple[Llama, tuple[Tensor, Tensor]]:
        """The model in bf16, in training mode, and its (inputs, targets)."""
        torch.manual_seed(0)
        with torch.device(device):
            model = self.network(self.tokens // self.batch)
        model = model.to(torch.bfloat16).train()
        inputs, targets = model.sample(self.batch, torch.Generator().manual_seed(0))
        return model, (inputs.to(device), targets.to(device))


def _qwen3(width: int, hidden: int, *, tied: bool) -> Callable[[int], Llama]:
    made: Any = partial(
        Llama, layers=36, width=width, heads=32, kv_heads=8, hidden=hidden, vocabulary=151_936,
        head_width=128, normed=True, tied=tied, any_length=True,
    )  # fmt: skip
    return lambda length: made(length=length)


def _layers_24(length: int) -> Llama:
    return Llama(
        layers=24, width=2048, heads=16, kv_heads=16, hidden=8192, length=length, vocabulary=32_000
    )


QWEN3_8B, QWEN3_4B = _qwen3(4096, 12_288, tied=False), _qwen3(2560, 9728, tied=True)
CHECKPOINTS, OFFLOADED, NONE = "checkpoints", "checkpoints, their inputs offloaded", "none"
BETWEEN = "nothing between"
AXOLOTL = "axolotl, pull request 3733"
SETTINGS = {
    "24-layers": Setting(
        "accelerate, pull request 4175", _layers_24, 8, 16_384, "none",
        (
            Figure(NONE, 79.4, 16_384 / 1.08),
            Figure(BETWEEN, 50.0),
            Figure(CHECKPOINTS, 24.7, 16_384 / 1.38),
            Figure(OFFLOADED, 24.7, 16_384 / 1.86),
        ),
    ),
    "qwen3-8b-16k": Setting(
        AXOLOTL, QWEN3_8B, 1, 16_384, "adamw-8bit",
        (Figure(CHECKPOINTS, 63.3, 2325), Figure(OFFLOADED, 58.9, 2243)),
    ),
    "qwen3-8b-32k": Setting(
        AXOLOTL, QWEN3_8B, 1, 32_768, "adamw-8bit",
        (Figure(CHECKPOINTS, 73.1, 1954), Figure(OFFLOADED, 64.3)),
    ),
    "qwen3-4b-32k": Setting(
        "TRL's guide, plain loss", QWEN3_4B, 1, 32_768, "adamw", (Figure(CHECKPOINTS, 80.0),)
    ),
    "qwen3-4b-128k": Setting(
        "TRL's guide, chunked loss", QWEN3_4B, 1, 131_072, "adamw", (Figure(CHECKPOINTS, 80.0),)
    ),
}  # fmt: skip
"""Of the 24 layers only their number, their times and the bytes of their inputs (1.61 GB) are
published; the optimizer is said nowhere. With two numbers in 16 bits for each weight, states alone
would leave too little for Qwen3-8B."""


@dataclass(frozen=True)
class Planned:
    """How many tokens train in the bytes of one figure, by each way, and fxremat's rate there."""

    setting: str
    published: Figure
    tokens: int
    fits: dict[str, int]
    per_second: float
    seconds: float

    def cells(self) -> list[str]:
        """A line of the table."""
        sizes = [f"{self.fits[way]:,}" if way in self.fits else "-" for way in WAYS]
        rate = f"{self.per_second:,.0f}" if self.per_second else "-"
        return [*_said(self.setting, self.published), f"{self.tokens:,}", *sizes, rate,
                f"{self.seconds:.0f}"]  # fmt: skip


PLANNED = ["setting", "published", "GB", "tokens/s", "tokens there", *WAYS, "tokens/s", "seconds"]


def _said(setting: str, one: Figure) -> list[str]:
    rate = "" if one.per_second is None else f"{one.per_second:,.0f}"
    return [setting, one.way, f"{one.gigabytes:.1f}", rate]


def planned(name: str, setting: Setting, figure: Figure, card: str) -> Planned:
    """One line: the step is traced without memory, and the card need not be here."""
    begin = time.perf_counter()
    with torch.device("meta"):
        model = setting.network(setting.tokens // setting.batch).to(torch.bfloat16).train()
        shape = setting.batch, setting.tokens // setting.batch
        text = torch.zeros(shape, dtype=torch.long)
    what = "batch" if setting.batch > 1 else "sequence"
    places = [(0, 0), (1, 0)] if setting.batch > 1 else [(0, 1), (1, 1)]
    found = fxremat.fit(
        model,
        (text, text.clone()),
        vary={what: places},
        memory_budget=f"{figure.gigabytes}GB",
        device=card,
        optimizer=setting.optimizer,
    )
    each = setting.tokens // setting.batch if what == "batch" else 1
    fits: dict[str, int] = {row.way: row.size * each for row in found.rows}
    rate = found.largest(what).per_second * each
    return Planned(name, figure, setting.tokens, fits, rate, time.perf_counter() - begin)


@dataclass(frozen=True)
class Measured:
    """One way to train a setting on the GPU that is here; ``error`` where it cannot."""

    setting: str
    way: str
    published: Figure
    budget_bytes: int | None
    peak: Peak | None = None
    per_second: float = 0.0
    compile_seconds: float = 0.0
    error: str | None = None

    @property
    def is_broken(self) -> bool:
        """Whether fxremat took more than it was given, or failed; a refusal is neither."""
        if self.budget_bytes is None:
            return False
        if self.peak is None:
            return not (self.error or "").startswith("refused")
        counted = self.peak.reserved_bytes or self.peak.peak_bytes
        return max(counted, self.peak.first_bytes or 0) > self.budget_bytes

    def cells(self) -> list[str]:
        """A line of the table."""
        said = [*_said(self.setting, self.published), self.way]
        if self.peak is None:
            return [*said, "", "", "", "", "", self.error or ""]
        reserved = self.peak.reserved_bytes
        return [
            *said,
            f"{self.peak.peak_bytes / GB:.2f}",
            "" if reserved is None else f"{reserved / GB:.2f}",
            "" if self.peak.retries is None else str(self.peak.retries),
            f"{self.per_second:,.0f}",
            f"{self.compile_seconds:.0f}",
            "over its budget" if self.is_broken else "",
        ]


MEASURED = ["setting", "published", "GB", "tokens/s", "way", "allocated", "reserved", "retries",
            "tokens/s", "compile s", ""]  # fmt: skip
STEPS = 5


def measured(
    name: str, setting: Setting, figure: Figure, way: str, device: Device, steps: int = STEPS
) -> Measured:
    """Train some steps: with checkpoints, or by fxremat within the published bytes.

    The optimizer's states are stood in for by one tensor of their size; it does not step.
    """
    model, arguments = setting.build(device)
    states = held_by(setting.optimizer, list(model.parameters())).states
    held = torch.empty(states, dtype=torch.uint8, device=device)
    budget = int(figure.gigabytes * GB) if way == "fxremat" else None
    try:
        made = VARIANTS["checkpoint" if budget is None else "fxremat@min"]
        reserve = states if device == "cpu" else None  # on CUDA it is seen
        training = prepare(made, model, arguments, budget, reserve)
        peak = training.measure()
        seconds = median(training.time_steps(steps))
    except Infeasible as refusal:
        least = (refusal.minimum_bytes or 0) / GB
        return Measured(name, way, figure, budget, error=f"refused, least {least:.4f} GB")
    except torch.OutOfMemoryError:
        return Measured(name, way, figure, budget, error="out of memory")
    finally:
        del held
    rate = setting.tokens / seconds
    return Measured(name, way, figure, budget, peak, rate, training.compile_seconds)


def jobs(names: Sequence[str]) -> list[tuple[str, Figure, str]]:
    """Settings, what was published of them, and ways to train them: each once.

    fxremat within the bytes of each figure, and checkpoints beside the first.
    """
    found = []
    for name in names:
        figures = [one for one in SETTINGS[name].figures if one.way != NONE]
        by_hand = next(one for one in figures if one.way == CHECKPOINTS)
        found.append((name, by_hand, CHECKPOINTS))
        found += [(name, one, "fxremat") for one in _each_budget(figures)]
    return found


def _each_budget(figures: Sequence[Figure]) -> list[Figure]:
    """Without those that take as many bytes as one before."""
    return [one for k, one in enumerate(figures)
            if one.gigabytes not in {earlier.gigabytes for earlier in figures[:k]}]  # fmt: skip


def _measure_all(names: Sequence[str], device: Device) -> list[Measured]:
    """One process after the other: each has the whole GPU."""
    context, rows = multiprocessing.get_context("spawn"), list[Measured]()
    for name, figure, way in jobs(names):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                rows.append(
                    pool.submit(measured, name, SETTINGS[name], figure, way, device).result()
                )
            except Exception as error:
                budget = int(figure.gigabytes * GB) if way == "fxremat" else None
                said = f"{type(error).__name__}: {error}".splitlines()[0]
                rows.append(Measured(name, way, figure, budget, error=said))
        print(format_table([MEASURED, *(row.cells() for row in rows)]), flush=True)
    return rows


def _plan_all(names: Sequence[str], card: str) -> list[Planned]:
    rows: list[Planned] = []
    for name in names:
        for figure in _each_budget(SETTINGS[name].figures):
            rows.append(planned(name, SETTINGS[name], figure, card))
            print(format_table([PLANNED, *(row.cells() for row in rows)]), flush=True)
    return rows


def main() -> int:
    """The command line; 1 where fxremat broke a budget or failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--settings", default=",".join(SETTINGS), help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--card", default="H100", help="planned for, where nothing is measured")
    parser.add_argument("--device", choices=("cuda",), help="measure on the GPU that is here")
    parser.add_argument("--out", type=Path, help="JSON file")
    given = parser.parse_args()
    names = given.settings.split(",")
    if unknown := sorted(set(names) - set(SETTINGS)):
        parser.error(f"unknown settings {unknown}; there are {', '.join(SETTINGS)}")
    rows: Sequence[Planned | Measured]
    broken = False
    if given.device is None:
        rows = _plan_all(names, given.card)
    else:
        rows = taken = _measure_all(names, given.device)
        broken = any(row.is_broken for row in taken)
    if given.out is not None:
        machine = describe_machine(given.device or "cpu", torch.get_num_threads())
        data = {"machine": machine, "rows": [asdict(row) for row in rows]}
        write_json(given.out, data)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())

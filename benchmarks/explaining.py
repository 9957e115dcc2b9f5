"""What `fxremat.explain` takes, and where its seconds go.

    python -m benchmarks.explaining [--models gpt,gpt256,gpt32] [--percents 50,80] [--times 3]

Budgets are parts of the peak if nothing runs again. Each row is a process of its own in which torch
is imported, and every explanation has empty caches on disk. ``first`` is the first explanation of
the process, which imports Inductor too. ``again`` is the median of those after it; so are stages,
and ``processor``: seconds of all cores, which say more than others where the machine is busy.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import median
from tempfile import TemporaryDirectory

import torch

import fxremat

from .commands import parser_for
from .models import Config, find_config
from .rows import format_table

GPT, LLAMA = find_config("gpt"), find_config("llama")


def _with(config: Config, **arguments: int) -> Config:
    return replace(config, arguments={**config.arguments, **arguments})


CONFIGS = {
    "gpt": GPT,
    "gpt256": _with(GPT, width=256, length=256),
    "gpt32": _with(GPT, layers=32),
    "llama32": _with(LLAMA, layers=32),
}
STAGES = ("trace", "prepare", "estimate", "plan", "apply", "dry run", "verify")
HEAD = ["model", "budget", "first", "again", "processor", *STAGES, "other", "peak, MiB"]


@dataclass(frozen=True)
class Explained:
    """Seconds of one explanation, of its stages, and what it said."""

    seconds: float
    processor_seconds: float
    stages: dict[str, float]
    store_all_bytes: int
    peak_bytes: int


def explained(name: str, budget_bytes: int | None, times: int) -> list[Explained]:
    """So many explanations of a model, one after the other."""
    config, found = CONFIGS[name], list[Explained]()
    torch.manual_seed(0)
    model = config.network(**config.arguments)
    batch = model.sample(config.batch, torch.Generator().manual_seed(0))
    for _ in range(times):
        with TemporaryDirectory() as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            begin, processor = time.perf_counter(), time.process_time()
            told = fxremat.explain(model, *batch, memory_budget=budget_bytes)
            seconds = time.perf_counter() - begin, time.process_time() - processor
        [graph] = told.graphs
        peaks = told.store_all_peak_bytes, told.predicted_peak_bytes
        found.append(Explained(*seconds, dict(graph.seconds), *peaks))
    return found


def _apart(name: str, budget_bytes: int | None, times: int) -> list[Explained]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(explained, name, budget_bytes, times).result()


def row_of(name: str, percent: int, store_all_bytes: int, times: int) -> list[str]:
    """One line of the table."""
    first, *again = _apart(name, store_all_bytes * percent // 100, times + 1)
    stages = [median(one.stages.get(stage, 0.0) for one in again) for stage in STAGES]
    other = median(one.seconds - sum(one.stages.values()) for one in again)
    whole = median(one.seconds for one in again)
    processor = median(one.processor_seconds for one in again)
    seconds = first.seconds, whole, processor, *stages, other
    peak = f"{again[-1].peak_bytes / 2**20:.1f}"
    return [name, f"{percent} %", *(f"{each:.1f}" for each in seconds), peak]


def run(names: Sequence[str], percents: Sequence[int], times: int) -> None:
    """Print the table as it grows."""
    rows = [HEAD]
    for name in names:
        [whole] = _apart(name, None, 1)
        for percent in percents:
            rows.append(row_of(name, percent, whole.store_all_bytes, times))
            print(format_table(rows), flush=True)


def main() -> None:
    """Run and print."""
    parser = parser_for("benchmarks.explaining", __doc__)
    parser.add_argument("--models", default="gpt,gpt256,gpt32,llama32", help=", ".join(CONFIGS))
    parser.add_argument("--percents", default="50,80")
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    percents = [int(one) for one in options.percents.split(",")]
    run(options.models.split(","), percents, options.times)


if __name__ == "__main__":
    main()

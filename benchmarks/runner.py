"""The driver: one worker process per variant, rounds of timed steps interleaved among them.

Every round asks each worker in turn for a few steps, forwards and backwards in alternation, and
every ratio is taken within one round: what disturbs the machine disturbs all variants alike.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from .rows import Row, add_ratios
from .training import gradient_error
from .ways import REFERENCE, Variant, budget_bytes

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Case:
    """The model that all workers build."""

    model: str
    size: str
    device: str
    dtype: str
    seed: int
    threads: int


KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""For glibc: the largest threshold there is, and never to trim."""


@dataclass(frozen=True)
class Timing:
    """How often to time, and how many workers may live at once.

    So many compile ``together`` that are not fxremat's, whose seconds to compile are of no interest
    then: what measures nothing while it compiles is the same beside others.
    """

    rounds: int
    steps: int
    live: int
    warm_caches: bool = False
    together: int = 1


class Process:
    """A module that obeys commands, and the pipe to it; once dead it answers each with an error."""

    def __init__(
        self, module: str, settings: dict[str, Any], cache: Path | None, log: Path
    ) -> None:
        self.log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(settings)],
                cwd=ROOT,
                env=environment(cache),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        last = self.log.read_text().strip().splitlines()[-1:]
        return {"error": f"the worker died: {' '.join(last)}"}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.process.kill()
        self.process.communicate()


class WorkerProcess(Process):
    """The worker of one variant."""

    def __init__(self, variant: Variant, case: Case, cache: Path | None, log: Path) -> None:
        self.variant = variant
        settings = {"variant": variant.name, **asdict(case)}
        super().__init__("benchmarks.worker", settings, cache, log)


def environment(cache: Path | None) -> dict[str, str]:
    """With a cache folder of its own, a worker compiles everything itself.

    All keep the memory that they have freed. Otherwise glibc gives it back or not, by what happened
    in a process before, and a step of tens of milliseconds takes up to a quarter more to get it
    again.
    """
    environment = KEEP_MEMORY | os.environ
    if cache is not None:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    return environment


class Runner:
    """Compares variants on one model."""

    def __init__(self, case: Case, timing: Timing, folder: Path) -> None:
        self.case, self.timing, self.folder = case, timing, folder
        self.rows: dict[str, Row] = {}

    def compare(self, variants: list[Variant]) -> list[Row]:
        """The rows of all `variants`; compile's is always measured, for the ratios."""
        with self.start(REFERENCE) as reference:
            self.prepare(reference)
            others = [variant for variant in variants if variant != REFERENCE]
            for group in _chunks(others, max(1, self.timing.live - 1)):
                self._run_group(reference, group)
        return list(self.rows.values())

    def start(self, variant: Variant) -> WorkerProcess:
        cache = None if self.timing.warm_caches else self.folder / f"{variant.name}.cache"
        return WorkerProcess(variant, self.case, cache, self.folder / f"{variant.name}.log")

    def _run_group(self, reference: WorkerProcess, group: list[Variant]) -> None:
        """Prepare the workers of a group, fxremat's one after another; interleave their steps."""
        self.rows |= {variant.name: Row(variant.name, variant.kind) for variant in group}
        with ExitStack() as stack, ThreadPoolExecutor(self.timing.together) as pool:

            def started(variant: Variant) -> WorkerProcess | None:
                worker = stack.enter_context(self.start(variant))
                return worker if self.prepare(worker) else None

            others = [variant for variant in group if variant.kind != "fxremat"]
            ready = [*pool.map(started, others)]
            ready += [started(variant) for variant in group if variant not in others]
            self._time(reference, [worker for worker in ready if worker is not None])

    def _time(self, reference: WorkerProcess, workers: list[WorkerProcess]) -> None:
        base = self.rows[reference.variant.name]
        base.step_seconds = []
        everyone = [reference, *workers]
        for turn in range(self.timing.rounds):
            for worker in everyone if turn % 2 == 0 else reversed(everyone):
                answer = worker.ask("steps", count=self.timing.steps)
                row = self.rows[worker.variant.name]
                row.step_seconds.append(answer.get("seconds") or [float("nan")])
                row.error = answer.get("error", row.error)
        add_ratios([self.rows[worker.variant.name] for worker in everyone], base)

    def prepare(self, worker: WorkerProcess) -> bool:
        """Compile and measure one variant; whether it can be timed."""
        variant = worker.variant
        row = self.rows[variant.name] = Row(variant.name, variant.kind)
        self._say(f"{variant.name} ...")
        try:
            row.budget_bytes = budget_bytes(variant, self._peaks())
        except ValueError as error:
            row.error = str(error)
            return False
        _fill(row, worker.ask("prepare", budget=row.budget_bytes))
        if row.peak_bytes is not None:
            self._compare_gradients(worker, row)
        return row.peak_bytes is not None

    def _peaks(self) -> dict[str, int]:
        counted = {name: row.counted_bytes for name, row in self.rows.items()}
        return {name: peak for name, peak in counted.items() if peak is not None}

    def _compare_gradients(self, worker: WorkerProcess, row: Row) -> None:
        path = self.folder / f"{row.variant}.gradients"
        answer = worker.ask("gradients", path=str(path))
        row.loss, row.error = answer.get("loss"), answer.get("error")
        if row.error is None:
            row.gradient_error = gradient_error(*map(load_gradients, (path, self._reference)))
        if path != self._reference:
            path.unlink(missing_ok=True)

    @property
    def _reference(self) -> Path:
        return self.folder / f"{REFERENCE.name}.gradients"

    def _say(self, text: str) -> None:
        print(f"{self.case.model}/{self.case.size}: {text}", file=sys.stderr, flush=True)


def load_gradients(path: Path) -> dict[str, torch.Tensor]:
    """What a worker saved."""
    gradients: dict[str, torch.Tensor] = torch.load(path)
    return gradients


def _fill(row: Row, answer: dict[str, Any]) -> None:
    """Put a worker's answer to `prepare` into its row."""
    row.error = answer.get("error") or answer.get("infeasible")
    row.minimum_bytes = answer.get("minimum_bytes")
    row.start_bytes, row.peak_bytes = answer.get("start_bytes"), answer.get("peak_bytes")
    row.reserved_bytes, row.retries = answer.get("reserved_bytes"), answer.get("retries")
    row.first_bytes = answer.get("first_bytes")
    row.compile_seconds, row.report = answer.get("compile_seconds"), answer.get("report")
    if row.budget_bytes is None and row.report:
        row.budget_bytes = row.report["budget_bytes"]


def _chunks(variants: list[Variant], size: int) -> Iterator[list[Variant]]:
    for start in range(0, len(variants), size):
        yield variants[start : start + size]


def run_case(case: Case, variants: list[Variant], timing: Timing) -> list[Row]:
    """Compare `variants` on one model, with temporary files of their own."""
    with tempfile.TemporaryDirectory(prefix="fxremat-benchmark-") as folder:
        return Runner(case, timing, Path(folder)).compare(variants)

"""One variant in a process of its own, obeying commands: JSON lines in, JSON lines out.

Between commands the process blocks on its standard input, so that it takes no processor time.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

import torch

from .models import build
from .training import Infeasible, Training, collect_gradients, prepare
from .ways import VARIANTS

OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
LEARNING_RATE = {"sgd": 1e-2, "adamw": 1e-3}


class Worker:
    """The state of one variant; every public method is a command."""

    def __init__(
        self, variant: str, model: str, size: str, device: str, dtype: str, seed: int
    ) -> None:
        self.variant, self.seed = VARIANTS[variant], seed
        self.model, self.arguments = build(model, size, device, getattr(torch, dtype), seed)
        self._training: Training | None = None

    @property
    def training(self) -> Training:
        """The prepared step."""
        assert self._training is not None, "ask for `prepare` first"
        return self._training

    def prepare(self, budget: int | None = None) -> dict[str, Any]:
        """Compile, warm up, and measure the peak; of a refusal, what it took."""
        begin = time.perf_counter()
        try:
            self._training = prepare(self.variant, self.model, self.arguments, budget)
        except Infeasible as refusal:
            return {
                "infeasible": refusal.message,
                "minimum_bytes": refusal.minimum_bytes,
                "compile_seconds": time.perf_counter() - begin,
            }
        peak = asdict(self.training.measure())
        compile_seconds = self.training.compile_seconds
        return {**peak, "compile_seconds": compile_seconds, "report": self.training.report}

    def steps(self, count: int) -> dict[str, Any]:
        """Time `count` steps, then give the device's cached memory back to the others."""
        seconds = self.training.time_steps(count)
        self.training.model.zero_grad(set_to_none=True)
        if self.training.device.type == "cuda":
            torch.cuda.empty_cache()
        return {"seconds": seconds}

    def gradients(self, path: str) -> dict[str, Any]:
        """Save the gradients of one seeded step."""
        loss, gradients = self.training.gradients(self.seed)
        torch.save(gradients, path)
        return {"loss": loss}

    def train(self, path: str, steps: int, optimizer: str) -> dict[str, Any]:
        """Train for some steps; save the gradients of the first and of the last one."""
        rate = LEARNING_RATE[optimizer]
        tuner = OPTIMIZERS[optimizer](self.training.model.parameters(), lr=rate)
        torch.manual_seed(self.seed)
        losses: list[float] = []
        for loss in self.training.train(tuner, steps):
            if not losses:
                torch.save(collect_gradients(self.training.model), f"{path}.first")
            losses.append(loss)
        torch.save(collect_gradients(self.training.model), f"{path}.last")
        return {"losses": losses}


def answer(worker: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Obey one command; a failure is an answer too."""
    try:
        result: dict[str, Any] = getattr(worker, command.pop("do"))(**command)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return result


def private_stdout() -> TextIO:
    """The real standard output; whatever else prints goes to standard error."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def serve(made: Callable[[dict[str, Any]], Any]) -> None:
    """Obey until standard input ends, as what is ``made`` of the settings on the command line."""
    channel = private_stdout()
    worker = made(json.loads(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(answer(worker, json.loads(line))), file=channel, flush=True)


def _made(settings: dict[str, Any]) -> Worker:
    torch.set_num_threads(settings.pop("threads"))
    return Worker(**settings)


if __name__ == "__main__":
    serve(_made)

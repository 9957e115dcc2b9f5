"""Measured numbers on disk: one JSON file for each kind, device and torch version.

``{call: number}``, so that a second compilation, or a second process, measures nothing again.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from fxremat.disk_cache import write_whole


class NumberFile:
    """Measured numbers, by what they are of; a file that cannot be read counts as empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.numbers = self._read()

    def _read(self) -> dict[str, float]:
        with suppress(OSError, ValueError):
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if isinstance(data, dict):
                return {k: float(v) for k, v in data.items() if isinstance(v, (int, float))}
        return {}

    def add(self, key: str, number: float) -> None:
        """Keep one more number."""
        self.numbers = {**self.numbers, key: number}
        waiting = _waiting.get()
        if waiting is None:
            self.write()
        else:
            waiting[id(self)] = self

    def write(self) -> None:
        """All numbers, and what other processes have written meanwhile."""
        self.numbers = {**self._read(), **self.numbers}
        write_whole(self.path, json.dumps(self.numbers, indent=0))


_waiting: ContextVar[dict[int, NumberFile] | None] = ContextVar("_waiting", default=None)


@contextmanager
def written_together() -> Iterator[None]:
    """Inside, numbers are added in memory; each file is written once, at the end."""
    waiting: dict[int, NumberFile] = {}
    token = _waiting.set(waiting)
    try:
        yield
    finally:
        _waiting.reset(token)
        for file in waiting.values():
            file.write()


def number_path(directory: Path, device: torch.device, kind: str) -> Path:
    """The file for a kind of number, a device (a CPU with so many threads) and a torch version.

    On CUDA also for what decides which kernels the libraries take.
    """
    name = f"{platform.machine()}-{torch.get_num_threads()}threads"
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)}-{_how_cuda_chooses()}"
    plain = re.sub(r"[^\w.+-]+", "_", f"{device.type}-{name}-torch{torch.__version__}")
    return directory / kind / f"{plain}.json"


def _how_cuda_chooses() -> str:
    """The settings, and the version of cuDNN, as a part of a name."""
    cudnn: Any = torch.backends.cudnn
    precisions = (cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision)
    settings = {
        "benchmark": cudnn.benchmark,
        "deterministic": cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        "cudnn": cudnn.enabled,
    }
    chosen = [name for name, is_on in settings.items() if is_on]
    return "-".join([f"cudnn{cudnn.version()}", *precisions, *chosen])

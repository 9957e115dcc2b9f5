"""Measured numbers on disk: one JSON file for each kind, device and torch version.

``{call: number}``, so that a second compilation, or a second process, measures nothing again.
"""

from __future__ import annotations

import json
import platform
import re
from contextlib import suppress
from pathlib import Path

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
        """Keep one more number, and what other processes have written meanwhile."""
        self.numbers = {**self._read(), **self.numbers, key: number}
        write_whole(self.path, json.dumps(self.numbers, indent=0))


def number_path(directory: Path, device: torch.device, kind: str) -> Path:
    """The file for a kind of number, a device (a CPU with so many threads) and a torch version."""
    name = f"{platform.machine()}-{torch.get_num_threads()}threads"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    plain = re.sub(r"[^\w.+-]+", "_", f"{device.type}-{name}-torch{torch.__version__}")
    return directory / kind / f"{plain}.json"
